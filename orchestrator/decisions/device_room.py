"""`room_of`: what the driver knows of the devices before any worker has started, for tables with place='auto'.

Ray names the kind of a machine's accelerators, and a table of published figures says how much memory they have.
"""

from __future__ import annotations

from collections.abc import Sequence

from podembed.embedding.device_places import ON_CPUS, DeviceRoom
from podembed.orchestrator.api.chips import CHIPS, GPU_BYTES
from podembed.orchestrator.api.scaling import ScalingConfig
from podembed.orchestrator.decisions.membership import Node

_PREFIX = "accelerator_type:"


def room_of(scaling: ScalingConfig, nodes: Sequence[Node] = ()) -> DeviceRoom | str:
    """The devices of the fewest hosts that a run may have; or why there are none for tables.

    Args:
      nodes: machines of the cluster; none where there is no cluster yet.
    """
    reserved = {} if scaling.platform == "cpu" else scaling.reserved or {}
    name = next((name for name in ("TPU", "GPU") if reserved.get(name)), None)
    if name is None:
        return ON_CPUS
    if scaling.slices is not None:
        kinds = [scaling.slices.accelerator_type]
    else:
        there = [node.total for node in nodes if node.total.get(name)]
        kinds = sorted({key.removeprefix(_PREFIX) for total in there for key in total if key.startswith(_PREFIX)})
    sizes = {kind: size for kind in kinds if (size := _memory_bytes(kind))}
    if not kinds or len(sizes) < len(kinds):
        unknown = ", ".join(kind for kind in kinds if kind not in sizes) or "those that Ray has no name for"
        return f"the memory of {name}s is not known: {unknown}"
    kind = min(sizes, key=lambda kind: sizes[kind])
    share = min(1.0, reserved[name])
    parts = scaling.least_hosts * max(1, int(reserved[name]) // scaling.devices.num_replicas)
    return DeviceRoom(kind=kind, memory_bytes=int(share * sizes[kind]), num_parts=parts, is_tpu=name == "TPU")


def _memory_bytes(kind: str) -> int | None:
    """Of one accelerator, by the name that Ray has for it; None where it is not known."""
    chip = CHIPS.get(kind.removeprefix("TPU-").lower())
    return GPU_BYTES.get(kind) if chip is None else chip.memory_bytes
