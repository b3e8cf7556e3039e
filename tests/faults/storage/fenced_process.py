"""A driver with two hosts on a cluster of its own, whose workers end themselves soon after it falls silent.

Usage: python -m tests.faults.storage.fenced_process DATA STORAGE LEASE_TIMEOUT_S. Trains far more steps than anybody
waits for; its exit code is that of `podembed train`.
"""

from __future__ import annotations

import sys

from podembed.jobs.outcomes import exit_code
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from podembed.workers.job.reference import JobReference


def main() -> int:
    _, data, storage, lease_timeout_s = sys.argv
    Trainer(
        JobReference(function="tests.small_job:small_job", arguments={"folder": data, "epochs": 5000}),
        scaling_config=ScalingConfig(num_hosts=2, threads_per_host=1),
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            checkpoint_config=CheckpointConfig(every_steps=5),
            # With processes that stand by from the first window on: they must go, too.
            failure_config=FailureConfig(lease_timeout_s=float(lease_timeout_s), standby_after_s=0.0),
        ),
    ).fit()
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
