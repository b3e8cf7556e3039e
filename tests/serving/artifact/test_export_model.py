"""Predictions and exports of trained models: an export in a process without our packages has the scores of `predict` to
the last bit.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact.export_model import _write_safetensors, export_model
from podembed.serving.artifact.exported_model import LoadedModel, ModelError, _safetensors, load, program_of
from podembed.serving.predict.committed_model import open_model
from podembed.serving.predict.evaluate import evaluate
from podembed.serving.predict.predict import _dtype, predict
from podembed.serving.predict.trained_kinds import _alike, _read_as_text, index_as_trained, trained_kinds
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import CsvData, NpyData
from podembed.workers.data.input_errors import InputError
from podembed.workers.formats.registry import declared_content
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.model.batch import ModelBatch, WithState
from podembed.workers.model.context import StepContext
from tests.orchestrator.committed_tables import flip_byte
from tests.pages import blocks
from tests.run_state import committed_state
from tests.serving.artifact import serving_process
from tests.serving.predict import served_data
from tests.serving.predict.served_data import NUM_ROWS, columns_job, pooled_job, sequence_job, write_data
from tests.training import fit_job


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def jobs(data: Path) -> tuple[JobConfig, ...]:
    return pooled_job(str(data)), sequence_job(str(data)), columns_job(str(data))


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    storage = tmp_path_factory.mktemp("runs")
    paths = []
    for name in ("pooled_job", "sequence_job", "columns_job"):
        job = JobReference(function=f"{served_data.__name__}:{name}", arguments={"folder": str(data)})
        paths.append(fit_job(job, storage, name=name).path)
    return paths


@pytest.fixture(scope="module")
def exports(runs: list[str], jobs: tuple[JobConfig, ...], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("exports") / job.name for job in jobs]
    for run, job, folder in zip(runs, jobs, folders, strict=True):
        export_model(run, out=str(folder), job=job)
    return folders


def table_of(data: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(data.glob("part-*.parquet"))])


def predicted(run: str, job: JobConfig, data: Path, out: Path, **options: Any) -> pa.Table:
    predict(run, job=job, data=[str(data / "part-*.parquet")], out=str(out), **options)
    return pq.read_table(out)


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    return np.array(column.to_pylist(), np.float32)


def test_an_export_alone_has_the_scores_of_predict_to_the_last_bit(
    runs: list[str], jobs: tuple[JobConfig, ...], exports: list[Path], data: Path, tmp_path: Path
) -> None:
    columns = table_of(data).drop_columns(["click"])
    listed = {name: columns.column(name).to_pylist() for name in columns.column_names}
    listed["seen"] = columns.column("seen").cast(pa.int64()).to_pylist()
    (tmp_path / "columns.json").write_text(json.dumps(listed, default=lambda time: time.isoformat()))
    command = [sys.executable, "-I", serving_process.__file__, str(tmp_path), *map(str, exports)]
    subprocess.run(command, check=True, timeout=120)
    for number, (run, job) in enumerate(zip(runs, jobs, strict=True)):
        scores = np.load(tmp_path / f"scores-{number}.npz")
        found = predicted(run, job, data, tmp_path / f"{number}.parquet")
        assert sorted(found.column_names) == sorted(set(scores.files) - {"predict"})
        for name in found.column_names:
            assert numbers(found.column(name)).tobytes() == scores[name].astype(np.float32).tobytes(), name
        assert len(np.unique(scores["predict"])) > NUM_ROWS / 2, "they tell samples apart"
        if number:
            np.testing.assert_array_equal(scores["predict"], scores["scores"])
        if number == 1:
            assert sorted(found.column_names) == ["scores", "user"], "what belongs to no sample is left out"


def test_predictions_are_those_that_evaluations_judge_up_to_rounding(
    runs: list[str], jobs: tuple[JobConfig, ...], data: Path, tmp_path: Path
) -> None:
    found = predicted(runs[0], jobs[0], data, tmp_path / "p.parquet", columns=["click", "history"])
    assert found.column_names == ["click", "history", "score"]
    expected = table_of(data)
    assert found.column("history").to_pylist() == expected.column("history").to_pylist()
    labels, logits = found.column("click").to_numpy(), numbers(found.column("score")).astype(float)
    loss = (np.logaddexp(0, logits) - labels * logits).mean()
    assert evaluate(runs[0], job=jobs[0]).evaluation.loss == pytest.approx(loss, rel=1e-6)


def test_data_needs_no_labels_and_malformed_rows_have_no_scores(
    runs: list[str], jobs: tuple[JobConfig, ...], data: Path, tmp_path: Path
) -> None:
    table = table_of(data).drop_columns(["click"]).slice(0, 100)
    whole = predicted(runs[0], jobs[0], data, tmp_path / "whole.parquet").column("score").to_pylist()
    items = table.column("item").to_pylist()
    items[70] = 40
    pq.write_table(
        table.set_column(table.column_names.index("item"), "item", pa.array(items)), tmp_path / "part-9.parquet"
    )
    with pytest.raises(InputError, match=r"Found id 40 in .*row 70, column 'item'"):
        predicted(runs[0], jobs[0], tmp_path, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    tolerant = replace(jobs[0], data=replace(jobs[0].data, max_bad_rows=1))
    found = predicted(runs[0], tolerant, tmp_path, tmp_path / "out.parquet").column("score").to_pylist()
    assert found[70] is None
    assert found[:70] == pytest.approx(whole[:70], rel=1e-5)
    assert found[71:] == pytest.approx(whole[71:100], rel=1e-5)


def test_kept_columns_of_another_type_are_named(
    runs: list[str], jobs: tuple[JobConfig, ...], data: Path, tmp_path: Path
) -> None:
    table, files = table_of(data).slice(0, 40), tmp_path / "files"
    files.mkdir()
    numbers = pa.array(range(40))
    pq.write_table(table.append_column("note", numbers), files / "part-0.parquet")
    # 16 bits become 64 as they are.
    pq.write_table(table.append_column("note", numbers.cast(pa.int16())), files / "part-1.parquet")
    found = predicted(runs[0], jobs[0], files, tmp_path / "out.parquet", columns=["note"])
    assert found.column("note").to_pylist() == 2 * list(range(40))
    pq.write_table(table.append_column("note", pa.array(["a word"] * 40)), files / "part-1.parquet")
    message = r"Found column 'note' of type string in .*part-1.parquet, with values that int64 does not hold"
    with pytest.raises(ConfigurationError, match=message):
        predicted(runs[0], jobs[0], files, tmp_path / "second.parquet", columns=["note"])
    pq.write_table(table, files / "part-1.parquet")
    with pytest.raises(ConfigurationError, match=r"Found no column 'note' in .*part-1.parquet. Expected it there"):
        predicted(runs[0], jobs[0], files, tmp_path / "second.parquet", columns=["note"])
    assert not (tmp_path / "second.parquet").exists()


def test_what_predict_refuses(runs: list[str], jobs: tuple[JobConfig, ...], data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    with pytest.raises(ConfigurationError, match=r"Found no column 'nothing' in .*Expected one of .*'price'"):
        predicted(runs[0], jobs[0], data, out, columns=["nothing"])
    with pytest.raises(ConfigurationError, match=r"--columns item item beside the outputs score.*each name once"):
        predicted(runs[0], jobs[0], data, out, columns=["item", "item"])
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    pq.write_table(table_of(data).drop_columns(["word"]), narrow / "part-0.parquet")
    with pytest.raises(InputError, match=r"Found no column named 'word' in .*part-0.parquet"):
        predicted(runs[0], jobs[0], narrow, out)
    with pytest.raises(ConfigurationError, match=r"a model that cannot be exported.*Expected functions of JAX for any"):
        predicted(runs[1], replace(jobs[1], model=ByNumber(jobs[1].model)), data, out)
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(ConfigurationError, match="Found a file at .*--force"):
        predicted(runs[0], jobs[0], data, out)
    assert len(predicted(runs[0], jobs[0], data, out, force=True)) == NUM_ROWS
    mine = Path(shutil.copy(data / "part-0.parquet", tmp_path / "part-0.parquet"))
    with pytest.raises(ConfigurationError, match="Found .*part-0.parquet at --out and in the data"):
        predicted(runs[0], jobs[0], tmp_path, mine, force=True)
    assert mine.read_bytes() == (data / "part-0.parquet").read_bytes()


def test_values_of_another_kind_than_in_training_are_refused(
    runs: list[str], jobs: tuple[JobConfig, ...], data: Path, tmp_path: Path
) -> None:
    """The hash of 7 is not that of "7", and days since 1970 are no counts."""
    table, model, path = table_of(data), open_model(runs[0], job=jobs[0]), tmp_path / "part-0.parquet"

    def write(column: str, values: Any) -> None:
        pq.write_table(table.set_column(table.column_names.index(column), column, values), path)

    days = pa.array(np.arange(NUM_ROWS).astype("datetime64[D]"))
    declared = replace(jobs[0].resolved_data, paths=(str(path),), eval_paths=())
    for column, values, found, expected in (
        ("user", pa.array(range(NUM_ROWS)), "integers", "text"),
        ("tags", pa.array([[1]] * NUM_ROWS), "integers", "text"),
        ("item", days, "times", "integers"),
        ("visits", days, "times", "numbers"),
    ):
        write(column, values)
        words = f"Found column '{column}' with {found} in .*part-0.parquet. Expected {expected}, as the run in .* was "
        with pytest.raises(InputError, match=words):
            index_as_trained(model, declared)
    with pytest.raises(InputError, match="Found column 'visits' with times"):
        evaluate(runs[0], job=jobs[0], data=str(path))
    with pytest.raises(InputError, match="Found column 'visits' with times"):
        predicted(runs[0], jobs[0], tmp_path, tmp_path / "out.parquet")
    write("rank", days)
    columns = replace(jobs[2].resolved_data, paths=(str(path),))
    with pytest.raises(InputError, match="Found column 'rank' with times in .*part-0.parquet. Expected numbers, as"):
        index_as_trained(open_model(runs[2], job=jobs[2]), columns)
    # One id is a list of one.
    write("tags", table["user"])
    assert index_as_trained(model, declared).num_rows == NUM_ROWS
    # Lines of a vocabulary are integers and text alike.
    known = {"item": "integers", "word": "integers"}
    vocabulary = replace(declared, features={"word": declared.id_columns["word"]})
    assert _read_as_text(vocabulary) == {"word"}
    assert _alike(known["word"], in_text=True) == _alike("text", in_text=True)


def test_runs_without_a_record_of_their_input_are_read(
    runs: list[str], jobs: tuple[JobConfig, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = trained_kinds(open_model(runs[1], job=jobs[1]))
    assert kinds == {"item": "integers", "history": "integers", "seen": "times"} | dict.fromkeys(
        ("price", "image", "visits"), "numbers"
    )
    run = Path(shutil.copytree(runs[1], tmp_path / "run"))
    (run / "INPUT.json").write_text("{")
    assert trained_kinds(open_model(run, job=jobs[1])) == {}
    assert "INPUT.json" in capsys.readouterr().out
    (run / "INPUT.json").unlink()
    assert trained_kinds(open_model(run, job=jobs[1])) == {}


def test_text_files_hold_what_their_declaration_says(jobs: tuple[JobConfig, ...]) -> None:
    csv = CsvData("x.csv", label="y", dense=("n",), features={"a": IdColumn("a", "hash")}, times=("n",))
    assert declared_content(csv) == "a: integers, n: times"
    assert declared_content(replace(csv, strings=("a",))) == "a: text, n: times"
    arrays = NpyData("x_labels.npy", features={"a": IdColumn("cat_0"), "b": IdColumn("int_0", boundaries=(1.0,))})
    assert declared_content(arrays) == "cat_0: integers, int_0: numbers"
    assert declared_content(jobs[0].data) == ""


class WithWholeNumbers:
    """A model with outputs that float32 does not hold, and with those that Arrow does not have."""

    def __init__(self, inner: Any) -> None:
        self.init, self._inner = inner.init, inner

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        made = self._inner.apply(params, batch, context)
        at = batch.dense[:, 0].astype(jnp.int32) * 0 + (1 << 24) + 1
        more = {"at": at, "pair": jnp.stack([at, -at], axis=1), "is_odd": at % 2 == 1, "half": at.astype(jnp.bfloat16)}
        return WithState({"scores": made.value["scores"]} | more, made.state)


def test_predictions_keep_their_type(runs: list[str], jobs: tuple[JobConfig, ...], data: Path, tmp_path: Path) -> None:
    job = replace(jobs[1], model=WithWholeNumbers(jobs[1].model))
    found = predicted(runs[1], job, data, tmp_path / "typed.parquet")
    kinds = {"at": "int32", "half": "float", "is_odd": "bool", "scores": "float"}
    assert {name: str(found.schema.field(name).type) for name in kinds} == kinds
    assert found.schema.field("pair").type == pa.list_(pa.int32(), 2)
    odd = (1 << 24) + 1
    assert found.to_pylist()[0] == found.to_pylist()[0] | {"at": odd, "pair": [odd, -odd], "is_odd": True}
    assert found.column("half").to_pylist()[0] == 1 << 24
    with pytest.raises(ConfigurationError, match="Found output 'turn' of type complex64. Expected floating point, int"):
        _dtype("turn", np.dtype(np.complex64))


class WithVisits:
    """A model whose scores have a column of the data on top."""

    def __init__(self, inner: Any) -> None:
        self.init, self._inner = inner.init, inner

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        made = self._inner.apply(params, batch, context)
        return WithState(made.value | {"scores": made.value["scores"] + batch.columns["visits"]}, made.state)


class ByNumber:
    """A model that asks how many samples there are."""

    def __init__(self, inner: Any) -> None:
        self.init, self._inner = inner.init, inner

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        return self._inner.apply(params, batch, context) if batch.dense.shape[0] > 8 else WithState({}, {})


def test_extra_columns_reach_predictions(
    runs: list[str], jobs: tuple[JobConfig, ...], data: Path, tmp_path: Path
) -> None:
    job = replace(jobs[1], model=WithVisits(jobs[1].model), data=replace(jobs[1].data, extra=("visits",)))
    found = predicted(runs[1], job, data, tmp_path / "more.parquet", columns=["visits"])
    plain = predicted(runs[1], jobs[1], data, tmp_path / "plain.parquet")
    more = numbers(found.column("scores")) - numbers(plain.column("scores"))
    np.testing.assert_allclose(more, numbers(found.column("visits")), atol=1e-3)
    export_model(runs[1], out=str(tmp_path / "out"), job=job)
    exported = load(str(tmp_path / "out"))
    assert exported.columns.count("visits") == 1


@pytest.fixture(scope="module")
def model(exports: list[Path]) -> LoadedModel:
    return load(str(exports[0]))


ROW = {
    "price": 1.5,
    "image": [0.5, None, 2],
    "visits": 3,
    "seen": np.datetime64("2024-05-01T12:00"),
    "user": "tool",
    "word": "w3",
    "item": 7,
    "wild": 5,
    "history": [1, 2],
    "tags": ["x"],
    "brands": ["y", "z"],
    "shares": [0.5, 2.0],
}


def columns_of(*rows: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {name: [row[name] for row in rows] for name in ROW}
    return made | {"seen": np.array(made["seen"])}


def test_one_sample_and_many_have_the_same_scores(model: LoadedModel) -> None:
    rows = [ROW, ROW | {"user": None, "price": None, "history": None}, ROW | {"tags": [], "word": ""}] * 30
    together = model.predict(columns_of(*rows))
    assert together.shape == (90,)
    assert len(np.unique(together[:3])) == 3
    # To the last bit, alone, beside few, and where another run of the program begins.
    for count in (1, 3, 50, 64, 65):
        for start in (0, 7, 90 - count):
            found = model.predict(columns_of(*rows[start : start + count]))
            np.testing.assert_array_equal(found, together[start : start + count])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"item": 40}, r"Found id 40 in column 'item'. Expected 0 to 39"),
        ({"item": "seven"}, r"Found text, such as 'seven', in column 'item'. Expected integers, as .*Send integers"),
        ({"user": 0.5}, r"Found numbers, such as 0.5, in column 'user'. Expected text, as the model was trained with"),
        ({"price": float("nan")}, r"Found nan in column 'price'. Expected finite numbers"),
        (
            {"seen": 7},
            r"Found integers, such as .*7.*, in column 'seen'. Expected times: datetime64, or text in ISO 8601",
        ),
        ({"image": [1, 2]}, r"Found 2 numbers in column 'image'. Expected 3, or None for zeros"),
        ({"price": "much"}, r"in column 'price'. Expected numbers"),
        ({"history": [1, [2, 3]]}, r"Found a list in a list of column 'history': \[2, 3\]. Expected one list"),
        ({"history": [[1, 2], [3, 4]]}, r"Found a list in a list of column 'history': \[1, 2\]. Expected one list"),
        ({"shares": [[0.5], [1.0]]}, r"Found a list in a list of column 'shares': \[0.5\]"),
        ({"image": [[1], [2], [3]]}, r"Found a list in a list of column 'image': \[1\]"),
        ({"brands": None, "shares": [0.5]}, r"Found 1 weights in column 'shares' for 0 ids. Expected as many"),
        ({"shares": [0.5]}, r"Found 1 weights in column 'shares' for 2 ids"),
        ({"shares": [0.5, float("inf")]}, r"Found inf in column 'shares'. Expected finite numbers"),
        ({"shares": [0.5, None]}, r"Found object in column 'shares'. Expected a number for each id"),
    ],
)
def test_columns_that_do_not_fit_are_refused(model: LoadedModel, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model.predict(columns_of(ROW | changed))


def test_columns_that_are_missing_are_named(model: LoadedModel) -> None:
    columns = columns_of(ROW)
    with pytest.raises(ModelError, match=r"without \['word'\]. Expected \['price', .*'wild'\]"):
        model.predict({name: values for name, values in columns.items() if name != "word"})
    with pytest.raises(ModelError, match=r"'item': 2.*Expected one length"):
        model.predict(columns | {"item": [1, 2]})
    with pytest.raises(ModelError, match=r"'item': 0.*Expected one length"):
        model.predict(columns | {"item": []})


def test_what_is_no_column_is_refused(model: LoadedModel) -> None:
    """Keys of a mapping and letters of a text are no samples."""
    columns = columns_of(ROW, ROW)
    frame = {name: dict(enumerate(values)) for name, values in columns.items()}
    with pytest.raises(
        ModelError, match=r"Found dict in column 'price'. Expected a list or an array .*to_dict\('list'"
    ):
        model.predict(frame)
    for wrong in ("no", b"no", {7, 8}, 7, None, np.array(7), iter([7, 8])):
        with pytest.raises(ModelError, match=f"Found {type(wrong).__name__} in column 'item'. Expected a list or an"):
            model.predict(columns | {"item": wrong})
    for wrong in ([ROW, ROW], "price", None):
        with pytest.raises(ModelError, match=f"Found {type(wrong).__name__} in the place of columns. Expected a mappi"):
            model.predict(wrong)
    with pytest.raises(ModelError, match=r"Found 'x' and 7 in column 'tags'. Expected values of one kind"):
        model.predict(columns | {"tags": [["x"], [7]]})


def test_columns_of_tables_stand_for_arrays(model: LoadedModel) -> None:
    columns = columns_of(ROW | {"image": [0.5, 0, 2]}, ROW | {"image": [1, 2, 3]})
    columns["seen"] = columns["seen"].astype("datetime64[s]")
    found = model.predict({name: pa.chunked_array([pa.array(values)]) for name, values in columns.items()})
    np.testing.assert_array_equal(found, model.predict(columns))


def test_columns_that_only_a_loss_reads_are_not_asked_for(exports: list[Path], data: Path, runs: list[str]) -> None:
    """Training needs the column `click`, as an extra one, and the table of items."""
    named = ["price", "visits", "seen", "rank", "serial", "opened", "image", "marks", "serials", "times"]
    assert load(str(exports[2])).columns == named


COLUMNS = {
    "price": 1.5,
    "visits": 3,
    "seen": "2024-05-01T12:00",
    "rank": None,
    "serial": 1 << 60,
    "opened": None,
    "image": [1, None, 2.5],
    "marks": None,
    "serials": [1, 2, 3, 4],
    "times": ["2024-05-01", None],
}


def rows_of(*rows: dict[str, Any]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in COLUMNS}


def test_arrays_stand_for_lists_in_extra_columns(exports: list[Path]) -> None:
    model = load(str(exports[2]))
    times = np.array(["2024-05-01", "NaT"], "datetime64[D]")
    listed = COLUMNS | {"opened": "2024-05-01", "rank": 4, "image": [1, 0, 2.5], "marks": [0.5, 1, 2, 3, 4]}
    expected = model.outputs(rows_of(listed, listed))
    arrays = {name: np.array(values) for name, values in rows_of(listed, listed).items() if name != "times"}
    arrays |= {"opened": np.array(["2024-05-01"] * 2, "datetime64[ns]"), "image": np.float32(arrays["image"])}
    for given in (np.stack([times, times]), [times, times], [tuple(times), list(times)]):
        found = model.outputs(arrays | {"times": given, "seen": np.array([listed["seen"]] * 2, "datetime64[s]")})
        assert {name: values.tobytes() for name, values in found.items()} == {
            name: values.tobytes() for name, values in expected.items()
        }
    lengths = {name: expected[f"{name}/length"].tolist() for name in ("marks", "serials", "times")}
    assert lengths == {"marks": [4, 4], "serials": [3, 3], "times": [2, 2]}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rank": 1 << 31}, r"Found 2147483648 in column 'rank'. Expected numbers that int32 holds"),
        ({"rank": 0.5}, r"Found float64.* in column 'rank'. Expected integers or times"),
        ({"serial": 1 << 63}, r"Found 9223372036854775808 in column 'serial'. Expected integers that int64 holds"),
        (
            {"opened": 7},
            r"Found integers, such as 7, in column 'opened'. Expected times: datetime64, or text in ISO 8601",
        ),
        ({"rank": np.datetime64("2024-05-01")}, r"Found times, such as .*, in column 'rank'. Expected numbers, as the"),
        ({"image": [1, 2]}, r"Found 2 numbers in column 'image'. Expected 3"),
        ({"image": 1.5}, r"Found 1.5 in column 'image'. Expected a list for each sample"),
        ({"marks": [0, 0, 0, 0, float("nan")]}, r"Found nan in column 'marks'. Expected finite numbers"),
        ({"marks": ["much"]}, r"in column 'marks'. Expected numbers"),
        ({"serials": [[1, 2], [3]]}, r"Found a list in a list of column 'serials': \[1, 2\]"),
        ({"serials": [1.5]}, r"in column 'serials'. Expected integers or times"),
        ({"times": ["9999-01-01"]}, r"in column 'times'. Expected numbers that int32 holds"),
    ],
)
def test_extra_columns_that_do_not_fit_are_refused(exports: list[Path], changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(str(exports[2])).predict(rows_of(COLUMNS, COLUMNS | changed))


def test_exports_without_extra_columns_in_their_manifest_are_read(exports: list[Path], tmp_path: Path) -> None:
    """Those of version 2."""
    copy = shutil.copytree(exports[1], tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    assert (manifest["format_version"], manifest.pop("extra_columns")) == (4, [])
    del manifest["sha256"]
    for one in (*manifest["features"], *manifest["dense_columns"]):
        del one["holds"]
    (copy / "manifest.json").write_text(json.dumps(manifest | {"format_version": 2}))
    names = load(str(exports[1])).columns
    columns = {name: values for name, values in columns_of(ROW, ROW).items() if name in names}
    np.testing.assert_array_equal(load(str(copy)).predict(columns), load(str(exports[1])).predict(columns))


def test_lists_may_have_ids_above_63_bits_beside_smaller_ones(model: LoadedModel) -> None:
    """As a request in JSON has them; numpy makes floats of such a list."""
    wild = [(1 << 64) - 1, 5, 1 << 63]
    columns = columns_of(ROW, ROW, ROW)
    as_array = model.predict(columns | {"wild": np.array(wild, np.uint64)})
    np.testing.assert_array_equal(model.predict(columns | {"wild": wild}), as_array)
    np.testing.assert_array_equal(model.predict(columns | {"wild": [*wild[:2], None]})[:2], as_array[:2])
    with pytest.raises(ModelError, match="in column 'wild'. Expected integers"):
        model.predict(columns | {"wild": [1 << 64, 5, 6]})


def test_a_value_among_lists_is_a_list_of_one(model: LoadedModel) -> None:
    rows = [ROW | {"tags": ["tool", "x"]}, ROW | {"tags": ["tool"]}]
    mixed = [rows[0], ROW | {"tags": "tool"}]
    np.testing.assert_array_equal(model.predict(columns_of(*mixed)), model.predict(columns_of(*rows)))


def test_an_export_has_tables_and_parameters_for_other_readers(
    runs: list[str], exports: list[Path], tmp_path: Path
) -> None:
    manifest = json.loads((exports[1] / "manifest.json").read_text())
    state = committed_state(runs[1])
    for table in manifest["tables"]:
        np.testing.assert_array_equal(np.load(exports[1] / table["file"]), state[f"{table['name']}/rows"])
    assert sorted(manifest["files"]) == sorted(
        path.relative_to(exports[1]).as_posix()
        for path in exports[1].rglob("*")
        if path.is_file() and path.name != "manifest.json" and path.parent.name != "__pycache__"
    )
    assert manifest["platforms"] == ["cpu", "cuda", "tpu"]
    dense = {key: values for key, values in state.items() if key.startswith(("dense/params/", "dense/state/"))}
    assert any(key.startswith("dense/state/batch_stats") for key in dense)
    read = _module(exports[1])._safetensors(str(exports[1]), "dense.safetensors")
    assert {f"dense/{key}" for key in read} == set(dense)
    for key, values in read.items():
        np.testing.assert_array_equal(values, dense[f"dense/{key}"])


def _module(export: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported", export / "served_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_damaged_export_is_refused(exports: list[Path], tmp_path: Path) -> None:
    copy = shutil.copytree(exports[1], tmp_path / "copy")
    flip_byte(copy / "tables/0.npy", 200)
    load(str(copy))
    with pytest.raises(ModelError, match=r"Found other bytes in .*0.npy"):
        load(str(copy), reads_tables=True)
    flip_byte(copy / "forward.jax", 200)
    with pytest.raises(ModelError, match=r"Found other bytes in .*forward.jax"):
        load(str(copy))
    (copy / "dense.safetensors").unlink()
    with pytest.raises(ModelError, match=r"Found (no file|other bytes) (at|in)"):
        load(str(copy))
    (copy / "manifest.json").write_text('{"format": "podembed-model", "format_version": 5}')
    with pytest.raises(ModelError, match=r"podembed-model 5 in .*Expected podembed-model 2 or 3 or 4"):
        load(str(copy))
    with pytest.raises(ModelError, match="Found no manifest.json"):
        load(str(tmp_path))


def test_a_program_of_a_later_jax_or_of_none_is_refused_in_a_sentence(exports: list[Path], tmp_path: Path) -> None:
    copy = shutil.copytree(exports[1], tmp_path / "copy")
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    made_by = jax.__version__
    with pytest.raises(ModelError, match=r"Found a program of jax 99\.1\.0 in m\.json, under jax .*Install it"):
        program_of(b"", {"versions": {"jax": "99.1.0"}}, "m.json")
    with pytest.raises(ModelError, match=rf"Found a program of jax {re.escape(made_by)} in .* that jax .* cannot read"):
        program_of((copy / manifest["program"]).read_bytes()[:100], manifest, str(path))


def test_arrays_of_64_bits_ask_for_jax_with_64(exports: list[Path], tmp_path: Path) -> None:
    """Of a run with JAX_ENABLE_X64."""
    copy = shutil.copytree(exports[1], tmp_path / "copy")
    manifest, dense = load(str(copy)).manifest, _safetensors(str(copy), "dense.safetensors")
    with (copy / "dense.safetensors").open("wb") as file:
        _write_safetensors(file, {key: values.astype(np.float64) for key, values in dense.items()})
    dense = _safetensors(str(copy), "dense.safetensors")
    with pytest.raises(ModelError, match=r"Found 'params/.*' as float64. Expected .*Set JAX_ENABLE_X64=1"):
        LoadedModel(manifest, program=None, dense=dense, tables=[], vocabularies={})


def _without_tables(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name != "tables"}


@pytest.mark.parametrize(
    ("altered", "words"),
    [
        (lambda whole: whole[: len(whole) // 2], "Found no whole JSON in .*manifest.json .*Copy it again"),
        (lambda whole: "", "Found no whole JSON in .*manifest.json"),
        (lambda whole: "\udcff", "Found no whole JSON in .*manifest.json"),
        (lambda whole: "[3]", "Found another manifest in .*manifest.json than was exported"),
        (lambda whole: whole.replace('"batch_size": 64', '"batch_size": 65'), "Found another manifest in .*manifest"),
        (lambda whole: json.dumps(_without_tables(json.loads(whole))), "Found another manifest in .*manifest.json"),
        (
            lambda whole: json.dumps(_without_tables(json.loads(whole)) | {"format_version": 2}),
            "Found another manifest in .*manifest.json",
        ),
    ],
)
def test_an_altered_manifest_is_refused_by_name(exports: list[Path], tmp_path: Path, altered: Any, words: str) -> None:
    copy = shutil.copytree(exports[1], tmp_path / "copy")
    whole = (copy / "manifest.json").read_text(encoding="utf-8")
    spaced = json.dumps(json.loads(whole), indent=3)
    (copy / "manifest.json").write_text(spaced, encoding="utf-8")
    load(str(copy))
    (copy / "manifest.json").write_text(altered(whole), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ModelError, match=words):
        load(str(copy))


def test_an_export_is_there_when_it_is_complete(
    runs: list[str], jobs: tuple[JobConfig, ...], exports: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="Found something at"):
        export_model(runs[1], out=str(exports[1]), job=jobs[1])
    spoilt = Path(shutil.copytree(runs[1], tmp_path / "run"))
    for file in (spoilt / "data").rglob("rows/c.*"):
        if file.is_file():
            flip_byte(file, 10)
    with pytest.raises(Exception, match="table 'items'"):
        export_model(str(spoilt), out=str(tmp_path / "out"), job=jobs[1])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    written = export_model(runs[1], out="memory://exports/one", job=jobs[1])
    memory = fsspec.filesystem("memory")
    assert memory.cat_file("/exports/one/dense.safetensors") == (exports[1] / "dense.safetensors").read_bytes()
    assert written.outputs == {"scores": (), "user": (4,)}
    with pytest.raises(ConfigurationError, match="Found something at memory://"):
        export_model(runs[1], out="memory://exports/one", job=jobs[1])
    memory.rm("/exports", recursive=True)


def test_the_commands_find_the_job_by_the_run(
    runs: list[str], exports: list[Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def podembed(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        printed = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, printed.out, printed.err

    commit = open_model(runs[0]).state.manifest.name
    code, out, _ = podembed("evaluate", runs[0], "--commit", "5")
    figures = evaluate(runs[0]).evaluation
    assert (code, f"{commit} (step 5) on 300 samples" in out, f"auc       {figures.auc:.8f}" in out) == (0, True, True)
    files, kept = str(data / "part-*.parquet"), ("--columns", "item", "click")
    code, out, _ = podembed("predict", runs[1], "--data", files, "--out", str(tmp_path / "p.parquet"), *kept)
    assert (code, "300 rows of item, click, scores, user" in out) == (0, True)
    code, out, _ = podembed("export-model", runs[1], "--out", str(tmp_path / "model"))
    assert (code, "outputs  scores [n], user [n, 4]" in out) == (0, True)
    for file in ("dense.safetensors", "tables/0.npy", "served_model.py"):
        assert (tmp_path / "model" / file).read_bytes() == (exports[1] / file).read_bytes()
    code, _, err = podembed("evaluate", runs[0], "--memory-gib", "0")
    assert (code, "Found --memory-gib 0. Expected more than 0" in err) == (87, True)


def test_the_page_serves_an_export(exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program of docs/inference.md, by requests."""
    program, _ = blocks("docs/inference.md")
    (tmp_path / "model").symlink_to(exports[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "served_model", raising=False)
    names: dict[str, Any] = {}
    program.run(names)
    monkeypatch.delitem(sys.modules, "served_model")
    columns = {
        "price": [1.5, None],
        "image": [[1, 2, 3], None],
        "visits": [3, 0],
        "seen": ["2024-05-01", "2024-05-02T13:00"],
        "item": [7, 35],
        "history": [[1, 2], []],
    }
    client = TestClient(names["app"])
    answer = client.post("/score", json=columns)
    assert answer.status_code == 200
    times = np.array(columns["seen"], "datetime64[s]")
    expected = load(str(exports[1])).predict(columns | {"seen": times})
    np.testing.assert_array_equal(np.array(answer.json()["score"], np.float32), expected)
    refused = client.post("/score", json=columns | {"item": ["seven", "eight"]})
    assert (refused.status_code, "Found text, such as 'seven', in column 'item'" in refused.json()["detail"]) == (
        422,
        True,
    )
