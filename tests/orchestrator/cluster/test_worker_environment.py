"""Who may take accelerators, and that what the user set stays."""

from __future__ import annotations

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


def test_threads_are_added_to_the_flags_of_the_user() -> None:
    found = environment("host", {"CPU": 1}, 2, XLA_FLAGS="--xla_mine=1")
    assert found["XLA_FLAGS"] == "--xla_mine=1 --xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads=2"
    assert found["NUMBA_NUM_THREADS"] == "2"


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
