"""Trains the small job on the Ray cluster in RAY_ADDRESS, a host a machine, and says on its output what happens, one
JSON line each.

Usage: python -m tests.faults.network.partition_process DATA STORAGE NAME MAX_STEPS HOSTS. A line has the seconds since
the beginning and one of: `event`, a kind with its values; `window`, the last step of a window; `result`, at the end.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from podembed.jobs.outcomes import exit_code
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import WindowTrained
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.reference import JobReference

COMMIT_EVERY = 10
LEASE_TIMEOUT_S = 10.0


class Lines(SilentReporter):
    """Says everything at once."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()

    def say(self, **what: Any) -> None:
        print(json.dumps({"at_s": round(time.monotonic() - self.began_s, 1), **what}), flush=True)

    def event(self, event: Event) -> None:
        if isinstance(event, WindowTrained):
            self.say(window=event.report.step, generation=event.report.generation)
        else:
            self.say(event=event.kind, values=event.values(), text=event.sentence())


def main() -> int:
    _, data, storage, name, max_steps, hosts = sys.argv
    least, _, most = hosts.partition("-")
    lines = Lines()
    result = Trainer(
        JobReference(function="tests.small_job:small_job", arguments={"folder": data, "epochs": 5000}),
        scaling_config=ScalingConfig(
            num_hosts=(int(least), int(most)) if most else int(least),
            threads_per_host=1,
            resources_per_host={"CPU": 1},
        ),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            max_steps=int(max_steps),
            checkpoint_config=CheckpointConfig(every_steps=COMMIT_EVERY),
            failure_config=FailureConfig(lease_timeout_s=LEASE_TIMEOUT_S, standby_after_s=None),
        ),
        reporter=lines,
    ).fit()
    recoveries = [[r.cause, r.detect_s, r.survivors, r.discarded_steps] for r in result.recoveries]
    losses = [result.losses[step] for step in sorted(result.losses)]
    lines.say(result={"path": result.path, "step": result.step, "losses": losses, "recoveries": recoveries})
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
