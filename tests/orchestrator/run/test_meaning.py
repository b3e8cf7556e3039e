"""What rows mean: every setting that decides it is recorded, compared where a run goes on, begins from another, or is
scored, and named with what was found and expected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.optimizers import Adagrad, Adam, Momentum, Optimizer
from podembed.embedding.row_optimizers.base import SlotSpec
from podembed.embedding.row_optimizers.custom import CustomRowOptimizer
from podembed.embedding.vocabulary.policies import LeastFrequent, LeastRecent, MinCount
from podembed.jobs.chaos.jobs import TinyModel
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.input_change import InputChanged
from podembed.orchestrator.run.input_record import INPUT_FILE, read_input
from podembed.orchestrator.run.meaning import (
    MeaningRecord,
    changes_of_dense_input,
    changes_of_run,
    changes_of_scoring,
    changes_of_table,
    kinds_held,
    meaning_of,
)
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.tools.inspect.inspect_run import describe, render
from podembed.workers.data.columns import DenseColumn, IdColumn, Label
from podembed.workers.data.config import CsvData, ParquetData
from podembed.workers.data.extra_columns import IntegerColumn
from podembed.workers.input.index import build_index
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import seal, unseal
from tests.orchestrator.run.claims_of import claims_of

ROWS = 40
# Edits of the job's code, as a user makes them between two starts.
EDITS: list[Callable[[JobConfig], JobConfig]] = []


def with_column(job: JobConfig, name: str, **changes: Any) -> JobConfig:
    column = replace(job.data.id_columns[name], **changes)
    return replace(job, data=replace(job.data, features={**job.data.features, name: column}))


def with_tables(job: JobConfig, **tables: TableConfig) -> JobConfig:
    return replace(job, features={name: FeatureConfig(tables.get(name, f.table)) for name, f in job.features.items()})


def with_data(job: JobConfig, **changes: Any) -> JobConfig:
    return replace(job, data=replace(job.data, **changes))


def table(optimizer: Optimizer | None = None, **changes: Any) -> TableConfig:
    return TableConfig(ROWS, 8, optimizer=optimizer or Adam(0.1), **changes)


def job_of(*, folder: str, rate: float = 0.1, beta: float = 0.9, edits: bool = True) -> JobConfig:
    features = {name: FeatureConfig(table(Adam(rate, beta_1=beta))) for name in ("user", "item", "word", "age")}
    job = JobConfig(
        name="meaning",
        features=features | {"seen": FeatureConfig(features["item"].table)},
        model=TinyModel(),
        data=ParquetData(
            f"{folder}/part.parquet",
            label="click",
            dense=("x", DenseColumn("y", "log1p")),
            extra=(IntegerColumn("n"),),
            features={
                "user": IdColumn("user", mode="hash"),
                "item": IdColumn("item"),
                "word": IdColumn("word", vocabulary=f"{folder}/words.txt"),
                "age": IdColumn("age", boundaries=(18.0, 65.0)),
                "seen": IdColumn("item"),
            },
        ),
        batch_size=4,
        num_lanes=2,
    )
    for edit in EDITS if edits else ():
        job = edit(job)
    return job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("meaning")
    ids = list(range(8))
    numbers = dict.fromkeys(("user", "item", "age", "n", "x", "y"), ids)
    columns = numbers | {"click": [0, 1] * 4, "buy": [1, 0] * 4, "word": ["a", "b"] * 4}
    pq.write_table(pa.table(columns), path / "part.parquet")
    (path / "words.txt").write_text("a\nb\n")
    return str(path)


@pytest.fixture
def job(folder: str) -> JobConfig:
    return job_of(folder=folder)


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[JobConfig], JobConfig]], None]:
    """Edits the job's code until the end of the test."""
    monkeypatch.setattr(f"{__name__}.EDITS", [])
    return lambda change: EDITS.append(change)


SALT = "feature 'user' (column 'user'): found salt=7, expected 0"
CHANGES: list[tuple[Callable[[JobConfig], JobConfig], list[str]]] = [
    (lambda job: with_column(job, "user", salt=7), [SALT]),
    (
        lambda job: with_column(job, "user", mode="as_is", missing="zero"),
        ["feature 'user' (column 'user'): found mode=\"as_is\", expected \"hash\""],
    ),
    (
        lambda job: with_column(job, "user", crossed_with=("age",)),
        [
            "feature 'user' (column 'user'): found crossed_with="
            '[{"boundaries": [], "column": "age", "since": null, "unit": null}], expected []'
        ],
    ),
    (
        lambda job: with_column(job, "user", missing="empty"),
        ["feature 'user' (column 'user'): found missing=\"empty\", expected \"zero\""],
    ),
    (
        lambda job: with_column(job, "word", num_reserved=2),
        ["feature 'word' (column 'word'): found num_reserved=2, expected 1"],
    ),
    (
        lambda job: with_column(job, "age", boundaries=(18.0, 60.0)),
        ["feature 'age' (column 'age'): found boundaries=[18.0, 60.0], expected [18.0, 65.0]"],
    ),
    (
        lambda job: with_column(job, "item", unit="h", since="2024-01-01"),
        [
            "feature 'item' (column 'item'): found unit=\"h\", expected null",
            "feature 'item' (column 'item'): found since=\"2024-01-01\", expected null",
        ],
    ),
    (
        lambda job: with_column(job, "item", column="user"),
        ["feature 'item' (column 'user'): found column=\"user\", expected \"item\""],
    ),
    (
        lambda job: with_tables(job, age=table(combiner="sum")),
        ["feature 'age' (column 'age'): found combiner=\"sum\", expected \"mean\""],
    ),
    (
        lambda job: with_tables(job, age=table(quantization_config=QuantizationConfig(4, -1.0, 1.0))),
        [
            "feature 'age' (column 'age'): found quantization="
            '{"lower": -1.0, "num_buckets": 4, "upper": 1.0}, expected null'
        ],
    ),
    (
        lambda job: with_data(job, dense=("x", DenseColumn("y", "identity"))),
        ['dense column \'y\': found transform="identity", expected "log1p"'],
    ),
    (
        lambda job: with_data(job, dense=(DenseColumn("y", "log1p"), "x")),
        ["dense columns: found y, x, expected x, y, in this order"],
    ),
    (
        lambda job: with_data(job, extra=(IntegerColumn("n", missing=3),)),
        ["extra column 'n': found missing=3, expected 0"],
    ),
    (lambda job: with_data(job, label="buy"), ["labels: found buy, expected click, in this order"]),
    (
        lambda job: with_data(job, labels=(Label("click", missing="mask"),)),
        ['label \'click\': found missing="mask", expected "refuse"'],
    ),
    (
        lambda job: with_data(job, sample_weight="n"),
        ["sample weights: found n, expected none, in this order"],
    ),
    (
        lambda job: with_tables(job, age=table(Adam(0.1, beta_1=0.8))),
        ["optimizer of table 'table_3': found beta_1=0.8, expected 0.9"],
    ),
    (
        lambda job: replace(job, features=dict(reversed([*job.features.items()]))),
        ["features: found seen, age, word, item, user, expected user, item, word, age, seen, in this order"],
    ),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words[0] for _, words in CHANGES])
def test_each_difference_is_named_with_what_was_found_and_expected(
    job: JobConfig, change: Callable[[JobConfig], JobConfig], words: list[str]
) -> None:
    found = changes_of_run(meaning_of(job), meaning_of(change(job)))
    assert found[: len(words)] == words


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job,
        lambda job: with_tables(job, age=table(Adam(0.7, beta_1=0.9))),
        lambda job: with_tables(job, age=table(Adam(lambda step: 0.1 / (step + 1)))),
        lambda job: with_tables(job, item=table(invalid_ids="drop"), seen=table(invalid_ids="drop")),
        lambda job: replace(job, dense_optimizer=optax.sgd(0.1), num_epochs=7, schedule=optax.linear_schedule(1, 0, 9)),
        lambda job: with_column(job, "item", salt=9),  # its ids are not hashed
        lambda job: with_data(job, max_bad_rows=4),
    ],
)
def test_rates_and_what_has_no_effect_may_change(job: JobConfig, change: Callable[[JobConfig], JobConfig]) -> None:
    before, now = meaning_of(job), meaning_of(change(job))
    same = replace(
        now,
        features=tuple(replace(one, table=was.table) for one, was in zip(now.features, before.features, strict=True)),
    )
    assert changes_of_run(before, same) == []


def test_first_accumulators_rules_and_their_constants_are_compared(job: JobConfig) -> None:
    def found(before: Optimizer, now: Optimizer) -> list[str]:
        return changes_of_run(*(meaning_of(with_tables(job, age=table(one))) for one in (before, now)))

    where = "optimizer of table 'table_3': found"
    assert found(Adagrad(0.1), Adagrad(0.1, 0.5)) == [f"{where} initial_accumulator_value=0.5, expected 1e-08"]
    assert found(Adagrad(0.1), Momentum(0.1, 0.9)) == [f'{where} optimizer="Momentum", expected "Adagrad"']
    assert found(Adagrad(0.1, clipvalue=1), Adagrad(0.1, clipvalue=1.0)) == []

    def rule(gradient: Any, row: Any, slots: Any, learning_rate: Any, constants: Any) -> Any:
        return row, slots

    own = CustomRowOptimizer(rule, slots=(SlotSpec(name="s", width="row"),), hyperparameters={"m": 0.9})
    assert found(own, own) == []
    assert found(own, replace(own, hyperparameters={"m": 0.8})) == [
        f'{where} hyperparameters=[["m", 0.8]], expected [["m", 0.9]]'
    ]


def test_a_vocabulary_may_grow_at_its_end_alone(job: JobConfig, tmp_path: Path) -> None:
    before, path = meaning_of(job), tmp_path / "words.txt"
    for text, words in (
        ("a\nb\n", []),
        ("a\nb\nc\n", []),
        ("b\na\n", ["found other values, or another order, in the first 2 lines"]),
        ("c\na\nb\n", ["found other values, or another order, in the first 2 lines"]),
        ("a\n", ["found 1 values in the vocabulary"]),
    ):
        path.write_text(text)
        now = meaning_of(with_column(job, "word", vocabulary=str(path)))
        for compared in (changes_of_run, changes_of_scoring):
            found = compared(before, now)
            assert len(found) == len(words), text
            assert all(word in phrase and str(path) in phrase for word, phrase in zip(words, found, strict=True))


def test_scores_do_not_depend_on_labels_rates_and_optimizers(job: JobConfig) -> None:
    before = meaning_of(job)
    other = with_data(with_tables(job, age=table(Adam(0.1, beta_1=0.8))), label="buy")
    assert changes_of_scoring(before, meaning_of(other)) == []
    # A model that reads an extra column finds out itself whether it is there.
    assert changes_of_scoring(before, meaning_of(with_data(job, extra=()))) == []
    assert changes_of_scoring(before, meaning_of(with_column(job, "user", salt=7))) == [SALT]
    renamed = meaning_of(with_column(job, "item", column="product"))
    assert changes_of_scoring(before, renamed) != []
    assert changes_of_scoring(before, renamed, free={"column"}) == []


# ---------------------------------------------------------------------- tables of another run


def of_table(before: JobConfig, now: JobConfig, source: str, name: str, **how: bool) -> list[str]:
    how = {"is_chosen": False, "with_slots": True} | how
    return changes_of_table(meaning_of(before), meaning_of(now), source=source, table=name, **how)


def test_tables_without_names_are_taken_by_position_only_where_they_are_looked_up_alike(job: JobConfig) -> None:
    order = ["item", "user", "word", "age", "seen"]
    swapped = replace(job, features={name: job.features[name] for name in order})
    (found,) = of_table(job, swapped, "table_0", "table_0")
    assert found == (
        "it has no name, and is looked up by 'item', 'seen', in the commit by 'user'; name the tables, or say by "
        "table_0=rename=table_1 which is meant"
    )
    assert of_table(job, swapped, "table_1", "table_0", is_chosen=True) == []
    assert of_table(job, job, "table_0", "table_0") == []
    # A feature or a column may have another name, and further features may share the table.
    renamed = with_column(job, "user", column="member")
    assert of_table(job, renamed, "table_0", "table_0") == []


def test_each_feature_must_find_its_rows_in_the_way_of_one_that_was_trained(job: JobConfig) -> None:
    assert of_table(job, with_column(job, "user", salt=7), "table_0", "table_0") == [SALT]
    assert of_table(job, with_column(job, "user", column="other"), "table_0", "table_0") == []
    further = with_column(job, "seen", mode="hash")
    (found, *_) = of_table(job, further, "table_1", "table_1")
    assert found.startswith("feature 'seen' (column 'item'): found mode=\"hash\", expected \"as_is\"")
    assert of_table(further, job, "table_1", "table_1") == []
    # Another combiner, or a table that was not looked up, say nothing about rows.
    assert of_table(job, with_tables(job, age=table(combiner="sum")), "table_3", "table_3") == []
    assert of_table(job, job, "imported", "table_0") == []


def test_constants_count_where_slots_are_loaded(job: JobConfig) -> None:
    other = with_tables(job, user=table(Adam(0.7, beta_1=0.8)))
    assert of_table(job, other, "table_0", "table_0") == ["its optimizer: found beta_1=0.8, expected 0.9"]
    assert of_table(job, other, "table_0", "table_0", with_slots=False) == []


def test_the_dense_model_takes_the_same_numbers_in_the_same_order(job: JobConfig) -> None:
    def found(now: JobConfig) -> list[str]:
        return changes_of_dense_input(meaning_of(job), meaning_of(now))

    assert found(with_column(job, "user", salt=7)) == []
    assert found(with_data(job, dense=("x", "y"))) == [
        'dense column \'y\': found transform="identity", expected "log1p"'
    ]
    assert found(with_tables(job, age=table(combiner="sum"))) == [
        "feature 'age' (column 'age'): found combiner=\"sum\", expected \"mean\""
    ]
    without = {name: one for name, one in job.features.items() if name != "age"}
    data = replace(job.data, features={name: one for name, one in job.data.features.items() if name != "age"})
    assert found(replace(job, features=without, data=data)) == []


# ---------------------------------------------------------------------- a run that goes on


def recorded_of(job: JobConfig) -> MeaningRecord:
    return meaning_of(job, build_index(job.resolved_data))


def begin(folder: str, path: Path) -> str:
    reference = JobReference(function=f"{__name__}:job_of", arguments={"folder": folder})
    return create_run(str(path / "run"), reference.resolve(), reference).url


def test_an_edited_job_is_refused_until_it_is_accepted_which_is_recorded(
    folder: str, tmp_path: Path, edit: Any
) -> None:
    url = begin(folder, tmp_path)
    assert read_input(Store(url)).meaning == recorded_of(job_of(folder=folder))
    open_run(url)
    edit(lambda job: with_column(job, "user", salt=7))
    edit(lambda job: with_tables(job, age=table(Adam(0.1, beta_1=0.8))))
    with pytest.raises(InputChanged) as refused:
        open_run(url)
    for words in (SALT, "optimizer of table 'table_3': found beta_1=0.8", "pass --accept-input-change"):
        assert words in str(refused.value)
    reference = JobReference(function=f"{__name__}:job_of", arguments={"folder": folder})
    with pytest.raises(InputChanged, match="salt=7, expected 0"):
        create_run(url, reference.resolve(), reference)
    told: list[str] = []
    claims_of(open_run(url, accept_input_change=True), told=told).acquire().release()
    assert f"the input changed, accepted from step 0 on: {SALT}" in told[0]
    (change,) = read_input(Store(url)).accepted
    assert change.changes[0] == SALT
    assert change.now.meaning == recorded_of(job_of(folder=folder))
    assert f"From step 0 on other input, accepted 1 s ago: {SALT}" in render(
        describe(Store(url), now_unix_s=change.accepted_unix_s + 1)
    )
    # What was accepted is what later starts compare with: a second one, and one with the code as it was before.
    claims_of(open_run(url)).acquire().release()
    EDITS.clear()
    with pytest.raises(InputChanged, match="salt=0, expected 7"):
        open_run(url)


def test_a_shared_row_is_no_key_s_whatever_is_accepted(folder: str, tmp_path: Path, edit: Any) -> None:
    """With one key less there are as many rows."""
    edit(lambda job: with_tables(job, user=TableConfig(capacity=9, dim=8, optimizer=Adam(0.1))))
    url = begin(folder, tmp_path)
    edit(lambda job: with_tables(job, user=TableConfig(capacity=8, dim=8, optimizer=Adam(0.1), default="shared")))
    with pytest.raises(ConfigurationError, match=r'user\': found default="shared", expected "first".* began with'):
        open_run(url, accept_input_change=True)


def test_vocabularies_that_changed_places_are_refused_though_the_files_are_the_same(
    folder: str, tmp_path: Path, edit: Any
) -> None:
    for name, text in (("one", "a\nb\n"), ("two", "b\na\n")):
        (tmp_path / f"{name}.txt").write_text(text)

    def of(first: str, second: str) -> Callable[[JobConfig], JobConfig]:
        def change(job: JobConfig) -> JobConfig:
            job = with_column(job, "word", vocabulary=str(tmp_path / first))
            seen = {"seen": IdColumn("word", vocabulary=str(tmp_path / second))}
            return with_tables(with_data(job, features={**job.data.features, **seen}), seen=table())

        return change

    edit(of("one.txt", "two.txt"))
    url = begin(folder, tmp_path)
    EDITS[:] = [of("two.txt", "one.txt")]
    with pytest.raises(InputChanged, match=r"feature 'word' .*other values, or another order, in the first 2 lines"):
        open_run(url)


def test_settings_may_change_constants_and_what_they_change_is_recorded(folder: str, tmp_path: Path, edit: Any) -> None:
    url = begin(folder, tmp_path)
    claims_of(open_run(url, settings={"rate": 0.2})).acquire().release()
    assert read_input(Store(url)).accepted == ()
    claims_of(open_run(url, settings={"beta": 0.8})).acquire().release()
    assert all("beta_1=0.8, expected 0.9" in phrase for phrase in read_input(Store(url)).accepted[0].changes)
    claims_of(open_run(url)).acquire().release()
    # A setting accepts nothing that was edited.
    edit(lambda job: with_column(job, "user", salt=7))
    with pytest.raises(InputChanged, match="salt=7"):
        open_run(url, settings={"rate": 0.3})


def test_the_first_accumulator_that_a_run_keeps_is_said(folder: str, tmp_path: Path, edit: Any) -> None:
    edit(lambda job: with_tables(job, age=table(Adagrad(0.1))))
    url = begin(folder, tmp_path)
    told: list[Any] = []
    open_run(url, emit=told.append)
    assert told == []
    edit(lambda job: replace(job, initial_accumulator_value=0.5))
    run = open_run(url, emit=told.append)
    assert [(one.found, one.kept) for one in told] == [(0.5, 1e-8)]
    assert run.job.initial_accumulator_value == 1e-8
    # No other optimizer has one.
    edit(lambda job: with_tables(job, age=table()))
    with pytest.raises(RuntimeError, match="slots"):
        open_run(url, emit=told.append)
    assert len(told) == 1


def test_an_older_run_goes_on_and_has_the_record_from_then_on(folder: str, tmp_path: Path, edit: Any) -> None:
    url = begin(folder, tmp_path)
    path = Path(url, INPUT_FILE)

    def make_older() -> None:
        document = unseal(INPUT_FILE, path.read_bytes())
        for file in document["training"]:
            del file["extra_content"]
        path.write_bytes(seal({name: value for name, value in document.items() if name not in ("meaning", "sha256")}))

    make_older()
    assert not read_input(Store(url)).damaged
    told: list[str] = []
    claims_of(open_run(url), told=told).acquire().release()
    assert "INPUT.json has it from now on" in told[0]
    assert read_input(Store(url)).meaning == recorded_of(job_of(folder=folder))
    edit(lambda job: with_column(job, "user", salt=7))
    with pytest.raises(InputChanged, match="salt=7"):
        open_run(url)


def test_a_record_of_another_version_is_compared_by_the_settings_that_both_know(job: JobConfig) -> None:
    now = meaning_of(job)
    first = now.features[0]
    fewer = {name: text for name, text in first.settings.items() if name != "salt"}
    before = replace(now, features=(replace(first, settings=fewer | {"gone": "1"}), *now.features[1:]))
    assert changes_of_run(before, now) == []


def test_text_in_the_place_of_integers_is_told_of_all_sources_but_where_it_is_lines_of_a_vocabulary(
    job: JobConfig, tmp_path: Path
) -> None:
    table = pq.read_table(job.data.paths[0])
    for name in ("user", "word"):
        table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.string()))
    pq.write_table(table, tmp_path / "text.parquet")
    before = recorded_of(job)
    text = recorded_of(with_data(job, paths=f"{tmp_path}/text.parquet"))
    phrase = "feature 'user' (column 'user'): found holds=\"text\", expected \"integers\""
    assert changes_of_run(before, text) == [phrase]
    users = {"source": "table_0", "table": "table_0", "is_chosen": False, "with_slots": False}
    assert changes_of_table(before, text, **users) == [phrase]
    csv = CsvData("x.csv", label="click", dense=job.data.dense, features=job.data.features, strings=("word",))
    was, now = (meaning_of(replace(job, data=replace(csv, strings=names))) for names in (("word",), ("word", "user")))
    assert changes_of_scoring(was, now) == [phrase]
    assert kinds_held(was, job.data.id_columns)["user"] == "integers"


def test_policies_of_keys_that_come_and_go_are_compared(job: JobConfig) -> None:
    def found(**now: Any) -> list[str]:
        settings = {"admit": MinCount(2), "evict": LeastRecent(), "default": "first"}
        tables = [TableConfig(capacity=9, dim=8, optimizer=Adam(0.1), **one) for one in (settings, settings | now)]
        return changes_of_run(*(meaning_of(with_tables(job, user=one)) for one in tables))

    where = "feature 'user' (column 'user'): found"
    assert found() == []
    assert found(admit=MinCount(3)) == [f'{where} admit="MinCount(count=3)", expected "MinCount(count=2)"']
    assert found(evict=LeastFrequent(7), forget_after=9) == [
        f"{where} forget_after=9, expected null",
        f'{where} evict="LeastFrequent(half_life=7)", expected "LeastRecent()"',
    ]
    static, dynamic = (meaning_of(with_tables(job, user=one)) for one in (table(), TableConfig(capacity=9, dim=8)))
    names = [record.features[0].table for record in (static, dynamic)]
    (told,) = changes_of_table(static, dynamic, source=names[0], table=names[1], is_chosen=True, with_slots=False)
    assert told == "feature 'user': found whole hashes as keys, expected hashes modulo the number of rows"
    assert found(default="zeros") == [f'{where} default="zeros", expected "first"']
