"""Trains on two pretended TPU slices, takes a machine of one away, and prints what came of it as one JSON line.

Run as `python -m tests.faults.slices.slices_process DATA STORAGE TOPOLOGY TYPE STANDBY`, such as `2x2x2 TPU-V4 alone`,
of which a slice has two machines; `4x4 TPU-V6E` has four. A folder DATA that is not there is written. With `standby`,
processes wait to take the place of lost ones, as only CPUs allow it. The run may do with one slice. A process of its
own, because Ray connects a process to one cluster only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    os.environ.update(RAY_raylet_start_wait_time_s="600", RAY_worker_niceness="0")

import ray

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from tests.faults.slices.machines import SliceMachines, device_variables, groups_held, joined
from tests.small_job import write_small_data

EVERY = 10
STEADY_S = 8.0  # of training before the loss: by then the processes that stand by are ready


class Loss(SilentReporter):
    """Takes the first machine of slice a away, once a commit stands, and notes when steps are done again."""

    def __init__(self, machines: SliceMachines, url: str) -> None:
        self.machines, self.store = machines, Store(url)
        self.events: list[dict[str, Any]] = []
        self.hosts: list[int] = []
        self.variables: list[list[dict[str, str]]] = []
        self.held: list[dict[str, list[str]]] = []
        self.generation = 0
        self.began_s = 0.0
        self.lost_s = 0.0
        self.seconds = 0.0
        self.own = 0
        self.again = 0

    def event(self, event: Event) -> None:
        self.events.append({"kind": event.kind, **event.values()})
        print(f"{time.monotonic() % 1000:.1f}: {event.sentence()}", file=sys.stderr, flush=True)

    def window(self, report: WindowReport) -> None:
        if report.generation != self.generation:
            self.generation, self.began_s = report.generation, time.monotonic()
            self.hosts.append(report.num_hosts)
            self.variables.append(device_variables())
            self.held.append(groups_held())
            if self.lost_s and not self.seconds:
                self.seconds, self.again = time.monotonic() - self.lost_s, report.step
        is_steady = time.monotonic() - self.began_s > STEADY_S
        if self.seconds and report.committed_step > self.again:
            os.kill(os.getpid(), signal.SIGINT)
        if not self.lost_s and report.committed_step >= EVERY and is_steady:
            head = checkpoint.load_head(self.store)
            # Hosts are numbered by slice, so those of the other slice are the second half.
            other = range(report.num_hosts // 2, report.num_hosts)
            owners = [owner for table in (head.placement if head else {}).values() for owner in table]
            self.own = sum(owner in other for owner in owners)
            self.lost_s = time.monotonic()
            self.machines.lose("a", 0)


def main(data: str, storage: str, shape: str, kind: str, standby: str) -> None:
    if not Path(data).exists():
        write_small_data(data)
    machines, topology = SliceMachines(), Topology.of(shape, kind)
    try:
        machines.add_slice("a", topology)
        machines.add_slice("b", topology)
        joined(machines)
        loss = Loss(machines, f"{storage}/slices")
        result = Trainer(
            JobReference(function="tests.small_job:small_job", arguments={"folder": data, "epochs": 4000}),
            scaling_config=ScalingConfig(
                topology=shape, accelerator_type=kind, num_slices=(1, 2), platform="cpu", threads_per_host=1
            ),
            run_config=RunConfig(
                name="slices",
                storage_path=storage,
                checkpoint_config=CheckpointConfig(every_steps=EVERY),
                failure_config=FailureConfig(standby_after_s=0.0 if standby == "standby" else None),
                max_steps=100_000,
            ),
            reporter=loss,
        ).fit()
        print(
            json.dumps(
                {
                    "path": result.path,
                    "step": result.step,
                    "hosts": loss.hosts,
                    "variables": loss.variables,
                    "held": loss.held,
                    "left": groups_held(),
                    "seconds": loss.seconds,
                    "own": loss.own,
                    "recoveries": [
                        [r.cause, r.survivors, r.buckets_kept, r.buckets_read, r.bytes_read] for r in result.recoveries
                    ],
                    "parts": [dict(r.parts_s) for r in result.recoveries],
                    "events": [event for event in loss.events if event["kind"] not in ("window", "commit")],
                }
            )
        )
    finally:
        ray.shutdown()
        machines.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
