"""A loss, a dense parameter or a row that is not finite ends the run before it is committed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig
from podembed.orchestrator.api.run_errors import JobFailed
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import Store
from tests.long_tests import long_case
from tests.small_job import small_job
from tests.training import fit_job


def rates(step: int, rate: float) -> Callable[..., Any]:
    """An ordinary learning rate, and from that step on another one."""
    if math.isnan(rate):
        # A constant that is no number is refused before the first step.
        return lambda count: jnp.where(count < step, 0.01, jnp.log(-1.0))
    return optax.join_schedules([optax.constant_schedule(0.01), optax.constant_schedule(rate)], [step])


def dense(job: JobConfig, schedule: Callable[..., Any]) -> JobConfig:
    return replace(job, dense_optimizer=optax.sgd(schedule))


def rows(job: JobConfig, schedule: Callable[..., Any]) -> JobConfig:
    # The rate itself must be finite; times the decay it is not.
    optimizer = SGD(schedule, weight_decay_factor=10.0, multiply_weight_decay_factor_by_learning_rate=True)
    table = TableConfig(50, 8, name="a", combiner="sum", optimizer=optimizer)
    return replace(job, features={**job.features, "a": FeatureConfig(table)})


@pytest.mark.parametrize(
    ("part", "step", "rate", "max_steps", "message"),
    [
        (dense, 5, float("inf"), 15, r"loss of step \d+ is (nan|inf)"),
        # The update of the last step before the commit: no loss has seen it yet.
        (dense, 9, float("inf"), 10, r"'params/\w+' not finite after 10 steps"),
        long_case(dense, 9, float("nan"), 10, r"'params/\w+' not finite after 10 steps"),
        (rows, 9, 3e38, 10, r"rows [\d, ]+ and at least \d+ more of table 'a' not finite after 10 steps"),
    ],
)
def test_what_is_not_finite_is_named_and_not_committed(
    small_data: str, tmp_path: Path, part: Any, step: int, rate: float, max_steps: int, message: str
) -> None:
    """One ordinary commit first."""
    trainer = Trainer(
        part(small_job(folder=small_data, audit=False), rates(step, rate)),
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(
            name="spoilt",
            storage_path=str(tmp_path),
            max_steps=max_steps,
            checkpoint_config=CheckpointConfig(every_steps=5),
        ),
        reporter=SilentReporter(),
    )
    with pytest.raises(JobFailed, match=message + r".*last commit, from before, stands"):
        trainer.fit()
    head = checkpoint.load_head(Store(str(tmp_path / "spoilt")))
    assert head is not None
    assert head.step == 5


def test_the_first_loss_is_no_matter_of_rates_and_no_commit_stands(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False)
    model: Any = job.model

    class Spoilt:
        def init(self, key, num_dense, widths):
            return model.init(key, num_dense, widths)

        def apply(self, params, dense, activations):
            return model.apply(params, dense, activations) + jnp.nan

    trainer = Trainer(
        replace(job, model=Spoilt()),
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(name="spoilt", storage_path=str(tmp_path), max_steps=3),
        reporter=SilentReporter(),
    )
    with pytest.raises(JobFailed, match="loss of step 0 is nan.*Nothing is committed yet.*first values") as found:
        trainer.fit()
    assert "stands" not in str(found.value)
    assert "Lower" not in str(found.value)


def test_a_constant_that_is_not_finite_spoils_no_commit_also_after_a_restore(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False)
    model: Any = job.model

    class Masked:
        def init(self, key, num_dense, widths):
            return {"model": model.init(key, num_dense, widths), "mask": jnp.array([0.0, -jnp.inf])}

        def apply(self, params, dense, activations):
            return model.apply(params["model"], dense, activations) + jax.nn.softmax(params["mask"])[1]

    for max_steps in (2, 4):
        result = fit_job(replace(job, model=Masked()), tmp_path, name="masked", max_steps=max_steps)
        assert (result.step, result.commit) == (max_steps, f"s{max_steps:09d}-g{max_steps // 2:08d}")
