"""Memory of the machine: taking and giving it back early, and what the kernel says of processes that it killed for want
of it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from podembed.workers.processors import roam

# In a container the first counts those of its own control group; the second counts those of the whole machine.
_COUNTERS = ("sys/fs/cgroup/memory.events", "proc/vmstat")


_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23  # of Linux; the second one since 5.14
_POPULATED_BYTES = 4 << 20
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def let_go(arrays: Sequence[np.ndarray]) -> None:
    """Gives back the whole pages of arrays that are not read any more, while what they are parts of still lives. Their
    values are lost.

    Args:
      arrays: contiguous; parts of arrays that numpy allocated, not of files or of memory that processes share.
    """
    if _LIBC is None:
        return
    for array in arrays:
        if not array.flags.c_contiguous:
            continue
        start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            # It is advice: where the kernel does not take it, the memory is free a little later.
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


def give_back_free() -> None:
    """Gives the kernel what the allocator keeps though nobody uses it. Worker processes' allocators give nothing back
    by themselves, so what a phase took that does not come again, such as the first values of a whole table, would stay
    as long as the process.
    """
    if trim := getattr(_LIBC, "malloc_trim", None):  # of glibc alone
        trim(ctypes.c_size_t(0))


def populate(arrays: Sequence[np.ndarray], *, is_over: Callable[[], bool] = lambda: False) -> None:
    """Takes the memory of arrays that have been allocated and not written. Their values stay, and others may use them
    meanwhile. The first write of a page costs microseconds, which no step has to wait for then.

    Args:
      arrays: contiguous.
      is_over: called every few milliseconds; True ends the work.
    """
    if _LIBC is None:
        return
    for array in arrays:
        start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        for at in range(start, array.ctypes.data + array.nbytes, _POPULATED_BYTES):
            length = min(_POPULATED_BYTES, array.ctypes.data + array.nbytes - at)
            # Where the kernel does not know it, the pages are taken when they are written.
            if is_over() or _LIBC.madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                return


class Populating:
    """`populate` in a thread of its own, beside other work. Mutated: the pages behind the arrays alone."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=_populate_anywhere, args=(arrays, self._is_over.is_set), name="memory", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it within milliseconds; from here on it holds no array. Safe to call twice."""
        self._is_over.set()
        self._thread.join()


def _populate_anywhere(arrays: Sequence[np.ndarray], is_over: Callable[[], bool]) -> None:
    roam()
    populate(arrays, is_over=is_over)


def oom_kills(root: Path = Path("/")) -> int:
    """Number of processes that the kernel has killed so far for want of memory; 0 where it does not tell.

    Args:
      root: root of the file system; for tests.
    """
    for name in _COUNTERS:
        try:
            lines = (root / name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        counts = [int(count) for key, _, count in (line.partition(" ") for line in lines) if key == "oom_kill"]
        if counts:
            return counts[0]
    return 0
