"""Machines that pretend to be parts of TPU slices: Ray nodes with the chips as a resource and the four variables that
Kubernetes sets on such machines. Everything that Ray knows of slices it derives from these.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.cluster.agent_ports import free_agent_ports, tell_daemons
from tests.processes import actor_processes

# As of a group of slices that is long gone: what the driver computes must come in its place.
STALE = {"MEGASCALE_NUM_SLICES": "7", "MEGASCALE_SLICE_ID": "6", "MEGASCALE_COORDINATOR_ADDRESS": "10.9.8.7"}


class SliceMachines:
    """A cluster of a head without hosts, and machines of slices. Mutated: `nodes`, by slice and number."""

    def __init__(self) -> None:
        tell_daemons()
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **free_agent_ports()}
        )
        self.nodes: dict[tuple[str, int], Any] = {}

    def add_slice(self, name: str, topology: Topology) -> None:
        for worker in range(topology.hosts):
            self.add(name, worker, topology)

    def add(self, name: str, worker: int, topology: Topology) -> None:
        environment = {
            "TPU_NAME": name,
            "TPU_WORKER_ID": str(worker),
            "TPU_ACCELERATOR_TYPE": topology.pod_type,
            "TPU_TOPOLOGY": topology.shape,
        }
        with _environment(environment | STALE):
            self.nodes[name, worker] = self.cluster.add_node(
                num_cpus=1, resources={"TPU": topology.chips_per_host}, **free_agent_ports()
            )

    def lose(self, name: str, worker: int) -> None:
        self.cluster.remove_node(self.nodes.pop((name, worker)), allow_graceful=False)

    def name_of(self, node_id: str) -> str:
        """Such as `a1`; empty for a machine that is gone."""
        return next((f"{name}{worker}" for (name, worker), node in self.nodes.items() if node.node_id == node_id), "")

    def close(self) -> None:
        self.cluster.shutdown()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def groups_held() -> dict[str, list[str]]:
    """Placement groups that are not removed: by kind (`head` or `hosts`), their states."""
    held: dict[str, list[str]] = {"head": [], "hosts": []}
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            is_head = any("-head" in name for bundle in group["bundles"].values() for name in bundle)
            held["head" if is_head else "hosts"].append(group["state"])
    return held


def device_variables() -> list[dict[str, str]]:
    """What device processes of this session were started with of JAX's and libtpu's variables."""
    found = []
    for process in actor_processes("DeviceActor"):
        with contextlib.suppress(OSError):
            pairs = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
            own = dict(pair.partition("=")[::2] for pair in pairs)
            found.append({name: own[name] for name in sorted(own) if name.startswith(("MEGASCALE", "JAX_PLATFORMS"))})
    return found


def joined(machines: SliceMachines) -> None:
    """Connects this process to the cluster."""
    ray.init(address=machines.cluster.address, logging_level="ERROR", log_to_driver=False)
