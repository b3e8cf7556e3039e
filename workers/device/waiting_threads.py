"""The thread that waits for other hosts' gradients where devices are CPUs: it must not hold up those that compute.

JAX sums gradients of CPU devices with gloo. Its event loop asks again and again while another thread holds a connection
(issue 246 of pytorch/gloo). Where processors are few, it wakes up on the very processor of that thread and pushes it
off. Then it asks in vain for a whole time slice. As a batch thread it has the same share of the processors, and pushes
no other thread off (sched(7), SCHED_BATCH). `benchmarks/dlrm.py --bench small-C2 --placement buckets` shows what that
is worth.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_OWN_THREADS = Path("/proc/self/task")
_LOOK_S = 1e-3
_IN_EPOLL = ("epoll", "ep_poll")
"""Kernel functions that a thread sleeps in while it waits for events of sockets."""


def threads() -> frozenset[int]:
    """The threads of this process, as the kernel numbers them; none where it does not list them."""
    try:
        return frozenset(int(name) for name in os.listdir(_OWN_THREADS))
    except OSError:
        return frozenset()


def calm_waiting(before: frozenset[int], *, looks: int = 100) -> tuple[int, ...]:
    """Makes batch threads of those that wait for sockets and were not there before. Where that cannot be done, steps
    are slower and nothing else.

    Args:
      before: the threads of this process at an earlier time.
      looks: so often it looks while none waits, a millisecond apart. A new thread may not have come that far.

    Returns:
      Those that were changed.
    """
    for look in range(looks):
        if look:
            time.sleep(_LOOK_S)
        found = tuple(thread for thread in sorted(threads() - before) if _waits(thread) and _made_batch(thread))
        if found:
            return found
    return ()


def _waits(thread: int) -> bool:
    try:
        place = (_OWN_THREADS / str(thread) / "wchan").read_text()
    except OSError:
        return False
    return any(name in place for name in _IN_EPOLL)


def _made_batch(thread: int) -> bool:
    try:
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True
