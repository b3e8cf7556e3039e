"""Who may take accelerators, and that what the user set stays."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from podembed.orchestrator.cluster.worker_environment import ALLOCATOR, accelerators_of, worker_environment


def environment(kind: str, resources: dict[str, float], threads: int | None = None, **environ: str) -> dict[str, str]:
    return worker_environment(kind, resources=resources, threads=threads, environ=environ)  # type: ignore[arg-type]


def without_allocator(found: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in found.items() if name not in ALLOCATOR}


@pytest.mark.parametrize(
    ("kind", "resources", "environ", "expected"),
    [
        ("host", {"CPU": 1}, {}, {"JAX_PLATFORMS": "cpu"}),
        ("host", {"CPU": 1, "TPU": 4}, {"JAX_PLATFORMS": "tpu,cpu"}, {"JAX_PLATFORMS": "cpu"}),
        ("device", {"CPU": 1, "memory": 1e9}, {}, {"JAX_PLATFORMS": "cpu"}),
        ("device", {"CPU": 1, "GPU": 0}, {}, {"JAX_PLATFORMS": "cpu"}),
        ("device", {"CPU": 1}, {"JAX_PLATFORMS": "cuda"}, {}),
        ("device", {"CPU": 1, "GPU": 1}, {}, {}),
        ("device", {"CPU": 100, "TPU": 4}, {}, {}),
        ("device", {"GPU": 0.5}, {}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.375"}),
        ("device", {"GPU": 0.5}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, {}),
    ],
)
def test_accelerators_are_for_device_processes_that_reserve_some(
    kind: str, resources: dict[str, float], environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert without_allocator(environment(kind, resources, **environ)) == expected


THREADS_OF_XLA = """
import os
import jax
jax.jit(lambda a: a @ a)(jax.numpy.ones((500, 500))).block_until_ready()
names = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
print(names.count("tf_XLAEigen"))
"""


@pytest.mark.parametrize(
    ("threads", "environ", "expected"),
    [
        (1, {}, 1),
        (3, {}, 3),
        (3, {"PJRT_NPROC": "2"}, 2),
        (None, {"PJRT_NPROC": "2"}, 2),
        # XLA has a thread for each device at least.
        (1, {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, 4),
    ],
)
def test_a_device_process_has_as_many_threads_as_it_was_told(
    threads: int | None, environ: dict[str, str], expected: int
) -> None:
    """A process of a cluster that does not have the driver's environment."""
    there = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", THREADS_OF_XLA],
        env=there | environment("device", {"CPU": 1}, threads, **environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert int(done.stdout) == expected


def test_threads_are_those_of_the_kernels_and_of_cpu_devices() -> None:
    found = environment("host", {"CPU": 1}, 2)
    assert (found["NUMBA_NUM_THREADS"], found["PJRT_NPROC"]) == ("2", "2")
    assert "PJRT_NPROC" not in environment("host", {"CPU": 1})
    # What computes on an accelerator keeps XLA's pool as it is.
    on_gpu = environment("device", {"CPU": 1, "GPU": 1}, 2)
    assert on_gpu["NUMBA_NUM_THREADS"] == "2"
    assert "PJRT_NPROC" not in on_gpu


@pytest.mark.parametrize("kind", ["host", "device"])
def test_what_compiles_for_accelerators_keeps_the_allocator_of_the_system(kind: Any) -> None:
    found = environment(kind, {"CPU": 1, "GPU": 1})
    assert bool(found.keys() & ALLOCATOR.keys()) == (kind == "host")
    # A pretended slice computes on the CPU.
    pretended = worker_environment(kind, resources={"TPU": 4}, threads=None, environ={}, platforms="cpu")
    assert pretended.items() >= ALLOCATOR.items()
    # So do a GPU that the user told JAX to leave alone, and what is no accelerator.
    assert environment(kind, {"GPU": 1}, JAX_PLATFORMS="cpu").items() >= ALLOCATOR.items()
    assert environment(kind, {"CPU": 1, "rack1": 1}).items() >= ALLOCATOR.items()


def test_an_allocator_of_the_user_stays() -> None:
    assert environment("host", {"CPU": 1}).items() >= ALLOCATOR.items()
    assert not environment("host", {"CPU": 1}, GLIBC_TUNABLES="glibc.malloc.perturb=1").keys() & ALLOCATOR.keys()
    assert "ARROW_DEFAULT_MEMORY_POOL" not in environment("host", {"CPU": 1}, ARROW_DEFAULT_MEMORY_POOL="jemalloc")


def test_processors_and_memory_are_no_accelerators() -> None:
    assert accelerators_of(None) == {}
    assert accelerators_of({"CPU": 8, "memory": 1e9, "GPU": 0, "TPU": 4}) == {"TPU": 4}
