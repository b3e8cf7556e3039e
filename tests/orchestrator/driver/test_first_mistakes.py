"""What somebody reads whose job has a mistake that shows when the model is first called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad
from podembed.jobs.fitting import shares_row_groups
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.run_errors import JobFailed, JobRefused
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import ColumnUnknown
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.events.run import BatchNotFilled, RatesWithoutStep, RowGroupsShared
from podembed.workers.data.columns import IdColumn
from podembed.workers.input.index import InputFile, InputIndex
from podembed.workers.job.job import JobConfig
from tests.small_job import DIM, small_job


class Heard(SilentReporter):
    """Mutable: `events`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


def trainer(job: JobConfig, storage: Path, reporter: SilentReporter | None = None) -> Trainer:
    return Trainer(
        job,
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(name="first", storage_path=str(storage), max_steps=1),
        reporter=reporter or SilentReporter(),
    )


class Wrong:
    """A model that has `step` instead of an answer."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def init(self, key, spec):
        return {"w": jnp.zeros(spec.num_dense)}

    def apply(self, params, batch, context):
        return self.step(batch)


def product_of_other_shapes(batch: Any) -> Any:
    return batch.dense @ jnp.zeros(99)


def test_a_shape_error_shows_the_lines_of_the_model_and_not_ours(small_data: str, tmp_path: Path) -> None:
    job = replace(small_job(folder=small_data, audit=False), model=Wrong(product_of_other_shapes))
    with pytest.raises(JobFailed, match=r"got \(\d+,\) and \(99,\)") as found:
        trainer(job, tmp_path).fit()
    said = str(found.value)
    assert "return batch.dense @ jnp.zeros(99)" in said
    assert "return self.step(batch)" in said
    assert "model.apply got dense of shape" in said
    assert "podembed/workers" not in said
    # The model's two, and the one that raised.
    assert said.count('  File "') == 3


def test_what_a_model_returns_wrongly_is_said_without_a_traceback(small_data: str, tmp_path: Path) -> None:
    job = replace(small_job(folder=small_data, audit=False), model=Wrong(lambda batch: None))
    with pytest.raises(JobRefused, match="model.apply returning None") as found:
        trainer(job, tmp_path).fit()
    assert "Traceback" not in str(found.value)


def same_rate() -> float:
    return 0.05


@pytest.mark.parametrize(
    ("row_groups", "order", "is_told"),
    [((40_000,), "shuffled", True), ((40_000,), "files", False), ((2_500,) * 16, "shuffled", False),
     ((1_000,), "shuffled", False)],
)  # fmt: skip
def test_large_row_groups_that_lanes_share_are_told(row_groups: tuple[int, ...], order: Any, is_told: bool) -> None:
    job = small_job(folder="a", audit=False)
    data = replace(job.data, order=order, extra=tuple(f"x{at}" for at in range(1_000)))
    job = replace(job, data=data, num_lanes=16, batch_size=48)
    files = [InputFile(path="a", size_bytes=1, version="", row_group_rows=row_groups)]
    assert shares_row_groups(job, InputIndex(files=tuple(files), vocabularies=())) == is_told
    told = RowGroupsShared(num_row_groups=1, num_lanes=16, num_rows=40_000, num_columns=1_000)
    assert "1 row groups or blocks, and each of 16 lanes decodes a whole one" in told.sentence()


def test_a_batch_that_is_larger_than_the_data_is_told(small_data: str, tmp_path: Path) -> None:
    """And a column without a known value, and a rate without the step."""
    job = small_job(folder=small_data, audit=False)
    (tmp_path / "a.txt").write_text("1000000\n1000001\n")
    ids = {**job.data.features, "a": IdColumn("a", vocabulary=str(tmp_path / "a.txt"))}
    own = FeatureConfig(TableConfig(50, DIM, name="a", combiner="sum", optimizer=Adagrad(same_rate)))
    job = replace(job, data=replace(job.data, features=ids), features={**job.features, "a": own})
    for batch_size, count in ((48, 0), (12 << 12, 1)):
        heard = Heard()
        trainer(replace(job, batch_size=batch_size), tmp_path / str(batch_size), heard).fit()
        assert sum(isinstance(event, BatchNotFilled) for event in heard.events) == count
        (said,) = [event.sentence() for event in heard.events if isinstance(event, ColumnUnknown)]
        assert "values of column 'a' is in its vocabulary" in said
        assert "begins with '1000000'. It may be the vocabulary of another column" in said
        (told,) = [event for event in heard.events if isinstance(event, RatesWithoutStep)]
        assert "the learning rate of 1 table (a) is a function without the step. Whenever the run" in told.sentence()
