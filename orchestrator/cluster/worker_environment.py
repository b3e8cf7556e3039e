"""The environment of worker processes: their allocator, their threads, and which devices JAX may take there.

When a process makes its first array, JAX takes all accelerators that it sees, with most of their memory. A TPU serves
one process only. Ray shows a process the ones that it gave to it, and hides none from a process that it gave nothing.
The environment therefore says which processes may look. Values only: nothing is read or set here.
"""

from __future__ import annotations

from collections.abc import Mapping

from podembed.orchestrator.events.machines import AcceleratorsIdle
from podembed.workers.liveness.worker import WorkerKind
from podembed.workers.processors import XLA_THREADS

# glibc's allocator gives large blocks back to the kernel and takes them again in every step, with a page fault for each
# 4 KiB. If it keeps them, in huge pages where there are any, a CPU device spends a fifth less time in a step.
MALLOC_TUNABLES = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_max=0",
        "glibc.malloc.trim_threshold=17179869184",
        "glibc.malloc.top_pad=67108864",
        "glibc.malloc.arena_max=1",
    )
)
# Arrow then takes its memory there as well. Its own pool gives every decoded row group back: a thousand page faults
# each.
ALLOCATOR = {"GLIBC_TUNABLES": MALLOC_TUNABLES, "ARROW_DEFAULT_MEMORY_POOL": "system"}
PLATFORMS = "JAX_PLATFORMS"
GPU_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_GPU_SHARE = 0.75  # of a GPU's memory that JAX takes by default
ACCELERATORS = ("GPU", "TPU")  # what JAX runs on, as Ray calls it
_NO_ACCELERATORS = ("CPU", "memory")


def accelerators_of(resources: Mapping[str, float] | None) -> dict[str, float]:
    """What of a host's Ray resources belongs to its device process alone: all but processors and memory."""
    return {name: amount for name, amount in (resources or {}).items() if name not in _NO_ACCELERATORS and amount > 0}


def worker_environment(
    kind: WorkerKind,
    *,
    resources: Mapping[str, float],
    threads: int | None,
    environ: Mapping[str, str],
    platforms: str | None = None,
) -> dict[str, str]:
    """Variables for a worker process.

    Args:
      kind: which of a host's two processes.
      resources: Ray resources of a host.
      threads: threads of a host's kernels and its CPU device; None leaves the libraries' own choice.
      environ: what the user set. The allocator's variables, XLA's flags and threads, and JAX's variables for device
        processes are left as they are there.
      platforms: what the run's device processes ask JAX for, whatever the user's environment says; None leaves it to
        that.
    """
    asked = platforms or environ.get(PLATFORMS, "")
    computes_here = not _is_on_accelerators(kind, resources, asked)
    allocator = _allocator(environ) if computes_here else {}
    return allocator | _threads(threads, environ, computes_here) | _devices(kind, resources, environ, platforms)


def _is_on_accelerators(kind: WorkerKind, resources: Mapping[str, float], platforms: str) -> bool:
    """Whether a process compiles for accelerators, and computes nothing on the CPU.

    JAX compiles for a GPU on many threads, which wait for each other where there is one arena. On an H200 a step of
    DLRM took 30 s and more to compile, and 1 to 6 s with the allocator as it is.
    """
    reserved = any(resources.get(name, 0) > 0 for name in ACCELERATORS)
    return kind == "device" and platforms != "cpu" and reserved


def _allocator(environ: Mapping[str, str]) -> dict[str, str]:
    is_set = "GLIBC_TUNABLES" in environ
    return {} if is_set else {name: value for name, value in ALLOCATOR.items() if name not in environ}


def _threads(threads: int | None, environ: Mapping[str, str], computes_here: bool) -> dict[str, str]:
    # A cluster of somebody else does not have the driver's environment.
    own = {name: environ[name] for name in ("XLA_FLAGS", XLA_THREADS) if name in environ}
    if threads is None:
        return own
    kernels = dict.fromkeys(("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return kernels | ({XLA_THREADS: str(threads)} if computes_here else {}) | own


def _devices(
    kind: WorkerKind, resources: Mapping[str, float], environ: Mapping[str, str], platforms: str | None
) -> dict[str, str]:
    if kind == "host":
        # It computes learning rates with JAX, and a job's initializers may; the accelerators are its device process's.
        return {PLATFORMS: "cpu"}
    if platforms is not None:
        return {PLATFORMS: platforms}
    if not accelerators_of(resources):
        return {} if environ.get(PLATFORMS) else {PLATFORMS: "cpu"}
    gpu_share = resources.get("GPU", 0.0)
    if 0 < gpu_share < 1 and GPU_MEMORY not in environ:
        return {GPU_MEMORY: f"{JAX_GPU_SHARE * gpu_share:.3f}"}
    return {}


def idle_accelerators(
    bundle: Mapping[str, float], there: Mapping[str, float], *, platforms: str | None
) -> AcceleratorsIdle | None:
    """What to say where devices will be CPUs although the cluster has something faster: it looks like training that is
    merely slow. None where there is nothing to say.

    Args:
      bundle: resources that a host reserves.
      there: resources of the cluster.
      platforms: what the user told JAX to run on.
    """
    idle = tuple(f"{there[name]:g} {name}" for name in ACCELERATORS if there.get(name, 0) > 0)
    if not idle or accelerators_of(bundle) or platforms:
        return None
    return AcceleratorsIdle(idle=idle)
