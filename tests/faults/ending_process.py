"""A program that trains on a cluster of its own and ends badly, or early; then says what it still holds.

Usage: python -m tests.faults.ending_process MODE DATA STORAGE. Modes: `fail`, where the model raises after ten steps
on one host; `stop`, where the process gets a SIGTERM after the fifth on two. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import psutil

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from podembed.orchestrator.api.run_errors import JobFailed
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.reference import JobReference


class Interrupter(SilentReporter):
    """Sends this process one SIGTERM once a step is done, as a machine that is to go does; Ray has a handler of its own
    for it.
    """

    is_sent = False

    def window(self, report: WindowReport) -> None:
        if report.step >= 5 and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    _, mode, data, storage = sys.argv
    trainer = Trainer(
        JobReference(
            function="tests.faults.broken_jobs:broken_job",
            arguments={"folder": data, "model": "later" if mode == "fail" else "none", "epochs": 2_000},
        ),
        scaling_config=ScalingConfig(num_hosts=1 if mode == "fail" else 2, threads_per_host=1),
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            checkpoint_config=CheckpointConfig(every_steps=None),
            # Processes that stand by are still coming up when the end comes.
            failure_config=FailureConfig(max_user_errors=0, standby_after_s=0.0),
        ),
        reporter=Interrupter() if mode == "stop" else SilentReporter(),
    )
    try:
        ending = f"stopped by {trainer.fit().stopped_by}"
    except JobFailed as error:
        ending = str(error)
    me = psutil.Process()
    held = {
        "ending": ending,
        "children": [child.name() for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE],
        "connections": [str(c.laddr) for c in me.net_connections() if c.status in ("LISTEN", "ESTABLISHED")],
    }
    print(json.dumps(held), flush=True)


if __name__ == "__main__":
    main()
