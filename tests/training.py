"""Runs as a user starts them, without a word on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.reporter import Reporter, SilentReporter
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference


def fit_job(
    job: JobConfig | JobReference,
    storage: Path | str,
    *,
    name: str = "run",
    num_hosts: int = 1,
    scaling: ScalingConfig | None = None,
    reporter: Reporter | None = None,
    **config: Any,
) -> Result:
    """Trains a job on hosts of one thread, a single one in this process.

    Args:
      scaling: hosts of another kind.
      config: other arguments of `RunConfig`.
    """
    return Trainer(
        job,
        scaling_config=scaling or ScalingConfig(num_hosts=num_hosts, threads_per_host=1, in_process=num_hosts == 1),
        run_config=RunConfig(name=name, storage_path=str(storage), **config),
        reporter=reporter or SilentReporter(),
    ).fit()
