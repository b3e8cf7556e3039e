"""Figures of a commit in one process: those that the run itself found, whatever memory is given."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.result import Evaluation, Result
from podembed.orchestrator.commit.manifest import commit_file, commit_name
from podembed.serving.figures.of_groups import GroupedAUC
from podembed.serving.figures.of_samples import RMSE
from podembed.serving.predict.batches import looked_up
from podembed.serving.predict.committed_model import CommittedModel, CommittedRows, open_model, with_commit
from podembed.serving.predict.evaluate import evaluate
from podembed.serving.predict.pooled_rows import PooledRows
from podembed.serving.predict.predict import predict
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.data.columns import IdColumn
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import evaluation_plan
from podembed.workers.input.sources import open_reader
from podembed.workers.job.job import JobConfig
from tests.orchestrator.committed_tables import flip_byte
from tests.run_state import committed_state
from tests.small_job import DIM, small_job
from tests.training import fit_job

STEPS, EVERY = 9, 3


def rich_job(folder: str) -> JobConfig:
    """Bags with weights of their combiners, a table that is cut, a quantized one, and metrics of groups."""
    job = small_job(folder=folder, audit=False, evaluate=True)
    quantized = TableConfig(64, DIM, name="rounded", quantization_config=QuantizationConfig(16, -0.5, 0.5))
    data = replace(job.data, features={**job.data.features, "rounded": IdColumn("bag", mode="hash")})
    features = {**job.features, "rounded": FeatureConfig(quantized)}
    return replace(job, features=features, data=data, metrics=(RMSE(), GroupedAUC(group_by="a")))


def trained(job: JobConfig, folder: Path, **checkpoints: int) -> Result:
    return fit_job(
        job,
        folder,
        max_steps=STEPS,
        eval_every_steps=EVERY,
        checkpoint_config=CheckpointConfig(every_steps=EVERY, num_to_keep=None, **checkpoints),
    )


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return rich_job(small_data)


@pytest.fixture(scope="module")
def result(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """With deltas: two of three commits hold changed rows alone."""
    return trained(job, tmp_path_factory.mktemp("evaluated"), full_every=3)


def at(result: Result, step: int) -> Evaluation:
    return next(one for one in result.evaluations if one.step == step)


@pytest.mark.parametrize("step", [EVERY, 2 * EVERY, STEPS])
def test_the_figures_of_a_commit_are_those_of_the_run(result: Result, job: JobConfig, step: int) -> None:
    found = evaluate(result.path, job=job, commit=str(step))
    assert found.commit == commit_name(step=step, generation=1)
    assert set(found.evaluation.values) == {"auc", "log_loss", "loss", "rmse", "gauc"}
    assert found.evaluation == at(result, step)


def test_the_newest_commit_and_little_memory(result: Result, job: JobConfig) -> None:
    """Less memory than one bucket has: every bucket is read again for each window, and the figures stay."""
    assert evaluate(result.path, job=job, kept_bytes=1).evaluation == at(result, STEPS)


def test_paths_and_single_values_are_taken_as_lists_of_text_are(
    result: Result, job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run as a `Path`, one pattern of data, `~`, and one column."""
    (data,) = job.resolved_data.for_evaluation().paths
    assert evaluate(Path(result.path), job=job, data=data).evaluation == at(result, STEPS)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").symlink_to(result.path)
    scored = predict("~/run", job=job, data=data, out=Path("~/scores.parquet"), columns="label")
    assert scored.columns[0] == "label"
    assert pq.read_table(tmp_path / "scores.parquet").column_names == list(scored.columns)


def test_a_job_that_reads_its_columns_otherwise_scores_nothing(
    result: Result, job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the job that a caller passes, nor the function of the run whose code was edited since."""
    salted = {**job.data.features, "rounded": IdColumn("bag", mode="hash", salt=7)}
    other = replace(job, data=replace(job.data, features=salted))
    with pytest.raises(ConfigurationError) as refused:
        open_model(result.path, job=other)
    assert "feature 'rounded' (column 'bag'): found salt=7, expected 0\n" in str(refused.value)
    assert str(refused.value).endswith("Pass the job of that run.")
    renamed = {**job.data.features, "rounded": IdColumn("other_bag", mode="hash")}
    open_model(result.path, job=replace(job, data=replace(job.data, features=renamed), metrics=()))
    monkeypatch.setattr("podembed.serving.predict.committed_model._job_of", lambda store, folder: other)
    with pytest.raises(ConfigurationError, match="The job has changed since: restore it"):
        open_model(result.path)


def test_memory_is_bounded_and_small_tables_are_read_once(result: Result, job: JobConfig) -> None:
    model = open_model(result.path, job=job)
    rows = committed_state(result.path)
    random = np.random.default_rng(0)
    for kept_bytes in (64 << 20, 3000):
        source = CommittedRows(model, kept_bytes=kept_bytes)
        for _ in range(3):
            for table, files in enumerate(model.tables):
                ids = np.unique(random.integers(0, files.num_rows, 500))
                np.testing.assert_array_equal(source.rows(table, ids), rows[f"{files.name}/rows"][ids])
                largest = max(bucket.nbytes for bucket in source._kept.values())
                assert sum(bucket.nbytes for bucket in source._kept.values()) <= max(kept_bytes, largest)
        num_buckets = sum(files.num_buckets for files in model.tables)
        assert (source.num_reads == num_buckets) == (kept_bytes > 3000)
    assert len(CommittedRows(model).rows(0, np.zeros(0, np.int64))) == 0


def test_rows_are_fetched_for_many_batches_at_once(result: Result, job: JobConfig) -> None:
    model, data = open_model(result.path, job=job), job.resolved_data
    index = build_index(data)
    plan = evaluation_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size)

    def read(window_bytes: int) -> tuple[int, list[list[bytes]]]:
        """How often a bucket was read, and the activations of three batches."""
        reader = open_reader(data, index, plan, range(job.num_lanes))
        source = CommittedRows(model, kept_bytes=1)
        batches = (reader.read(number) for number in range(3))
        made = looked_up(batches, PooledRows(job, source), window_bytes=window_bytes)
        blocks = [[block.tobytes() for block in found.activations] for found in made]
        reader.close()
        return source.num_reads, blocks

    (often, one), (seldom, other) = read(1), read(1 << 30)
    assert often == 3 * seldom
    assert one == other


def test_other_data_and_rows_that_are_malformed(
    result: Result, job: JobConfig, small_data: str, tmp_path: Path
) -> None:
    table = pa.concat_tables([pq.read_table(path) for path in sorted(Path(small_data).glob("*.parquet"))]).slice(0, 500)
    ids = table.column("a").to_pylist()
    ids[7] = 10_000_000
    spoilt = table.set_column(table.column_names.index("a"), "a", pa.array(ids))
    pq.write_table(spoilt, tmp_path / "spoilt.parquet")
    pq.write_table(spoilt.filter(pa.array([at != 7 for at in range(500)])), tmp_path / "clean.parquet")
    tolerant = replace(job, data=replace(job.data, max_bad_rows=1))
    with pytest.raises(Exception, match=r"id 10000000 in .*row 7, column 'a'"):
        evaluate(result.path, job=job, data=[str(tmp_path / "spoilt.parquet")])
    found = evaluate(result.path, job=tolerant, data=[str(tmp_path / "spoilt.parquet")])
    assert [(row.row, row.column) for row in found.bad_rows] == [(7, "a")]
    assert found.evaluation.num_samples == 499
    clean = evaluate(result.path, job=job, data=[str(tmp_path / "clean.parquet")]).evaluation
    assert found.evaluation.values == pytest.approx(clean.values, rel=1e-6)


def test_what_cannot_be_judged_is_named(result: Result, job: JobConfig, small_data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Found no run in .*nothing"):
        evaluate(str(tmp_path / "nothing"), job=job)
    with pytest.raises(ConfigurationError, match=r"no commit of step 4 .*one of the steps 9, 6, 3\."):
        evaluate(result.path, job=job, commit="4")
    with pytest.raises(ConfigurationError, match=r"started from Python with a job without a name.*podembed\.evaluate"):
        evaluate(result.path)
    with pytest.raises(ConfigurationError, match=r"no evaluation data in the job 'small'.*Pass --data"):
        evaluate(result.path, job=replace(job, data=replace(job.data, eval_paths=())))
    with pytest.raises(ConfigurationError, match=r"Found table 'rounded' as 64 rows of 8 .*Expected not there"):
        evaluate(result.path, job=small_job(folder=small_data, audit=False, evaluate=True))


def test_a_damaged_commit_is_named_before_a_figure_is_given(result: Result, job: JobConfig, tmp_path: Path) -> None:
    run = shutil.copytree(result.path, tmp_path / "run")
    model = open_model(str(run), job=job)
    for files in model.tables:
        if files.name == "b":
            flip_byte(run / files.chunk(files.arrays[0], 0).name, 1234)
    with pytest.raises(ChunkDamaged, match="table 'b', rows, bucket 0"):
        evaluate(str(run), job=job)


def test_a_commit_that_goes_meanwhile(result: Result, job: JobConfig, tmp_path: Path) -> None:
    """As the keep policy of a run in training deletes it: the newest one is judged, and a named one is missed."""
    run = shutil.copytree(result.path, tmp_path / "run")
    names = [commit_name(step=step, generation=1) for step in (3, 6, 9)]
    seen = []

    def read(model: CommittedModel) -> str:
        name = model.state.manifest.name
        seen.append(name)
        if len(seen) == 1:
            (run / commit_file(names[2])).unlink()
            raise ChunkDamaged("x", "no file", "one")
        return name

    assert with_commit(str(run), read, job=job) == names[1]
    assert seen == [names[2], names[1]]
    seen.clear()
    (run / commit_file(names[2])).write_bytes(Path(result.path, commit_file(names[2])).read_bytes())
    with pytest.raises(ConfigurationError, match=rf"Found commit {names[2]} .* deleted while it was read"):
        with_commit(str(run), read, commit="9", job=job)


def test_a_run_elsewhere(result: Result, job: JobConfig) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(result.path, "/judged", recursive=True)
    assert evaluate("memory://judged", job=job).evaluation == at(result, STEPS)
    memory.rm("/judged", recursive=True)
