"""Compiled loops over one decoded column: rows in a new order, ids checked or hashed, numbers checked, all in one pass.

Between Arrow's buffers and a batch every value is touched twice. Here that happens while the column is still in the
processor's cache, and once more in `workers.columns.gather`. Sources are read-only arrays as Arrow hands them out
(`frozen` makes others look alike), so that each kernel is compiled once a type. All run without the interpreter lock,
so that a reading thread does not slow the step down.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import DTypeLike

from podembed.embedding.hashing import mix_word
from podembed.workers.columns.run_kernels import copy_bytes

_LARGEST_FLOAT32 = np.float32(np.finfo(np.float32).max)


def frozen(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """The values as a contiguous read-only array of a type; a copy only where they are not."""
    array = np.ascontiguousarray(array, dtype)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


@numba.njit(nogil=True, cache=True)
def take_ids(source: np.ndarray, order: np.ndarray, size: int, out: np.ndarray) -> bool:
    """out[i] = source[order[i]], int32 or int64; whether all are 0 to size - 1."""
    limit = np.uint64(size)
    outside = False
    for i in range(len(order)):
        number = source[np.uint64(order[i])]
        # As unsigned numbers, negative ids are beyond every table.
        outside |= np.uint64(number) >= limit
        out[i] = number
    return not outside


@numba.njit(nogil=True, cache=True)
def hash_in_place(ids: np.ndarray, offset: np.uint64, modulus: int) -> None:
    """ids[i] = 1 + mix64(ids[i]) mod modulus; `offset` is `combine(salt)`, or 0 without a salt. See
    `embedding.hashing`.
    """
    divisor = np.uint64(modulus)
    for i in range(len(ids)):
        ids[i] = np.int64(mix_word(np.uint64(ids[i]), offset) % divisor) + 1


@numba.njit(nogil=True, cache=True)
def mix_in_place(keys: np.ndarray, offset: np.uint64) -> None:
    """keys[i] = mix64(keys[i]); `offset` as of `hash_in_place`."""
    for i in range(len(keys)):
        keys[i] = np.int64(mix_word(np.uint64(keys[i]), offset))


@numba.njit(nogil=True, cache=True)
def take_splits(offsets: np.ndarray, order: np.ndarray, splits: np.ndarray) -> None:
    """Writes the offsets `[len(order) + 1]` of the bags `order`, one behind the other; bag r is `offsets[r]` to
    `offsets[r + 1]`.
    """
    at = np.int64(0)
    splits[0] = 0
    for i in range(len(order)):
        row = np.uint64(order[i])
        at += np.int64(offsets[row + np.uint64(1)]) - np.int64(offsets[row])
        splits[i + 1] = at


@numba.njit(nogil=True, cache=True)
def narrow(source: np.ndarray, size: int, out: np.ndarray) -> bool:
    """out[i] = source[i], int32 or int64, in the order of the source; whether all are 0 to size - 1."""
    # As unsigned numbers, negative ids are beyond every table; the largest one tells of all.
    largest = np.uint64(0)
    for i in range(len(source)):
        largest = max(largest, np.uint64(source[i]))
        out[i] = source[i]
    return bool(largest < np.uint64(size))


@numba.njit(nogil=True, cache=True)
def take_bags(source: np.ndarray, offsets: np.ndarray, order: np.ndarray, splits: np.ndarray, out: np.ndarray) -> None:
    """Copies the ids of the bags `order` to the places that `take_splits` found. `source` and `out` are of one type."""
    width = source.itemsize
    start_of_source, start_of_out = source.ctypes.data, out.ctypes.data
    for i in range(len(order)):
        start = np.int64(offsets[np.uint64(order[i])])
        length = splits[i + 1] - splits[i]
        copy_bytes(start_of_out + width * splits[i], start_of_source + width * start, width * length)


@numba.njit(nogil=True, cache=True)
def take_padded(
    source: np.ndarray, starts: np.ndarray, lengths: np.ndarray, order: np.ndarray, width: int, out: np.ndarray
) -> None:
    """Copies the lists `order`, each to the beginning of a row of `out`.

    Args:
      source: bytes of all items, `width` bytes each.
      starts, lengths: int64, by list, its first item and how many are copied.
      out: bytes `[len(order), most items * width]`.
    """
    start_of_source, start_of_out = source.ctypes.data, out.ctypes.data
    row_bytes = out.shape[1]
    for i in range(len(order)):
        row = np.uint64(order[i])
        copy_bytes(start_of_out + row_bytes * i, start_of_source + width * starts[row], width * lengths[row])


@numba.njit(nogil=True, cache=True)
def even_length(offsets: np.ndarray) -> int:
    """The number of ids that every bag has, or -1 if they differ or there is no bag."""
    if len(offsets) < 2:
        return -1
    length = offsets[1] - offsets[0]
    same = True
    for i in range(len(offsets) - 1):
        same &= offsets[i + 1] - offsets[i] == length
    return int(length) if same else -1


@numba.njit(nogil=True, cache=True)
def take_even_bags(source: np.ndarray, length: int, order: np.ndarray, out: np.ndarray) -> None:
    """`take_bags` for bags of one length, which lie one behind the other in the source as well."""
    num_bytes = source.itemsize * length
    start_of_source, start_of_out = source.ctypes.data, out.ctypes.data
    for i in range(len(order)):
        copy_bytes(start_of_out + num_bytes * i, start_of_source + num_bytes * np.int64(order[i]), num_bytes)


@numba.njit(nogil=True, cache=True)
def take_numbers(source: np.ndarray, order: np.ndarray, out: np.ndarray) -> bool:
    """out[i] = source[order[i]], float32; whether all are finite. `out` may have gaps between its items."""
    bad = False
    for i in range(len(order)):
        number = source[np.uint64(order[i])]
        # Comparisons with NaN are false.
        bad |= not (abs(number) <= _LARGEST_FLOAT32)
        out[i] = number
    return not bad
