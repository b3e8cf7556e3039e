"""Kernels of `Snapshot`: which rows must be kept, and copies between a table's arrays and the buffer.

Common arguments: bit `row % 8` of `changed[row // 8]` says that the row changed since the freeze. A kept row has an
entry in the buffer (float32 `[entries, width]`, one an array). Rows form groups of `GROUP_ROWS`. `heads[group]` is the
entry of one kept row of the group, `following[entry]` the next one of the same group, -1 none. `offsets[entry]` is the
row's position in the group. `free[:num_free]` are the free entries; the last of them is taken first.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import can_stream, matrix_of
from podembed.embedding.kernels.row_vectors import (
    columns_of,
    jit,
    load,
    prefetch_to_read,
    publish,
    store,
    store_streaming,
    width_of,
)

GROUP_ROWS = 512
# How many rows before its turn a row is prefetched.
_AHEAD = 12


@jit
def claim_rows(rows, released, changed, heads, following, offsets, free, num_free, kept, entries):
    """Marks rows as changed, and gives an entry to each one that was not before; none to rows below `released`, whose
    values no reader needs.

    Returns:
      Two numbers: how many of `rows`, from the first, may be changed now; how many were written to `kept` and
      `entries`, which are fewer free entries.
    """
    count = 0
    for at in range(rows.shape[0]):
        row = rows[at]
        bit = 1 << (row & 7)
        if not changed[row >> 3] & bit:
            if row >= released:
                if count == num_free:
                    return at, count
                group = row // GROUP_ROWS
                entry = free[num_free - 1 - count]
                following[entry] = heads[group]
                offsets[entry] = row - group * GROUP_ROWS
                heads[group] = entry
                kept[count] = row
                entries[count] = entry
                count += 1
            changed[row >> 3] |= bit
    return rows.shape[0], count


def keep_rows(array: np.ndarray, kept: np.ndarray, entries: np.ndarray, buffer: np.ndarray) -> None:
    """Copies rows (int64 `[n]`) into their entries (int32 `[n]`)."""
    dim = array.shape[1]
    _keep_rows(width_of(dim), dim, matrix_of(array), kept, entries, can_stream(buffer, dim), matrix_of(buffer))


@jit
def _keep_rows(width, dim, array, kept, entries, streams, buffer):
    count = kept.shape[0]
    step = columns_of(width)
    for at in range(count):
        ahead = kept[min(at + _AHEAD, count - 1)]
        for column in range(0, dim, step):
            prefetch_to_read(width, array, ahead, column)
            value = load(width, array, kept[at], column)
            # It is read much later, if at all.
            if streams:
                store_streaming(buffer, entries[at], column, value)
            else:
                store(buffer, entries[at], column, value)
    publish()


@jit
def read_frozen(array, heads, following, offsets, buffer, start, stop, out):
    """Copies rows `start` to `stop - 1` as they were at the freeze into `out`."""
    for row in range(start, stop):
        for column in range(array.shape[1]):
            out[row - start, column] = array[row, column]
    for group in range(start // GROUP_ROWS, (stop + GROUP_ROWS - 1) // GROUP_ROWS):
        entry = heads[group]
        while entry >= 0:
            row = group * GROUP_ROWS + offsets[entry]
            if start <= row < stop:
                for column in range(array.shape[1]):
                    out[row - start, column] = buffer[entry, column]
            entry = following[entry]


@jit
def release_groups(first, last, heads, following, free, num_free):
    """Frees the entries of groups `first` to `last - 1`. Returns how many they were."""
    count = 0
    for group in range(first, last):
        entry = heads[group]
        heads[group] = -1
        while entry >= 0:
            free[num_free + count] = entry
            entry = following[entry]
            count += 1
    return count


@jit
def list_downwards(free):
    """Lists all entries as free, the first one last."""
    count = free.shape[0]
    for at in range(count):
        free[at] = count - 1 - at


@jit
def put_back(array, heads, following, offsets, buffer):
    """Writes all kept rows back to where they came from."""
    for group in range(heads.shape[0]):
        entry = heads[group]
        while entry >= 0:
            row = group * GROUP_ROWS + offsets[entry]
            for column in range(array.shape[1]):
                array[row, column] = buffer[entry, column]
            entry = following[entry]
