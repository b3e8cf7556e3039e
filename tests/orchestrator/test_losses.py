"""A loss that is not finite ends the run before it is committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optax
import pytest

from orchestrator import checkpoint
from orchestrator.config import CheckpointConfig, RunConfig, ScalingConfig
from orchestrator.errors import JobFailed
from orchestrator.progress import SilentReporter
from orchestrator.trainer import Trainer
from tests.small_job import small_job
from workers.storage import Store


def test_a_loss_that_is_not_finite_is_named_and_not_committed(small_data: str, tmp_path: Path) -> None:
    # One ordinary commit first; then a rate beyond float32.
    rates = optax.join_schedules([optax.constant_schedule(0.01), optax.constant_schedule(float("inf"))], [5])
    job = replace(small_job(folder=small_data, audit=False), dense_optimizer=optax.sgd(rates))
    trainer = Trainer(
        job,
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(
            name="overflow", storage_path=str(tmp_path), max_steps=15, checkpoint_config=CheckpointConfig(every_steps=5)
        ),
        reporter=SilentReporter(),
    )
    with pytest.raises(JobFailed, match=r"loss of step \d+ is (nan|inf).*last commit, from before, stands"):
        trainer.fit()
    head = checkpoint.load_head(Store(str(tmp_path / "overflow")))
    assert head is not None
    assert head.step == 5
