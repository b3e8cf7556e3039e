"""How arrays are allocated for kernels and handed to them.

Kernels take a matrix as `(address, bytes from row to row)`, so that one compiled kernel serves contiguous, strided and
read-only arrays. They take one-dimensional arrays as numpy arrays that numba types in one way. Whoever hands an array
over keeps it alive during the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CACHE_LINE_BYTES = 64
# From one MiB on, 1.4 to 2 times faster than ordinary stores in `pool`, widths 64 and 128. Below, the reader wants them
# in the cache.
STREAMING_FLOATS = 1 << 18


def aligned_empty(shape: tuple[int, ...]) -> np.ndarray:
    """Float32 of any content, starting at a multiple of 64 bytes. A row of 16 columns is one cache line, and kernels
    can stream to it.
    """
    return _aligned(shape, np.empty)


def aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Float32 zeros, starting at a multiple of 64 bytes; memory is only taken when it is written."""
    return _aligned(shape, np.zeros)


def mapped_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """As `aligned_zeros`, of memory that the kernel gives for this alone. An allocator that has kept some clears it,
    and then what is never written takes memory, too.
    """
    size = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, 4 * size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages does not know the word.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float32, size).reshape(shape)


def _aligned(shape: tuple[int, ...], allocate: Callable[..., np.ndarray]) -> np.ndarray:
    size_bytes = 4 * int(np.prod(shape))
    memory = allocate(size_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[start : start + size_bytes].view(np.float32).reshape(shape)


def matrix_of(array: np.ndarray, dim: int | None = None) -> tuple[int, int]:
    """The form in which kernels take a matrix: address of its first element and bytes from row to row.

    The caller keeps the array alive during the call.

    Raises:
      ValueError: not float32, not two axes, columns not side by side, or not `dim` of them.
    """
    if array.dtype != np.float32 or array.ndim != 2 or (array.size and array.shape[1] > 1 and array.strides[1] != 4):
        raise ValueError(
            f"Found a matrix of dtype {array.dtype}, shape {array.shape} and strides {array.strides}. Expected float32 "
            "with two axes and the columns side by side. Pass np.ascontiguousarray(matrix, np.float32)."
        )
    if dim is not None and array.shape[1] != dim:
        raise ValueError(
            f"Found a matrix of shape {array.shape}. Expected {dim} columns. Pass rows of the table's width."
        )
    return array.ctypes.data, array.strides[0]


def row_addresses(matrices: Sequence[np.ndarray], dim: int) -> np.ndarray:
    """int64 address of every row of several matrices, one matrix after another. The caller keeps them alive.

    Raises:
      ValueError: as `matrix_of`.
    """
    parts = []
    for matrix in matrices:
        start, stride_bytes = matrix_of(matrix, dim)
        parts.append(start + stride_bytes * np.arange(len(matrix), dtype=np.int64))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def can_stream(array: np.ndarray, dim: int) -> bool:
    """Whether writing `array` is faster past the caches: whole cache lines, and too much to be found there later."""
    large = array.shape[0] * dim >= STREAMING_FLOATS
    return large and array.ctypes.data % CACHE_LINE_BYTES == 0 and array.strides[0] % CACHE_LINE_BYTES == 0


def plain(array: np.ndarray, dtype: type) -> np.ndarray:
    """The same memory as an array that numba types in one way: contiguous, and writable by its flags.

    Kernels are compiled for each combination of flags they meet, and what comes from files or from JAX is read-only.
    They do not write to what they get through this.

    Raises:
      ValueError: another dtype, more than one axis, or gaps between the items.
    """
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(
            f"Found an array of dtype {array.dtype}, shape {array.shape} and strides {array.strides}. Expected "
            f"{np.dtype(dtype)} with one axis, without gaps. Pass np.ascontiguousarray(array, np.{np.dtype(dtype)})."
        )
    if array.flags.writeable or array.size == 0:
        return array if array.size else np.empty(0, dtype)
    buffer: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(buffer, dtype)


class BlockLines:
    """Finds where blocks of vectors lie: int64 `[n, 4]`, of each matrix its address, the bytes from row to row, rows
    and columns.

    Blocks of the buffers of a run are the same objects in every step, so they are looked at once. They are not kept
    alive: whoever uses the lines does that.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._found: dict[int, tuple[list[weakref.ref[np.ndarray]], np.ndarray]] = {}

    def of(self, blocks: Sequence[np.ndarray]) -> np.ndarray:
        """Lines of some blocks, not to be written to.

        Raises:
          ValueError: as `matrix_of`.
        """
        key = id(blocks[0]) if blocks else 0
        found = self._found.get(key)
        if found is not None and len(found[0]) == len(blocks) and all(map(_is_at, found[0], blocks)):
            return found[1]
        lines = np.array([(*matrix_of(block), *block.shape) for block in blocks], np.int64).reshape(-1, 4)
        if len(self._found) >= self._MOST:
            self._found.clear()
        self._found[key] = [weakref.ref(block) for block in blocks], lines
        return lines


def _is_at(reference: weakref.ref[np.ndarray], block: np.ndarray) -> bool:
    return reference() is block
