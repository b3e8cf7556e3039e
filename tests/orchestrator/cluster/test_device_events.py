"""What is said about devices: nothing about processors that were asked for, and everything else."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.driver.recovery import device_events
from podembed.workers.device.process import DeviceReady
from tests.sentences import saying, sentences


def ready(platform: str, kind: str, num_devices: int = 1) -> DeviceReady:
    return DeviceReady(process=1, platform=platform, num_devices=num_devices, compile_s=0.0, kind=kind)


CPU, GPU = ready("cpu", "cpu"), ready("gpu", "NVIDIA H200")


@pytest.mark.parametrize("resources", [None, {"CPU": 1}, {"CPU": 1, "GPU": 0}, {"CPU": 1, "rack1": 1}])
def test_processors_that_were_asked_for_are_not_worth_a_word(resources: dict[str, float] | None) -> None:
    assert sentences(device_events([CPU, CPU], resources)) == []


def test_accelerators_are_named() -> None:
    assert sentences(device_events([GPU, GPU], {"GPU": 1})) == ["devices: 1 x NVIDIA H200 for hosts 0-1"]
    (told,) = sentences(device_events([ready("tpu", "TPU v4", 4), ready("tpu", "TPU v4", 8)], {"TPU": 4}))
    assert told == "devices: 4 x TPU v4 for host 0; 8 x TPU v4 for host 1"


def test_accelerators_that_jax_did_not_find_are_missed() -> None:
    (told,) = sentences(device_events([CPU, CPU], {"CPU": 8, "TPU": 4}))
    assert told.startswith("hosts 0-1: found processors only, with 4 TPU reserved for each host")
    named, missed = sentences(device_events([GPU, CPU], {"GPU": 1}))
    assert named == "devices: 1 x NVIDIA H200 for host 0; 1 x cpu for host 1"
    assert missed.startswith("host 1: found processors only, with 1 GPU reserved")


@pytest.mark.parametrize(
    ("resources", "platforms", "words"),
    [
        (None, "", "the cluster has 8 GPU, and hosts reserve none"),
        (None, "cuda", None),
        ({"CPU": 1, "GPU": 1}, "", None),
    ],
)
def test_accelerators_that_nobody_reserves_are_named_once(
    resources: dict[str, float] | None, platforms: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    there: dict[str, Any] = {"CPU": 64.0, "GPU": 8.0, "TPU": 0.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    told: list[str] = []
    backend = RayBackend(ScalingConfig(num_hosts=2, resources_per_host=resources), saying(told))
    for _ in range(2):
        backend._name_idle_accelerators(backend.bundle(2))
    assert len(told) == (words is not None)
    assert words is None or told[0].startswith(words)
