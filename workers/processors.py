"""Processors of their own for hosts that share a machine.

Left alone, the kernel moves their threads to another processor at almost every turn. Whatever a thread left in its
caches is then fetched again, in each phase. So each host gets an even part of the processors, with its device process.
What works beside the steps roams: it reads input, writes files, compares rows.

Only a cluster that the program started for itself has the machine for itself. In others, nothing is kept to.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable

OWN_CLUSTER = "PODEMBED_CLUSTER"
"""A variable in the environment of all processes of such a cluster."""

XLA_THREADS = "PJRT_NPROC"
"""A variable in the environment of a process: number of threads of XLA's pool for CPU devices. Each device has one at
least. Neither `--xla_cpu_multi_thread_eigen` nor `intra_op_parallelism_threads` in `XLA_FLAGS` changes that in jax
0.10 to 0.12: with both, products and loops still ran on all processors.
"""

_ALL = frozenset(os.sched_getaffinity(0))
"""As this process found them. A container or a batch system may have given it a part of the machine."""

_keeps = threading.Event()
"""Set as soon as a thread of this process keeps to something. Otherwise what anybody else chose is left alone."""


def number_of_processors() -> int:
    """Processors that this process may use, whatever its threads keep to."""
    return len(_ALL if _keeps.is_set() else os.sched_getaffinity(0))


def processors_of(host: int, num_hosts: int, *, threads: int, known: Iterable[int] | None = None) -> frozenset[int]:
    """Those that a host of a machine works on: its part of them, or all where each part would have fewer processors
    than a host's kernels have threads. Those of a part follow each other, since neighbours share caches and memory.

    Args:
      threads: number of threads of its kernels.
      known: that it may use; None for those of this process.
    """
    allowed = sorted(_ALL if known is None else known)
    if len(allowed) // num_hosts < threads:
        return frozenset(allowed)
    return frozenset(allowed[host * len(allowed) // num_hosts : (host + 1) * len(allowed) // num_hosts])


def keep_thread_to(processors: Collection[int]) -> None:
    """The calling thread, and those that it starts from now on."""
    _keep(0, processors)


def keep_process_to(processors: Collection[int]) -> None:
    """All threads of this process, and those that they start."""
    for thread in os.listdir("/proc/self/task"):
        _keep(int(thread), processors)


def roam() -> None:
    """Lets the calling thread work wherever there is room, though the one that started it may keep to less."""
    _keep(0, _ALL)


def _keep(thread: int, processors: Collection[int]) -> None:
    if frozenset(processors) != _ALL:
        _keeps.set()
    elif not _keeps.is_set():
        # What somebody else chose for this thread stays.
        return
    # A thread may have ended. Somebody may have given the process other processors since; then the kernel decides.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(thread, processors)
