"""What Ray's labels say of a machine's place in a TPU slice, and the selectors that name such places.

Ray makes the labels when a node starts. On Kubernetes they come from `TPU_NAME`, `TPU_WORKER_ID`, `TPU_TOPOLOGY` and
`TPU_ACCELERATOR_TYPE` in its environment, elsewhere from the machine's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Slice, SliceMember

SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
POD_TYPE = "ray.io/tpu-pod-type"
NODE_ID = "ray.io/node-id"


def domain_of(node: Mapping[str, Any], topology: Topology | None) -> FailureDomain:
    """What a node of `ray.nodes` fails with: its slice where the run uses slices of several machines, else it fails
    alone.
    """
    name = (node.get("Labels") or {}).get(SLICE_NAME)
    if topology is None or topology.hosts == 1 or not name:
        return FailureDomain.of_machine(node["NodeID"], node["NodeManagerAddress"])
    return FailureDomain(name, f"slice {name}")


def part_of(node: Mapping[str, Any], topology: Topology | None) -> SliceMember | None:
    """Which part of a slice a node of `ray.nodes` is; None where it is none, or where the run does not ask."""
    labels = node.get("Labels") or {}
    pod_type, worker = labels.get(POD_TYPE, ""), labels.get(WORKER_ID, "")
    if topology is None or not pod_type:
        return None
    if topology.hosts == 1 and pod_type == topology.pod_type:
        return SliceMember(pod_type=pod_type, worker=0)
    return SliceMember(pod_type=pod_type, worker=int(worker)) if worker.isdecimal() and labels.get(SLICE_NAME) else None


def selectors(chosen: Slice, topology: Topology) -> list[dict[str, str]]:
    """The labels of the machine of each host of a slice. A machine that takes the place of a lost one has them, too."""
    if topology.hosts == 1:
        return [{NODE_ID: machine} for machine in chosen.machines]
    return [{SLICE_NAME: chosen.name, WORKER_ID: str(worker)} for worker in range(topology.hosts)]
