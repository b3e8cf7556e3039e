"""Memory of the machine: giving it back early, and what the kernel says of processes that it killed for want of it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# In a container the first counts those of its own control group; the second counts those of the whole machine.
_COUNTERS = ("sys/fs/cgroup/memory.events", "proc/vmstat")


_MADV_DONTNEED = 4  # of Linux
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


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed so far for want of memory, 0 where it does not say.

    Args:
      root: of the file system; for tests.
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
