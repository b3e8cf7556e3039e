"""Trains on a cluster of several Ray nodes of its own, takes a node away in mid-run, and prints what came of it as one
JSON line.

Run as `python -m tests.faults.network.node_loss_process DATA STORAGE`. A process of its own, because Ray connects a
process to one cluster only.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
# Ray's niceness of 15 makes a busy machine starve the run. One is hardly felt, and tells whether a run sees it.
os.environ.update(RAY_raylet_start_wait_time_s="600", RAY_worker_niceness="1", RAY_prestart_worker_first_driver="0")

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig
from podembed.orchestrator.cluster.agent_ports import free_agent_ports, tell_daemons
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.reference import JobReference
from tests.processes import actor_processes

MISSED_S = 300.0  # within which a worker notices that its node is gone


class NodeTaker(SilentReporter):
    """Removes, once, a node on which a host lives, after the second commit."""

    def __init__(self, cluster: Cluster, nodes: list) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.events: list[Event] = []
        self.began_s = time.monotonic()

    def event(self, event: Event) -> None:
        self.events.append(event)
        print(f"{time.monotonic() - self.began_s:.1f} s: {event.sentence()}", file=sys.stderr, flush=True)

    def window(self, report: WindowReport) -> None:
        if report.committed_step >= 10 and self.nodes:
            victim = next(node for node in self.nodes if node.node_id in _used_nodes())
            self.nodes.clear()
            hosts = actor_processes("HostActor")
            self.cluster.remove_node(victim, allow_graceful=False)
            # The node's workers leave when they miss their daemon; the run must not be over by then.
            deadline = time.monotonic() + MISSED_S
            # By number, not by title, which Ray changes with each call.
            while all(os.path.exists(f"/proc/{host}") for host in hosts) and time.monotonic() < deadline:
                time.sleep(0.05)
            if all(os.path.exists(f"/proc/{host}") for host in hosts):
                raise TimeoutError(f"No host process ended with its node within {MISSED_S:.0f} s.")


def _used_nodes() -> set[str]:
    """Nodes on which the run has a host; what Ray says of free resources lags behind."""
    groups = placement_group_table().values()
    return {node for group in groups if group["state"] == "CREATED" for node in group["bundles_to_node_id"].values()}


def main(data: str, storage: str) -> None:
    # The head's machine cannot be taken away; a second host is always on another one. One machine more than needed,
    # since Ray's daemon may end itself on a busy machine.
    tell_daemons()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **free_agent_ports()}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1, **free_agent_ports()) for _ in range(3)]
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        reporter = NodeTaker(cluster, nodes)
        result = Trainer(
            JobReference(function="tests.small_job:small_job", arguments={"folder": data}),
            scaling_config=ScalingConfig(num_hosts=2, threads_per_host=1, resources_per_host={"CPU": 1}),
            run_config=RunConfig(
                name="node-loss", storage_path=storage, max_steps=50, checkpoint_config=CheckpointConfig(every_steps=10)
            ),
            reporter=reporter,
        ).fit()
        print(
            json.dumps(
                {
                    "path": result.path,
                    "step": result.step,
                    "losses": [result.losses[step] for step in sorted(result.losses)],
                    "recoveries": [recovery.cause for recovery in result.recoveries],
                    "events": [{"kind": event.kind, **event.values()} for event in reporter.events],
                }
            )
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
