"""Trains on a cluster of its own whose machines come and go, and prints what came of it as one JSON line.

Run as `python -m tests.faults.elastic_process FORM DATA STORAGE EPOCHS`. A host has a machine for itself, and the run
begins on a and b.

short: one to two hosts; a is killed, then c joins.
long: two to three hosts; c joins; a is killed; b drains, which leaves too few, so that the run waits; then d joins.

The run is told to stop when all that has happened and a commit stands. A process of its own, because Ray connects a
process to one cluster only.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    # Not for a test that takes a name from here: its other children would inherit it.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    os.environ.update(RAY_raylet_start_wait_time_s="600")  # of which a busy machine needs more than the default
    os.environ.update(RAY_worker_niceness="0")  # Ray's 15 makes a busy machine starve the run

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig
from podembed.orchestrator.cluster.agent_ports import free_agent_ports, tell_daemons
from podembed.orchestrator.decisions import host_watch
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.machines import HostsAwaited
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.reference import JobReference

COMMIT_EVERY = 20
DRAIN_S = 600  # time enough for the next commit of the schedule


def drain(node_id: str, *, seconds: float) -> None:
    """What an autoscaler or a cloud does to a machine that is to go."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline_ms = int((time.time() + seconds) * 1000)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
    is_accepted, why = client.drain_node(node_id, reason, "a test", deadline_ms)
    if not is_accepted:
        raise RuntimeError(f"The drain was refused: {why}")


class Scenario(SilentReporter):
    """Changes the cluster, one thing at a time, once the run has got as far as the thing before made it go.

    Attributes:
      acts: what to do, each with the number of hosts that a commit must stand with first.
      hosts: (number of hosts, step of the first window) of each generation.
    """

    def __init__(self, cluster: Cluster, *, is_long: bool) -> None:
        self.cluster = cluster
        self.acts: Sequence[tuple[int, Callable[[], None]]] = (
            [(2, self.add_c), (3, self.kill_a), (2, self.drain_b), (2, self.stop)]
            if is_long
            else [(2, self.kill_a), (1, self.add_c), (2, self.stop)]
        )
        self.nodes: dict[str, Any] = {name: cluster.add_node(num_cpus=1, **free_agent_ports()) for name in "ab"}
        self.events: list[dict[str, Any]] = []
        self.hosts: list[tuple[int, int]] = []
        self.generation = 0
        self.act = 0
        self.act_generation = 0
        self.began_s = time.monotonic()

    def add(self, name: str) -> None:
        self.nodes[name] = self.cluster.add_node(num_cpus=1, **free_agent_ports())

    def add_c(self) -> None:
        self.add("c")

    def kill_a(self) -> None:
        self.cluster.remove_node(self.nodes["a"], allow_graceful=False)

    def drain_b(self) -> None:
        drain(self.nodes["b"].node_id, seconds=DRAIN_S)

    def stop(self) -> None:
        # SIGTERM belongs to Ray again, which takes it whenever a node is added.
        os.kill(os.getpid(), signal.SIGINT)

    def event(self, event: Event) -> None:
        self.events.append({"kind": event.kind, **event.values()})
        print(f"{time.monotonic() - self.began_s:.1f} s: {event.sentence()}", file=sys.stderr, flush=True)
        if isinstance(event, HostsAwaited) and "d" not in self.nodes:
            self.add("d")

    def window(self, report: WindowReport) -> None:
        if report.generation != self.generation:
            self.generation = report.generation
            self.hosts.append((report.num_hosts, report.step))
        is_settled = report.committed_step > self.hosts[-1][1]
        # The one after a change is another generation, and with the same number of hosts the old one must not be taken
        # for it.
        if is_settled and self.act < len(self.acts) and report.generation > self.act_generation:
            num_hosts, act = self.acts[self.act]
            if report.num_hosts == num_hosts:
                self.act, self.act_generation = self.act + 1, report.generation
                act()


def main(form: str, data: str, storage: str, epochs: str) -> None:
    host_watch.LOOK_S = 0.2
    tell_daemons()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **free_agent_ports()}
    )
    try:
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        is_long = form == "long"
        scenario = Scenario(cluster, is_long=is_long)
        result = Trainer(
            JobReference(function="tests.small_job:small_job", arguments={"folder": data, "epochs": int(epochs)}),
            scaling_config=ScalingConfig(
                num_hosts=(2, 3) if is_long else (1, 2), threads_per_host=1, resources_per_host={"CPU": 1}
            ),
            run_config=RunConfig(
                name="elastic", storage_path=storage, checkpoint_config=CheckpointConfig(every_steps=COMMIT_EVERY)
            ),
            reporter=scenario,
        ).fit()
        print(
            json.dumps(
                {
                    "path": result.path,
                    "step": result.step,
                    "steps_with_loss": len(result.losses),
                    "hosts": scenario.hosts,
                    "changes": [[c.before, c.after, c.step, c.cause] for c in result.changes],
                    "recoveries": [
                        [recovery.cause, recovery.survivors, recovery.buckets_kept] for recovery in result.recoveries
                    ],
                    "events": scenario.events,
                    "stopped_by": result.stopped_by,
                }
            )
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
