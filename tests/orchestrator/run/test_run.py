"""A run's folder: created once, opened by itself alone, and refused when the job or its data are not those of the
run.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from podembed.embedding.optimizers import Adagrad
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.holder import RunIsHeld
from podembed.orchestrator.commit.run_record import RunMismatch
from podembed.orchestrator.run.input_record import InputChanged
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.data.columns import DataConfigError
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import table_specs
from podembed.workers.storage.strict_json import DocumentRefused, seal
from tests.orchestrator.run.claims_of import claims_of
from tests.small_job import NUM_LANES, small_job, write_small_data

CHANGES: dict[str, object] = {}


def changing_job(*, folder: str) -> JobConfig:
    """The small job with whatever a test says has been edited since."""
    return replace(small_job(folder=folder, audit=False), **CHANGES)  # type: ignore[arg-type]


@pytest.fixture
def data(tmp_path: Path) -> str:
    folder = tmp_path / "data set"
    write_small_data(folder, num_rows=600)
    return str(folder)


@pytest.fixture
def run(tmp_path: Path, data: str) -> OpenRun:
    CHANGES.clear()
    reference = JobReference(function="tests.orchestrator.run.test_run:changing_job", arguments={"folder": data})
    return create_run(f"{tmp_path}/runs with space/one", reference.resolve(), reference)


def as_written_before(run: OpenRun) -> None:
    """Takes out of the records what older versions did not write."""
    for name, member in (("RUN.json", "initial_accumulator_value"), ("INPUT.json", "meaning")):
        path = Path(run.url) / name
        document = json.loads(path.read_bytes())
        del document["sha256"], document[member]
        path.write_bytes(seal(document))


def first_accumulator(job: JobConfig | JobReference, run: OpenRun) -> float:
    """Of table a, whose optimizer names none."""
    job = job.resolve() if isinstance(job, JobReference) else job
    optimizer = table_specs(job, run.table_buckets)[0].optimizer
    assert isinstance(optimizer, Adagrad)
    return optimizer.initial_accumulator_value


@pytest.mark.parametrize("given", ["name", "value"])
def test_rows_of_a_run_keep_the_accumulators_that_they_began_with(
    run: OpenRun, data: str, tmp_path: Path, given: str
) -> None:
    """Those of TensorFlow in a run of an older version; in a new one the job's, whatever a later version would choose.
    Workers get the same as the driver.
    """
    reference = run.reference if given == "name" else None
    job = changing_job(folder=data)
    new = create_run(f"{tmp_path}/new", job, reference)
    assert first_accumulator(new.job_for_workers, new) == job.initial_accumulator_value != 0.1
    old = create_run(f"{tmp_path}/old", job, reference)
    as_written_before(old)
    CHANGES["initial_accumulator_value"] = 0.5
    for before, expected in ((old, 0.1), (new, job.initial_accumulator_value)):
        opened = [create_run(before.url, changing_job(folder=data), reference)]
        if reference:
            opened += [open_run(before.url), open_run(before.url, settings={"folder": f"{data}/"})]
        for again in opened:
            assert first_accumulator(again.job, again) == pytest.approx(expected)
            assert first_accumulator(again.job_for_workers, again) == pytest.approx(expected)


def test_a_new_run_is_described_by_its_record(run: OpenRun, data: str) -> None:
    record = run.record
    assert (record.seed, record.num_lanes, record.batch_size, record.staleness) == (3, NUM_LANES, 96, 0)
    assert [table.name for table in record.tables] == ["a", "b", "bags"]
    assert record.tables[1].slots == {"momentum": 16, "velocity": 16}
    assert run.table_buckets == tuple(table.num_buckets for table in record.tables)
    assert os.path.isabs(run.url)
    assert run.eval_index is None
    assert run.newest_commit() is None


def test_creating_it_again_opens_the_same_run(run: OpenRun) -> None:
    again = create_run(run.url, run.job, run.reference)
    assert again.record == run.record


def test_a_run_keeps_the_buckets_that_it_was_created_with(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer code may choose other numbers for a new run."""
    others = tuple(2 * count for count in run.table_buckets)
    monkeypatch.setattr("podembed.orchestrator.run.opening.choose_buckets", lambda job: others)
    assert open_run(run.url).table_buckets == run.table_buckets
    assert create_run(run.url, run.job, run.reference).table_buckets == run.table_buckets
    assert create_run(f"{run.url} of today", run.job, run.reference).table_buckets == others


def test_a_run_opens_from_its_folder_alone(run: OpenRun, data: str) -> None:
    opened = open_run(run.url, take_over=True)
    assert opened.record == run.record
    assert (opened.reference, opened.job_for_workers) == (run.reference, run.job_for_workers)
    assert opened.take_over
    assert opened.job.batch_size == run.job.batch_size
    assert opened.train_index == run.train_index


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigurationError, match=r"Found no run in .* Expected a folder with RUN\.json"):
            open_run(str(folder))
    assert not (tmp_path / "missing").exists()


def test_a_run_that_was_given_as_a_value_says_how_to_go_on(tmp_path: Path, data: str) -> None:
    job = small_job(folder=data)
    create_run(str(tmp_path / "run"), job, None)
    with pytest.raises(ConfigurationError, match=r"Run that program again with RunConfig\(name=\.\.\.\)"):
        open_run(str(tmp_path / "run"))
    assert create_run(str(tmp_path / "run"), job, None).job_for_workers is job


def test_a_damaged_record_is_refused(run: OpenRun) -> None:
    record = Path(run.url, "RUN.json")
    text = record.read_text()
    assert '"seed":3' in text
    record.write_text(text.replace('"seed":3', '"seed":4'))
    with pytest.raises(DocumentRefused, match=r"RUN\.json"):
        open_run(run.url)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 48}, "batch_size is 96, given 48"),
        ({"num_lanes": 6}, "num_lanes is 12, given 6"),
        ({"seed": 4}, "seed is 3, given 4"),
    ],
)
@pytest.mark.parametrize("again", ["create", "open"])
def test_a_job_that_would_train_other_steps_under_the_same_name_is_refused(
    run: OpenRun, changes: dict[str, object], words: str, again: str
) -> None:
    """Resuming with another batch size would read other samples from the same step number."""
    CHANGES.update(changes)
    reference = run.reference
    assert reference is not None
    start = {
        "open": lambda: open_run(run.url, accept_input_change=True),
        "create": lambda: create_run(run.url, reference.resolve(), reference),
    }
    with pytest.raises(RunMismatch, match=words):
        start[again]()


def test_a_job_with_other_tables_is_refused_by_name(run: OpenRun) -> None:
    features = {name: feature for name, feature in run.job.features.items() if name != "a"}
    columns = {name: source for name, source in run.job.data.id_columns.items() if name != "a"}
    CHANGES.update(features=features, data=replace(run.job.data, features=columns))
    with pytest.raises(RunMismatch, match=r"- table 'a' is not in the job \(a=drop\)\n[^-]"):
        open_run(run.url)


def drop_a_row(folder: str) -> None:
    path = f"{folder}/part-1.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 1), path, row_group_size=90)


@pytest.mark.parametrize("change", ["content", "touched", "another file", "a file less"])
def test_changed_data_is_refused_and_accepted_only_with_as_many_rows(run: OpenRun, data: str, change: str) -> None:
    match change:
        case "content":
            drop_a_row(data)
        case "touched":
            os.utime(f"{data}/part-0.parquet", (1, 1))
        case "another file":
            Path(data, "part-2.parquet").write_bytes(Path(data, "part-1.parquet").read_bytes())
        case "a file less":
            Path(data, "part-1.parquet").unlink()
    named = {
        "touched": "part-0.parquet has",
        "another file": "part-2.parquet is new",
        "a file less": "part-1.parquet is gone",
    }
    found = named.get(change, "part-1.parquet has")
    words = rf"changed since it began: .*{found}.* Begin a new one under another name \(--name\), or remove "
    with pytest.raises(InputChanged, match=words):
        open_run(run.url)
    with pytest.raises(InputChanged, match=words):
        create_run(run.url, run.job, run.reference)
    if change == "touched":
        assert open_run(run.url, accept_input_change=True).record == run.record
        assert create_run(run.url, run.job, run.reference, accept_input_change=True).record == run.record
    else:
        with pytest.raises(
            InputChanged, match=r"training data: .*part-[12].parquet has .* Expected 600, .* no commit, .*--name"
        ):
            open_run(run.url, accept_input_change=True)


def test_data_that_is_gone_is_named(run: OpenRun, data: str) -> None:
    for path in Path(data).iterdir():
        path.unlink()
    with pytest.raises((InputError, DataConfigError, ConfigurationError)) as caught:
        open_run(run.url)
    assert data in str(caught.value)


def test_a_job_function_that_is_gone_or_takes_other_arguments_is_named(tmp_path: Path, data: str) -> None:
    for function, words in (
        ("tests.orchestrator.run.test_run:no_such_job", "Found no 'no_such_job' in the module tests.orchestrator"),
        ("tests.no_such_module:job", "cannot be imported"),
        ("tests.orchestrator.run.test_run", "Expected package.module:function"),
        (":job", "Expected package.module:function"),
        ("tests.orchestrator.run.test_run:CHANGES", "a dict"),
        ("tests.small_job:write_small_data", "without a declared JobConfig"),
    ):
        with pytest.raises(JobError, match=words):
            JobReference(function=function, arguments={"folder": data}).resolve()
    with pytest.raises(JobError, match=r"unexpected keyword argument 'colour'.*Expected some of folder, num_rows"):
        JobReference(function="tests.small_job:small_job", arguments={"folder": data, "colour": 1}).resolve()
    with pytest.raises(JobError, match="missing a required argument: 'folder'"):
        JobReference(function="tests.small_job:small_job").resolve()


def test_a_place_that_cannot_be_written_is_named(data: str, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    for place in ("/proc/podembed-runs/one", f"{occupied}/one"):
        with pytest.raises(ConfigurationError, match=r"no way to write to .* Choose another one: --storage"):
            create_run(place, small_job(folder=data), None)


def test_two_drivers_on_one_run(run: OpenRun) -> None:
    """The second is told who holds it, unless it takes over; another call of the same driver is no second driver."""
    claims = claims_of(run)
    assert claims.generation == 0
    first = claims.acquire()
    assert claims.generation == first.generation == 1
    other = open_run(run.url)
    with pytest.raises(RunIsHeld, match=f"process {os.getpid()} on "):
        claims_of(other).acquire()
    assert claims.acquire().generation == 2
    assert claims_of(open_run(run.url, take_over=True)).acquire().generation == 3


def test_a_released_run_is_free_at_once(run: OpenRun) -> None:
    claims_of(run).acquire().release()
    assert claims_of(open_run(run.url)).acquire().generation == 2


@pytest.mark.parametrize("num_rows", [601, 95, 1])
def test_the_sample_counter_of_a_manifest_is_what_a_reader_counts(tmp_path: Path, num_rows: int) -> None:
    write_small_data(tmp_path / "data", num_rows=num_rows)
    job = small_job(folder=str(tmp_path / "data"), audit=False)
    run = create_run(str(tmp_path / "run"), job, None)
    plan = training_plan(
        build_index(job.resolved_data), num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed
    )
    reader = InputReader(job.resolved_data, run.train_index, plan, range(job.num_lanes))
    seen = 0
    for step in range(2 * plan.steps_per_epoch + 1):
        assert run.input_plan.rows_before(step) == seen, f"before step {step}"
        seen += int((~reader.read(step).is_padding).sum())
