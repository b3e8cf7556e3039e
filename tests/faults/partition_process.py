"""Trains the small job on two machines of the Ray cluster in RAY_ADDRESS, with a short deadline of a step.

Usage: python -m tests.faults.partition_process DATA STORAGE MAX_STEPS STEP_TIMEOUT_S.
"""

from __future__ import annotations

import sys

from orchestrator.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from orchestrator.outcomes import exit_code
from orchestrator.trainer import Trainer
from workers.job import JobReference


def main() -> int:
    _, data, storage, max_steps, step_timeout_s = sys.argv
    Trainer(
        JobReference(function="tests.small_job:small_job", arguments={"folder": data, "epochs": 5000}),
        scaling_config=ScalingConfig(num_hosts=2, threads_per_host=1, resources_per_host={"CPU": 1}),
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            max_steps=int(max_steps),
            checkpoint_config=CheckpointConfig(every_steps=10),
            failure_config=FailureConfig(step_timeout_s=float(step_timeout_s)),
        ),
    ).fit()
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
