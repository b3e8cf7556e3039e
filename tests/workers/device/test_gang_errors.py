"""A machine without the devices that a run asks for is named, and is a fault of that machine."""

from __future__ import annotations

import glob
import os
import socket
import subprocess
import sys

import jax
import pytest

from podembed.orchestrator.api.run_errors import FailureKind, is_host_fault
from podembed.orchestrator.group.worker_errors import failure_of
from podembed.workers.device.gang_errors import DeviceMissing, GangError, looking_for
from podembed.workers.liveness.worker import Worker


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_what_is_there_is_taken(platform: str) -> None:
    with looking_for(platform):
        assert jax.local_devices()[0].platform == "cpu"


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


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda': x (set JAX_PLATFORMS='' to choose)")]
)
def test_a_platform_that_is_asked_for_and_not_installed_is_named(error: Exception) -> None:
    asked = jax.config.jax_platforms  # type: ignore[attr-defined]
    try:
        # Bare is what JAX raises for `cuda` without its plugin.
        jax.config.update("jax_platforms", "cuda")
        said = r"JAX_PLATFORMS=cuda on machine .*Install JAX with its plugin"
        with pytest.raises(GangError, match=said) as caught, looking_for(""):
            raise error
        with pytest.raises(DeviceMissing, match="Found no CUDA"), looking_for("cuda"):
            raise error
    finally:
        jax.config.update("jax_platforms", asked)
    assert failure_of(Worker("device", 0), caught.value).refusal is not None
    with pytest.raises(AssertionError, match="own"), looking_for(""):
        raise AssertionError("own")


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="timed out"), looking_for("tpu"):
        raise RuntimeError("the gang timed out")
    with pytest.raises(RuntimeError, match="initialize backend"), looking_for(""):
        raise RuntimeError("Unable to initialize backend 'tpu': x")


@pytest.mark.skipif(bool(glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")), reason="this machine has a TPU")
def test_a_machine_without_a_tpu_hears_nothing_of_libtpu() -> None:
    """JAX by itself loads it wherever it is installed, and five lines say what it misses."""
    program = (
        "import jax\n"
        "from podembed.workers.device.gang_errors import looking_for\n"
        "with looking_for(''):\n"
        "    print(jax.local_devices()[0].platform)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    found = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("cpu\n", "")
