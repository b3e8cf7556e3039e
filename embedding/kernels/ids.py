"""Kernels over ids: which ids of a batch are distinct, and which local rows several hosts ask for.

Every function here works on arrays the caller allocated, changes nothing else, and leaves its scratch clean for the
next call. Results depend on the order of the input alone. The numpy versions are in `reference.py`.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.row_vectors import jit, prefetch_item

HASH = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_AHEAD = 32


def num_hash_slots(num_ids: int) -> int:
    """Rows of the scratch that `unique_ids` needs for up to `num_ids` ids: a power of two, at most half full."""
    return max(16, 1 << (2 * num_ids - 1).bit_length())


def unique_ids(ids: np.ndarray, hash_slots: np.ndarray, unique: np.ndarray, inverse: np.ndarray) -> int:
    """Finds the distinct ids, in the order of their first appearance.

    Args:
      ids: int64 `[n]`, any values.
      hash_slots: int64 `[num_hash_slots(n) or a larger power of two, 2]`, all zero before and after.
      unique: int64 `[n or more]`; receives the distinct ids.
      inverse: int32 `[n]`; receives the position in `unique` of each id.

    Returns:
      The number of distinct ids.

    Raises:
      ValueError: an array has the wrong dtype or is too small.
    """
    count = len(ids)
    size = len(hash_slots)
    if size & (size - 1) or size < 2 * count or len(unique) < count or len(inverse) < count:
        raise ValueError(
            f"Found {size} hash slots and room for {len(unique)} unique ids and {len(inverse)} positions, for {count} "
            f"ids. Expected {num_hash_slots(count)} hash slots, a power of two, and room for {count}. Allocate by "
            "num_hash_slots(n)."
        )
    return _unique_ids(plain(ids, np.int64), 65 - size.bit_length(), hash_slots, unique, inverse)


@jit
def _unique_ids(ids, hash_shift, hash_slots, unique, inverse):
    # A slot is (id, position + 1), (0, 0) if free; linear probing from the top bits of a multiplicative hash.
    shift = np.uint64(hash_shift)
    mask = np.uint64(hash_slots.shape[0] - 1)
    flat = hash_slots.reshape(-1)
    num_ids = ids.shape[0]
    num_unique = 0
    for i in range(num_ids):
        if i + _AHEAD < num_ids:
            prefetch_item(flat, ((np.uint64(ids[i + _AHEAD]) * HASH) >> shift) << _ONE)
        key = ids[i]
        slot = (np.uint64(key) * HASH) >> shift
        while True:
            number = hash_slots[slot, 1]
            if number == 0:
                hash_slots[slot, 0] = key
                hash_slots[slot, 1] = num_unique + 1
                unique[num_unique] = key
                inverse[i] = num_unique
                num_unique += 1
                break
            if hash_slots[slot, 0] == key:
                inverse[i] = number - 1
                break
            slot = (slot + _ONE) & mask
    for u in range(num_unique):
        prefetch_item(flat, ((np.uint64(unique[min(u + _AHEAD, num_unique - 1)]) * HASH) >> shift) << _ONE)
        slot = (np.uint64(unique[u]) * HASH) >> shift
        while hash_slots[slot, 1] != u + 1:
            slot = (slot + _ONE) & mask
        hash_slots[slot, 0] = 0
        hash_slots[slot, 1] = 0
    return num_unique


def row_of_each_id(position: np.ndarray, inverse: np.ndarray, index: np.ndarray) -> None:
    """Writes `position[inverse[i]]` to `index[i]`: where the row of each id of the batch lies in what the owners send
    back.
    """
    _row_of_each_id(plain(position, np.int32), plain(inverse, np.int32), index)


@jit
def _row_of_each_id(position, inverse, index):
    for i in range(inverse.shape[0]):
        index[i] = position[inverse[i]]


def merge(
    local_rows: np.ndarray, marks: np.ndarray, unique: np.ndarray, head: np.ndarray, following: np.ndarray
) -> int:
    """Finds the distinct rows in what several hosts sent, and chains the entries of each row in the order in which they
    came.

    Row `unique[u]` was sent as entries `head[u]`, `following[head[u]]`, ... until -1. A chain costs no copy of the
    gradients, and most rows have one entry.

    Args:
      local_rows: int64 `[m]`, the lists of all hosts, one after another in host order.
      marks: int32 `[number of local rows]`, all zero before and after.
      unique: int64 `[m or more]`; receives the distinct rows in the order of their first appearance.
      head: int32 `[m or more]`; receives the first entry of each distinct row.
      following: int32 `[m or more]`; receives the next entry of the same row, or -1.

    Returns:
      The number of distinct rows.

    Raises:
      ValueError: a row is not one of the local rows, or an array is too small.
    """
    if min(len(unique), len(head), len(following)) < len(local_rows):
        raise ValueError(
            f"Found room for {len(unique)} rows, {len(head)} heads and {len(following)} entries, for {len(local_rows)} "
            "rows. Expected at least as many. Allocate one of each per row sent."
        )
    num_unique = _merge(plain(local_rows, np.int64), marks, unique, head, following)
    if num_unique < 0:
        raise bad_local_row(int(local_rows[-1 - num_unique]), len(marks))
    return num_unique


@jit
def _merge(local_rows, marks, unique, head, following):
    num_entries = local_rows.shape[0]
    num_unique = 0
    result = 0
    for i in range(num_entries):
        if i + _AHEAD < num_entries:
            # An address past the end is harmless: a prefetch never faults.
            prefetch_item(marks, local_rows[i + _AHEAD])
        row = local_rows[i]
        if row < 0 or row >= marks.shape[0]:
            result = -1 - i
            break
        last = marks[row]
        if last == 0:
            unique[num_unique] = row
            head[num_unique] = i
            num_unique += 1
        else:
            following[last - 1] = i
        following[i] = -1
        marks[row] = i + 1
    for u in range(num_unique):
        # Of a large table they have left the caches.
        prefetch_item(marks, unique[min(u + _AHEAD, num_unique - 1)])
        marks[unique[u]] = 0
    return result if result < 0 else num_unique


def chain_all_rows(local_rows: np.ndarray, head: np.ndarray, following: np.ndarray) -> None:
    """Chains as `merge`, but for every local row: `head[row]` is -1 for rows that no host sent.

    Args:
      local_rows: int64 `[m]`, the lists of all hosts in host order.
      head: int32 `[number of local rows]`; overwritten.
      following: int32 `[m or more]`; overwritten.

    Raises:
      ValueError: a row is not one of the local rows.
    """
    outside = (local_rows < 0) | (local_rows >= len(head))
    if outside.any():
        raise bad_local_row(int(local_rows[np.argmax(outside)]), len(head))
    _chain_all_rows(plain(local_rows, np.int64), head, following)


@jit
def _chain_all_rows(local_rows, head, following):
    head[:] = -1
    # Backwards, so that each new head is the earlier entry and the chain runs in the order of arrival.
    for i in range(local_rows.shape[0] - 1, -1, -1):
        row = local_rows[i]
        following[i] = head[row]
        head[row] = i


def bad_local_row(row: int, num_local_rows: int) -> ValueError:
    """The error for a row number that this host does not hold."""
    return ValueError(
        f"Found local row {row} on a host that holds {num_local_rows} rows of the table. Expected 0 to "
        f"{num_local_rows - 1}. "
        "The sender used another placement of buckets: check that both hosts are of one generation."
    )
