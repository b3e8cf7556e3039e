"""A machine without the devices that a run asks for is named, and is a fault of that machine."""

from __future__ import annotations

import socket

import pytest

from podembed.orchestrator.api.errors import FailureKind, is_host_fault
from podembed.orchestrator.group.worker_errors import failure_of
from podembed.workers.device.gang_errors import DeviceMissing, looking_for
from podembed.workers.liveness.worker import Worker


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_what_is_there_is_taken(platform: str) -> None:
    with looking_for(platform):
        pass


def test_other_devices_than_those_that_are_wanted_are_refused() -> None:
    with (
        pytest.raises(DeviceMissing, match=r"Found no TPU .*but cpu.*Expected the chips.*Install jax\[tpu\].*platform"),
        looking_for("tpu"),
    ):
        pass


def test_an_error_of_the_plugin_names_the_machine_and_the_remedy() -> None:
    with pytest.raises(DeviceMissing) as caught, looking_for("tpu"):
        raise RuntimeError("Unable to initialize backend 'tpu': no libtpu.so (set JAX_PLATFORMS='' to choose)")
    text = str(caught.value)
    assert f"on machine {socket.gethostname()} (Unable to initialize backend 'tpu': no libtpu.so)" in text
    assert "JAX_PLATFORMS" not in text, "that would train on something else"
    failure = failure_of(Worker("device", 2), caught.value, details="Traceback")
    assert (failure.kind, failure.details) == (FailureKind.DIED, "")
    assert is_host_fault([failure])


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="timed out"), looking_for("tpu"):
        raise RuntimeError("the gang timed out")
    with pytest.raises(RuntimeError, match="initialize backend"), looking_for(""):
        raise RuntimeError("Unable to initialize backend 'tpu': x")
