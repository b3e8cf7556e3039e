"""Kernels of the owner of a whole table: the gradients of the bags that hosts ask for, grouped by row.

Where rows that several hosts use travel as rows, `kernels.ids.merge` chains their gradients. Here every id brings the
gradient of its bag, several a row. Entries are therefore laid out row by row: the update reads their addresses in one
sweep and can ask for them ahead.
"""

from __future__ import annotations

import numpy as np
from numba import extending

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.ids import HASH, bad_local_row
from podembed.embedding.kernels.row_vectors import HELPER, inlined, jit, prefetch_item

FLOATS_PER_ENTRY = 64
"""What grouping an entry takes, as floats that pooling reads in the same time."""

_AHEAD = 32
_LOWER_HALF = np.int64(0xFFFFFFFF)
# Marks of a large table lie in memory, and each takes a cache line there and back. A hash table of so many ids stays in
# the second cache. `benchmarks/grouping.py` compares both.
MOST_HASHED = 1 << 16
ROWS_PER_HASHED = 8
# Up to so many rows an entry, a count of every row is the cheapest.
ROWS_PER_COUNTED = 4


def copy_entry(source, at, target, place):
    """Copies the address of an entry, and its weight if it has one."""
    raise NotImplementedError


@extending.overload(copy_entry, jit_options=HELPER)
def _copy_entry_of(source, at, target, place):
    def plain_entry(source, at, target, place):
        target[place] = source[at]

    def weighted(source, at, target, place):
        target[place, 0], target[place, 1] = source[at, 0], source[at, 1]

    return plain_entry if source.ndim == 1 else weighted


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
      addresses: int64 `[n]` or `[n, 2]`.
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
        copy_entry(addresses, i, out_addresses, found)
        found += np.int64(((np.int64(row) >> 4) & mask) == part)
    return found


@inlined
def num_slots(num_entries):
    """Slots of a hash table for so many entries: a power of two."""
    count = 16
    while count <= 4 * num_entries // 3:
        count *= 2
    return count


def group_by_row(
    local_rows: np.ndarray, addresses: np.ndarray, marks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorts entries by row, keeping the order in which they came within each row.

    Args:
      local_rows: int32 `[n]`.
      addresses: int64 `[n]`, of the gradient of each; `[n, 2]` with weights, see `kernels.updates`.
      marks: int32 `[number of local rows]`, all zero before and after.

    Returns:
      The distinct rows, int64 `[u]`, in an order that depends on the entries alone. Where the addresses of each begin,
      and the end, int32 `[u + 1]`. The addresses of the gradients, as they were given.

    Raises:
      ValueError: a row is not one of the local rows.
    """
    rows = plain(local_rows, np.int32)
    unique, starts, numbers, num_unique = _numbered(rows, marks)
    if num_unique < 0:
        raise bad_local_row(int(rows[-1 - num_unique]), len(marks))
    grouped = np.empty_like(addresses)
    _lay_out_each(numbers, addresses, starts, grouped)
    return unique[:num_unique], starts[: num_unique + 1], grouped


def _numbered(rows: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Distinct rows, where the entries of each begin, one place behind where that belongs, the number of each entry's
    row from 1 on, and how many rows there are: negative as of `count_rows`.

    What lays out an entry moves the beginning on, so each ends where the next one's begins.
    """
    count = len(rows)
    unique, starts, numbers = np.empty(count + 1, np.int64), np.zeros(count + 2, np.int32), np.empty(count, np.int32)
    if count <= MOST_HASHED and len(marks) > ROWS_PER_HASHED * count:
        slots = np.zeros(num_slots.py_func(count), np.int64)
        num_unique = number_by_hash(rows, len(marks), slots, unique, starts, numbers)
    else:
        num_unique = number_by_marks(rows, marks, unique, starts, numbers)
    if num_unique > 0:
        begin(starts, num_unique)
    return unique, starts, numbers, num_unique


@jit
def number_by_marks(rows, marks, unique, starts, numbers):
    count = rows.shape[0]
    num_unique = np.int32(0)
    result = 0
    for i in range(count):
        if i + _AHEAD < count:
            # An address past the end is harmless: a prefetch never faults.
            prefetch_item(marks, np.int64(rows[i + _AHEAD]))
        row = np.int64(rows[i])
        if row < 0 or row >= marks.shape[0]:
            result = -1 - i
            break
        # Without a branch, since a guess of the processor would be wrong each other time.
        number = marks[row]
        is_new = number == 0
        unique[num_unique] = row
        num_unique += np.int32(is_new)
        number = num_unique if is_new else number
        marks[row] = number
        numbers[i] = number
        starts[number] += 1
    for u in range(num_unique):
        # Of a large table they have left the caches.
        prefetch_item(marks, unique[min(u + _AHEAD, num_unique - 1)])
        marks[unique[u]] = 0
    return result if result < 0 else np.int64(num_unique)


@jit
def number_by_hash(rows, num_rows, slots, unique, starts, numbers):
    # A slot has the row + 1 in its upper half and the number in its lower, or is 0. Linear probing starts from the top
    # bits of a multiplicative hash.
    mask = slots.shape[0] - 1
    shift = np.uint64(64)
    while (1 << (64 - np.int64(shift))) < slots.shape[0]:
        shift -= np.uint64(1)
    num_unique = np.int64(0)
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        if row < 0 or row >= num_rows:
            return -1 - i
        slot = np.int64((np.uint64(row) * HASH) >> shift)
        found = slots[slot]
        while found != 0 and (found >> 32) != row + 1:
            slot = (slot + 1) & mask
            found = slots[slot]
        is_new = found == 0
        unique[num_unique] = row
        num_unique += np.int64(is_new)
        number = num_unique if is_new else found & _LOWER_HALF
        slots[slot] = ((row + 1) << 32) | number
        numbers[i] = number
        starts[number] += 1
    return num_unique


@jit
def begin(starts, num_unique):
    # From counts.
    first = 0
    for u in range(1, num_unique + 1):
        length = starts[u]
        starts[u] = first
        first += length


@jit
def count_rows(rows, counts, unique, starts):
    # Returns the number of distinct rows, or -1 - i where entry i has no local row. `counts` is left with the place of
    # each row's first entry.
    num_rows = counts.shape[0]
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        if row < 0 or row >= num_rows:
            return -1 - i
        counts[row] += 1
    first, num_unique = np.int32(0), np.int64(0)
    for row in range(num_rows):
        length = counts[row]
        counts[row] = first
        first += length
        unique[num_unique] = row
        starts[num_unique] = first - length
        num_unique += np.int64(length > 0)
    starts[num_unique] = first
    return num_unique


@jit
def _lay_out_each(numbers, addresses, ends, grouped):
    for i in range(numbers.shape[0]):
        at = np.int64(numbers[i])
        copy_entry(addresses, i, grouped, ends[at])
        ends[at] += 1
