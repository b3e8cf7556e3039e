"""What the driver knows of devices before any worker has started."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.embedding.device_places import DeviceRoom
from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.decisions.device_room import room_of
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Node

GIB = 1 << 30


def node(**total: float) -> Node:
    return Node(id=str(total), domain=FailureDomain(name=str(total)), total=total)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"topology": "4x4", "accelerator_type": "TPU-V6E", "num_slices": (2, 4)},
            DeviceRoom(kind="TPU-V6E", memory_bytes=32 * GIB, num_parts=32, is_tpu=True),
        ),
        (
            {"topology": "2x2x1", "accelerator_type": "TPU-V5P", "mesh": {"data": 2, "model": 2}},
            DeviceRoom(kind="TPU-V5P", memory_bytes=95 * GIB, num_parts=2, is_tpu=True),
        ),
        ({"topology": "4x4", "accelerator_type": "TPU-V6E", "platform": "cpu"}, "devices are CPUs"),
        ({"num_hosts": 4, "resources_per_host": {"CPU": 4}}, "devices are CPUs"),
        ({"num_hosts": 4, "devices_per_host": 8}, "devices are CPUs"),
        ({"resources_per_host": {"GPU": 1}}, "the memory of GPUs is not known: those that Ray has no name for"),
    ],
)
def test_what_is_known_without_a_cluster(arguments: dict[str, Any], expected: DeviceRoom | str) -> None:
    assert room_of(ScalingConfig(**arguments)) == expected


def test_ray_names_the_kind_of_a_machine() -> None:
    gpus = ScalingConfig(num_hosts=(2, 4), resources_per_host={"GPU": 8})
    h200, a100 = (node(GPU=8, **{f"accelerator_type:{kind}": 1}) for kind in ("H200", "A100"))
    without = node(CPU=8, **{"accelerator_type:T4": 1})
    assert room_of(gpus, [without, h200]) == DeviceRoom(kind="H200", memory_bytes=141 * 10**9, num_parts=16)
    assert room_of(gpus, [h200, a100]) == DeviceRoom(kind="A100", memory_bytes=40 * 10**9, num_parts=16)
    half = ScalingConfig(resources_per_host={"GPU": 0.5})
    assert room_of(half, [h200]) == DeviceRoom(kind="H200", memory_bytes=141 * 10**9 // 2, num_parts=1)
    odd = node(GPU=8, **{"accelerator_type:XYZ": 1})
    assert room_of(gpus, [h200, odd]) == "the memory of GPUs is not known: XYZ"
    tpus = ScalingConfig(resources_per_host={"TPU": 4})
    v5e = node(TPU=4, **{"accelerator_type:TPU-V5LITEPOD": 1})
    assert room_of(tpus, [v5e]) == DeviceRoom(kind="TPU-V5LITEPOD", memory_bytes=16 * GIB, num_parts=4, is_tpu=True)
