"""Moves hosts that live on between machines that come, vanish and are to be avoided, and prints where they were as one
JSON line.

Run as `python -m tests.faults.network.placement_process`. The hosts are actors that do nothing; a machine has room for
several, and each host is to have one for itself. A process of its own, because Ray connects a process to one cluster
only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.update(RAY_raylet_start_wait_time_s="600", RAY_worker_niceness="0")

import ray
from ray.cluster_utils import Cluster

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.cluster.agent_ports import free_agent_ports, tell_daemons
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.group.worker_group import HostHandles

ANSWER_S = 600.0


@ray.remote
class Idle:
    """A worker that says where it is."""

    def identity(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def prepare(self, *arguments: Any) -> None: ...


class Machines:
    """The cluster, the backend, and where the hosts of each generation were."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.backend = RayBackend(
            ScalingConfig(num_hosts=(1, 4), resources_per_host={"CPU": 1}), lambda text: None, (Idle, Idle)
        )
        self.backend.has_own_machines = True
        self.nodes: dict[str, Any] = {}
        self.seen: list[dict[str, Any]] = []

    def add(self, *names: str) -> None:
        for name in names:
            self.nodes[name] = self.cluster.add_node(num_cpus=4, **free_agent_ports())

    def name(self, node_id: str) -> str:
        return next(name for name, node in self.nodes.items() if node.node_id == node_id)

    def note(self, handles: Sequence[HostHandles], began_s: float) -> Sequence[HostHandles]:
        """Where the processes of these hosts are, as they say themselves, once all of them do."""
        asked = [(pair.host.actor.identity.remote(), pair.device.actor.identity.remote()) for pair in handles]  # type: ignore[attr-defined]
        nodes = [ray.get(list(pair), timeout=ANSWER_S) for pair in asked]
        assert all(host == device for host, device in nodes)
        self.seen.append(
            {
                "on": [self.name(host) for host, _ in nodes],
                "hosts": [pair.host.where for pair in handles],
                "held": sorted(self.name(node) for node in self.backend.held_places() if self.is_alive(node)),
                "seconds": time.monotonic() - began_s,
            }
        )
        return handles

    @staticmethod
    def is_alive(node_id: str) -> bool:
        return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())

    def go_on(self, handles: Sequence[HostHandles], kept: Sequence[int | None]) -> Sequence[HostHandles]:
        """The next generation, as after a fault or a planned change: the devices have ended, and so have the hosts that
        are not kept.
        """
        began_s = time.monotonic()
        self.backend.end([pair.device for pair in handles])
        self.backend.end([pair.host for rank, pair in enumerate(handles) if rank not in kept])
        return self.note(self.backend.relaunch(handles, kept, lambda: None), began_s)


def main() -> None:
    tell_daemons()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **free_agent_ports()}
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        machines = Machines(cluster)
        backend = machines.backend
        machines.add("a", "b")
        hosts = machines.note(backend.launch(2, lambda: None), time.monotonic())

        machines.add("c")  # one more host; a and b have room as well
        hosts = machines.go_on(hosts, [0, 1, None])

        machines.add("d")  # a spare machine, for the number of hosts to stay
        lost = machines.seen[0]["on"][0]
        machines.cluster.remove_node(machines.nodes[lost], allow_graceful=False)
        fit = backend.fit(hosts)
        hosts = machines.go_on(hosts, [None, 1, 2])

        # The machine of host 1 is to be left, and one host fewer goes on; then the bundle of the lost machine is of no
        # use to anybody.
        backend.avoided = frozenset({machines.nodes[machines.seen[0]["on"][1]].node_id})
        still_fit = backend.fit(hosts)
        hosts = machines.go_on(hosts, [0, 2])
        backend.stop(hosts)
        print(json.dumps({"seen": machines.seen, "fit": sorted(fit), "still_fit": sorted(still_fit)}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
