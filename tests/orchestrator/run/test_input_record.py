"""Data files that change under a run: what is accepted, what never is, and what is written about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.run.input_change import InputChanged
from podembed.orchestrator.run.input_record import check_order, differences, read_input, record_change, write_input
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.orchestrator.run.run import OpenRun
from podembed.tools.inspect.inspect_run import describe, render
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.data.extra_columns import IntegerColumn
from podembed.workers.input.index import InputIndex, build_index
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.reader import training_plan
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from tests.orchestrator.run.claims_of import claims_of
from tests.small_job import small_job, write_small_data


def job(*, folder: str) -> JobConfig:
    return small_job(folder=folder, audit=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_small_data(folder, num_rows=600)
    return folder


@pytest.fixture
def run(tmp_path: Path, data: Path) -> OpenRun:
    reference = JobReference(function="tests.orchestrator.run.test_input_record:job", arguments={"folder": str(data)})
    return create_run(f"{tmp_path}/runs/one", reference.resolve(), reference)


def rewrite(path: Path, *, row_group_size: int, cast: tuple[str, pa.DataType] | None = None) -> None:
    table = pq.read_table(path)
    if cast is not None:
        name, kind = cast
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
    pq.write_table(table, path, row_group_size=row_group_size)


def touch(data: Path, time_s: int) -> None:
    os.utime(data / "part-0.parquet", (time_s, time_s))


def test_an_accepted_change_is_written_when_the_run_goes_on_and_is_what_later_starts_compare_with(
    run: OpenRun, data: Path
) -> None:
    touch(data, 1)
    accepted = open_run(run.url, accept_input_change=True)
    assert read_input(run.store).accepted == ()  # nobody has gone on with it yet
    told: list[str] = []
    lease = claims_of(accepted, told=told).acquire()
    (change,) = read_input(run.store).accepted
    assert change.step == 0
    assert "part-0.parquet has" in change.changes[0]
    assert [file.version for file in change.now.training] != [
        file.version for file in read_input(run.store).began.training
    ]  # type: ignore[union-attr]
    assert "accepted from step 0 on" in told[0]
    assert "From step 0 on other input" in render(describe(run.store, now_unix_s=change.accepted_unix_s + 1))
    lease.release()

    again = open_run(run.url)
    lease = claims_of(again).acquire()
    assert len(read_input(run.store).accepted) == 1
    lease.release()

    touch(data, 2)
    with pytest.raises(InputChanged, match=r"part-0\.parquet has"):
        open_run(run.url)
    lease = claims_of(open_run(run.url, accept_input_change=True)).acquire()
    assert [change.step for change in read_input(run.store).accepted] == [0, 0]
    lease.release()


def opened_at(run: OpenRun, monkeypatch: pytest.MonkeyPatch, step: int) -> OpenRun:
    """The run as it is when its newest commit is of that step."""
    commit = SimpleNamespace(step=step)
    monkeypatch.setattr("podembed.orchestrator.run.input_record.newest_commit", lambda *_, **__: commit)
    monkeypatch.setattr(Lease, "head_step", step)
    return open_run(run.url, accept_input_change=True)


def test_other_row_groups_are_accepted_between_two_epochs_alone(
    run: OpenRun, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = run.input_plan.steps_per_epoch
    rewrite(data / "part-1.parquet", row_group_size=50)
    for step in (1, steps - 1, steps + 1):
        with pytest.raises(InputChanged, match=rf"of 50 rows in .*part-1\.parquet, at step {step}, .*--max-steps"):
            opened_at(run, monkeypatch, step)
    opened = opened_at(run, monkeypatch, steps)
    claims_of(opened).acquire().release()
    assert read_input(run.store).accepted[0].step == steps
    # From there on the new row groups are those of the run, also within an epoch.
    claims_of(opened_at(run, monkeypatch, steps + 1)).acquire().release()
    # A damaged commit may lead back to a step that was read from the old ones.
    with pytest.raises(InputChanged, match="row groups"):
        claims_of(opened_at(run, monkeypatch, steps - 1)).acquire()
    # What is refused leaves no driver behind.
    claims_of(opened_at(run, monkeypatch, steps + 1)).acquire().release()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: rewrite(data / "part-1.parquet", row_group_size=90, cast=("a", pa.string())), "type string"),
        (lambda data: (data / "part-1.parquet").unlink(), r"part-1\.parquet has 0 rows, had .*--name"),
        (lambda data: write_small_data(data, num_rows=601), r"Found 601 rows .* Expected 600"),
    ],
)
def test_a_change_of_what_steps_and_values_mean_is_refused_even_so(
    run: OpenRun, data: Path, change: Callable[[Path], None], words: str
) -> None:
    change(data)
    with pytest.raises(ValueError, match=words):
        open_run(run.url, accept_input_change=True)


def test_renamed_files_in_the_same_order_are_accepted(run: OpenRun, data: Path) -> None:
    for path in sorted(data.iterdir()):
        path.rename(path.with_name(f"part-0{path.name.removeprefix('part-')}"))
    claims_of(open_run(run.url, accept_input_change=True)).acquire().release()
    assert any("is gone" in phrase for phrase in read_input(run.store).accepted[0].changes)


# ---------------------------------------------------------------------- without a run


def hashed(folder: Path, **changes: object) -> ParquetData:
    column = IdColumn("user", **{"mode": "hash", "vocabulary_size": 100, **changes})  # type: ignore[arg-type]
    return ParquetData(f"{folder}/*.parquet", label="label", features={"user": column})


def recorded(folder: Path, declared: ParquetData) -> tuple[Store, InputIndex, LanePlan]:
    store, index = Store(str(folder / "run")), build_index(declared)
    write_input(store, index, index)
    return store, index, training_plan(index, num_lanes=2, batch_size=4, seed=1)


def test_numbers_that_became_text_are_refused_and_wider_numbers_are_not(tmp_path: Path) -> None:
    """Both can be hashed, so no check of types stops them, but equal values would become other rows."""
    table = pa.table({"label": [0, 1] * 5, "user": pa.array(range(10), pa.int32())})
    pq.write_table(table, tmp_path / "a.parquet")
    store, _, plan = recorded(tmp_path, hashed(tmp_path))
    rewrite(tmp_path / "a.parquet", row_group_size=100, cast=("user", pa.int64()))
    wider = build_index(hashed(tmp_path))
    assert differences(read_input(store), wider, wider)
    check_order(read_input(store), wider, wider, plan, step=1)
    rewrite(tmp_path / "a.parquet", row_group_size=100, cast=("user", pa.string()))
    text = build_index(hashed(tmp_path))
    with pytest.raises(InputChanged, match=r"a\.parquet as user: text\. Expected user: integers"):
        check_order(read_input(store), text, text, plan, step=0)


def test_extra_columns_of_another_kind_are_refused_unless_an_older_run_did_not_record_theirs(tmp_path: Path) -> None:
    data = replace(hashed(tmp_path), extra=(IntegerColumn("day"),))
    table = pa.table({"label": [0, 1] * 5, "user": pa.array(range(10)), "day": pa.array(range(10), pa.int32())})
    pq.write_table(table, tmp_path / "a.parquet")
    store, index, plan = recorded(tmp_path, data)
    unrecorded = InputIndex(files=tuple(replace(file, extra_content="") for file in index.files))
    old = Store(f"{tmp_path}/old")
    write_input(old, unrecorded, unrecorded)
    assert differences(read_input(old), index, index) == []
    rewrite(tmp_path / "a.parquet", row_group_size=100, cast=("day", pa.date32()))
    days = build_index(data)
    with pytest.raises(InputChanged, match=r"the extra columns of .*a\.parquet as day: times\. Expected day: numbers"):
        check_order(read_input(store), days, days, plan, step=0)
    check_order(read_input(old), days, days, plan, step=0)


def test_evaluation_files_may_have_columns_without_a_value_and_further_extra_columns(tmp_path: Path) -> None:
    data = replace(hashed(tmp_path), extra=(IntegerColumn("day"),))
    table = pa.table({"label": [0, 1] * 5, "user": range(10), "day": range(10), "more": range(10)})
    pq.write_table(table, tmp_path / "a.parquet")
    store, _, plan = recorded(tmp_path, data)
    empty = pa.table({"label": [0, 1], "user": pa.nulls(2), "day": pa.nulls(2), "more": [0, 1]})
    pq.write_table(empty, tmp_path / "b.parquet")
    more = replace(data, extra=(*data.extra, IntegerColumn("more")))
    train, evaluation = (build_index(replace(more, paths=f"{tmp_path}/{name}.parquet")) for name in "ab")
    check_order(read_input(store), train, evaluation, plan, step=0)


def test_a_vocabulary_may_grow_at_its_end_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0, 1], "user": ["a", "b"]}), tmp_path / "a.parquet")
    words = tmp_path / "words.txt"
    declared = hashed(tmp_path, mode="vocabulary", vocabulary=str(words))
    words.write_text("b\na\n")
    store, index, plan = recorded(tmp_path, declared)
    assert differences(read_input(store), index, index) == []
    words.write_text("b\na\nc\n")
    grown = build_index(declared)
    (phrase,) = differences(read_input(store), grown, grown) or []
    assert "words.txt has 6 bytes" in phrase
    check_order(read_input(store), grown, grown, plan, step=1)
    record_change(store, [phrase], grown, grown, step=1)
    assert differences(read_input(store), grown, grown) == []
    for text in ("a\nb\nc\n", "b\n", "ba\n\u00e4\n"):
        words.write_text(text)
        other = build_index(declared)
        with pytest.raises(InputChanged, match=r"first 3 lines of the vocabulary .*words\.txt"):
            check_order(read_input(store), other, other, plan, step=0)


def test_a_change_of_held_out_files_alone_is_a_change(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0, 1], "user": [1, 2]}), tmp_path / "a.parquet")
    store, index, plan = recorded(tmp_path, hashed(tmp_path))
    other = replace(index, files=(replace(index.files[0], size_bytes=1),))
    assert differences(read_input(store), index, other)
    assert differences(read_input(store), index, None)
    check_order(read_input(store), index, other, plan, step=1)


def test_a_damaged_record_of_what_was_accepted_last_is_refused_until_it_is_accepted_anew(
    run: OpenRun, data: Path
) -> None:
    touch(data, 1)
    claims_of(open_run(run.url, accept_input_change=True)).acquire().release()
    path = Path(run.url, "input", "change-00001.json")
    document = json.loads(path.read_text())
    assert document["step"] == 0
    path.write_text(path.read_text().replace('"step":0', '"step":1'))
    with pytest.raises(InputChanged, match=r"change-00001\.json.*--accept-input-change"):
        open_run(run.url)
    claims_of(open_run(run.url, accept_input_change=True)).acquire().release()
    open_run(run.url)
