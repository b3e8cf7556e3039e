"""Float32 arrays that are used again once they are free.

A large new array costs a page fault for every 4 KiB, several times the work of pooling into it. So arrays that each
step returns come from here. A buffer is free again when its reference count says that no view of it is left. The user
may hold one through numpy or JAX, and until it goes the buffer is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from podembed.embedding.kernels.arrays import CACHE_LINE_BYTES

MAX_BUFFERS = 4


class RecycledBuffers:
    """The buffers of one place in a step. Mutable, for one thread. A new size forgets those of the old one."""

    def __init__(self) -> None:
        self._size_bytes = 0
        self._buffers: list[np.ndarray] = []
        # What the count of an unused buffer looks like from inside `_find_idle`, on this interpreter.
        self._idle_count = _count_from_inside([np.empty(1, np.uint8)])

    def take(self, shape: tuple[int, int]) -> np.ndarray:
        """A float32 array of any content, starting on a cache line. It is the caller's as long as anything refers to
        it.
        """
        size_bytes = 4 * shape[0] * shape[1]
        if size_bytes != self._size_bytes:
            self._size_bytes, self._buffers = size_bytes, []
        memory = self._find_idle(self._buffers)
        if memory is None:
            memory = np.empty(size_bytes + CACHE_LINE_BYTES, np.uint8)
            # One that is kept for longer is forgotten here, and freed by its last user.
            self._buffers = [*self._buffers[1 - MAX_BUFFERS :], memory]
        start = -memory.ctypes.data % CACHE_LINE_BYTES
        return memory[start : start + size_bytes].view(np.float32).reshape(shape)

    def _find_idle(self, held: Sequence[np.ndarray]) -> np.ndarray | None:
        for memory in held:
            if sys.getrefcount(memory) <= self._idle_count:
                return memory
        return None


def _count_from_inside(held: Sequence[np.ndarray]) -> int:
    """The reference count of a buffer that only the list holds, seen as `RecycledBuffers._find_idle` sees it."""
    for memory in held:
        return sys.getrefcount(memory)
    return 0
