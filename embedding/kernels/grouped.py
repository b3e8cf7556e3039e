"""Kernels of the owner of a whole table: the gradients of the bags that hosts ask for, grouped by row.

Where rows that several hosts use travel as rows, `kernels_ids.merge` chains their gradients. Here every id brings the
gradient of its bag, several a row. Entries are therefore laid out row by row: the update reads their addresses in one
sweep and can ask for them ahead.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.ids import bad_local_row
from podembed.embedding.kernels.row_vectors import jit, prefetch_item

FLOATS_PER_ENTRY = 64
"""What grouping an entry takes, as floats that pooling reads in the same time."""

_AHEAD = 32


def bag_addresses(row_splits: np.ndarray, matrix: tuple[int, int], out: np.ndarray) -> None:
    """Writes for every id the address of its bag's row in a matrix, given as `kernel_arrays.matrix_of` gives it.

    Args:
      row_splits: int64 `[B + 1]`.
      out: int64 `[number of ids]`.
    """
    _bag_addresses(plain(row_splits, np.int64), matrix[0], matrix[1], out)


@jit
def _bag_addresses(row_splits, start, stride_bytes, out):
    for bag in range(row_splits.shape[0] - 1):
        address = start + bag * stride_bytes
        for j in range(row_splits[bag], row_splits[bag + 1]):
            out[j] = address


def select_part(
    local_rows: np.ndarray,
    addresses: np.ndarray,
    part: int,
    num_parts: int,
    out_rows: np.ndarray,
    out_addresses: np.ndarray,
) -> int:
    """Copies the entries of one part of the rows, in their order. Rows whose marks share a cache line are of one part.

    Args:
      local_rows: int32 `[n]`.
      addresses: int64 `[n]`.
      part, num_parts: which part, and of how many: a power of two.
      out_rows, out_addresses: as the first two; receive the entries.

    Returns:
      How many entries there are.
    """
    return _select_part(plain(local_rows, np.int32), addresses, part, num_parts - 1, out_rows, out_addresses)


@jit
def _select_part(local_rows, addresses, part, mask, out_rows, out_addresses):
    found = 0
    for i in range(local_rows.shape[0]):
        # Written in any case, since a guess of the processor would be wrong half of the time.
        row = local_rows[i]
        out_rows[found] = row
        out_addresses[found] = addresses[i]
        found += np.int64(((np.int64(row) >> 4) & mask) == part)
    return found


def group_by_row(
    local_rows: np.ndarray,
    addresses: np.ndarray,
    marks: np.ndarray,
    unique: np.ndarray,
    starts: np.ndarray,
    grouped: np.ndarray,
    scratch: np.ndarray,
) -> int:
    """Sorts entries by row, keeping the order in which they came within each row.

    Row `unique[u]` has the addresses `grouped[starts[u]:starts[u + 1]]`.

    Args:
      local_rows: int32 `[n]`.
      addresses: int64 `[n]`, of each entry's gradient.
      marks: int32 `[number of local rows]`, all zero before and after.
      unique: int64 `[n or more]`; receives the distinct rows in the order of their first appearance.
      starts: int32 `[n + 1 or more]`; receives where the entries of each begin, and the end.
      grouped: int64 `[n or more]`; receives the addresses.
      scratch: int32 `[n or more]`.

    Returns:
      The number of distinct rows.

    Raises:
      ValueError: a row is not one of the local rows.
    """
    count = len(local_rows)
    if min(len(unique), len(starts) - 1, len(grouped), len(scratch), len(addresses)) < count:
        raise ValueError(f"Found arrays too small for {count} entries. Expected room for all. Allocate one per entry.")
    num_unique = _group_by_row(plain(local_rows, np.int32), addresses, marks, unique, starts, grouped, scratch)
    if num_unique < 0:
        raise bad_local_row(int(local_rows[-1 - num_unique]), len(marks))
    return num_unique


@jit
def _group_by_row(local_rows, addresses, marks, unique, starts, grouped, scratch):
    count = local_rows.shape[0]
    num_unique = 0
    result = 0
    for i in range(count):
        if i + _AHEAD < count:
            # An address past the end is harmless: a prefetch never faults.
            prefetch_item(marks, np.int64(local_rows[i + _AHEAD]))
        row = np.int64(local_rows[i])
        if row < 0 or row >= marks.shape[0]:
            result = -1 - i
            break
        number = np.int64(marks[row])
        if number == 0:
            unique[num_unique] = row
            starts[num_unique] = 0
            num_unique += 1
            number = num_unique
            marks[row] = number
        scratch[i] = number - 1
        starts[number - 1] += 1
    for u in range(num_unique):
        # Of a large table they have left the caches.
        prefetch_item(marks, unique[min(u + _AHEAD, num_unique - 1)])
        marks[unique[u]] = 0
    if result < 0:
        return result
    first = 0
    for u in range(num_unique):
        length = starts[u]
        starts[u] = first
        first += length
    for i in range(count):
        number = np.int64(scratch[i])
        grouped[starts[number]] = addresses[i]
        starts[number] += 1
    # Each entry now is the end of its row's part, where the next one's begins.
    for u in range(num_unique, 0, -1):
        starts[u] = starts[u - 1]
    starts[0] = 0
    return num_unique
