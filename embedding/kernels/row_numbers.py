"""Kernels on both sides of a request: the host that asks sorts keys by owner, an owner turns keys into row numbers.

The number of buckets V is a power of two. A key lies in the bucket that the low bits of its hash say. In a dense table
a key is its own hash, so id r is in bucket r mod V, at position r div V; see `buckets.BucketLayout`, which says the
same for whole arrays. `lookup.router` calls the first half of these, `row_index` the second.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.row_vectors import inlined, jit


def route(
    keys: np.ndarray,
    hashes: np.ndarray,
    num_keys: int,
    bucket_owner: np.ndarray,
    counts: np.ndarray,
    routed: np.ndarray,
    position: np.ndarray,
) -> None:
    """Sorts distinct keys by owner, keeping their order within one owner.

    Args:
      keys: int64 `[U]`, of one table.
      hashes: int64 `[U]`, whose low bits say the bucket; may be `keys`.
      num_keys: keys are 0 to `num_keys - 1`; -1 where any number is a key.
      bucket_owner: int32 `[num_buckets]`, the owner of each bucket; the number of buckets is a power of two.
      counts: int64 `[num_hosts]`; receives the number of keys of each owner.
      routed: int64 `[U or more]`; receives the keys, first those of owner 0, then those of owner 1, and so on.
      position: int32 `[U or more]`; receives the place of each key in `routed`.

    Raises:
      ValueError: a key is out of range, the number of buckets is not a power of two, or an array is too small.
    """
    num_buckets = len(bucket_owner)
    if num_buckets & (num_buckets - 1) or min(len(routed), len(position)) < len(keys):
        raise ValueError(
            f"Found {num_buckets} bucket owners and room for {len(routed)} keys and {len(position)} positions, for "
            f"{len(keys)} keys. Expected a power of two of buckets and room for all keys. Pass the arrays of one "
            "table's placement."
        )
    some = plain(keys, np.int64), plain(hashes, np.int64)
    bad = _route(*some, num_keys, plain(bucket_owner, np.int32), counts, routed, position)
    if bad >= 0:
        raise outside(int(keys[bad]), num_keys)


@jit
def _route(keys, hashes, num_keys, bucket_owner, counts, routed, position):
    mask = np.int64(bucket_owner.shape[0] - 1)
    counts[:] = 0
    for u in range(keys.shape[0]):
        if num_keys >= 0 and (keys[u] < 0 or keys[u] >= num_keys):
            return u
        counts[bucket_owner[hashes[u] & mask]] += 1
    start = 0
    for host in range(counts.shape[0]):
        count = counts[host]
        counts[host] = start
        start += count
    for u in range(keys.shape[0]):
        host = bucket_owner[hashes[u] & mask]
        place = counts[host]
        counts[host] = place + 1
        routed[place] = keys[u]
        position[u] = place
    # Each entry now is the end of its host's part; the part before it ends where this one starts.
    for host in range(counts.shape[0] - 1, 0, -1):
        counts[host] -= counts[host - 1]
    return -1


def route_bags(
    keys: np.ndarray,
    hashes: np.ndarray,
    num_keys: int,
    row_splits: np.ndarray,
    weights: np.ndarray | None,
    bucket_owner: np.ndarray,
    splits: np.ndarray,
    routed: np.ndarray,
    routed_weights: np.ndarray,
) -> None:
    """Gives every owner its part of each bag: the keys of its buckets, in their order.

    Args:
      keys: int64 `[n]`, of one table; may repeat.
      hashes, num_keys, bucket_owner: as for `route`.
      row_splits: int64 `[B + 1]`.
      weights: float32 `[n]`, or None.
      splits: int64 `[num_hosts, B + 1]`; receives each owner's row splits, each from 0.
      routed: int32 or int64 `[n]`; receives the keys, first those of owner 0, then those of owner 1, and so on.
      routed_weights: float32 `[n]`; receives the weights in the same order. Of any length without weights.

    Raises:
      ValueError: a key is out of range, or an array does not fit.
    """
    num_bags = len(row_splits) - 1
    fits = splits.shape[1] == num_bags + 1 and len(routed) == len(keys) == int(row_splits[-1])
    if not fits or (weights is not None and len(weights) != len(routed_weights)):
        raise ValueError(
            f"Found {len(keys)} keys in {num_bags} bags, room for {len(routed)} and splits of shape {splits.shape}. "
            "Expected room for all keys and one split more than bags. Pass the arrays of one feature."
        )
    bad = _route_bags(
        plain(keys, np.int64),
        plain(hashes, np.int64),
        num_keys,
        plain(row_splits, np.int64),
        routed_weights[:0] if weights is None else plain(weights, np.float32),
        plain(bucket_owner, np.int32),
        np.zeros(len(splits), np.int64),
        splits,
        routed,
        routed_weights,
    )
    if bad >= 0:
        raise outside(int(keys[bad]), num_keys)


@jit
def _route_bags(keys, hashes, num_keys, row_splits, weights, bucket_owner, counts, splits, routed, routed_weights):
    mask = np.int64(bucket_owner.shape[0] - 1)
    num_hosts, num_bags = splits.shape[0], row_splits.shape[0] - 1
    is_weighted = weights.shape[0] > 0
    for host in range(num_hosts):
        splits[host, 0] = 0
    for bag in range(num_bags):
        for j in range(row_splits[bag], row_splits[bag + 1]):
            if num_keys >= 0 and (keys[j] < 0 or keys[j] >= num_keys):
                return j
            counts[bucket_owner[hashes[j] & mask]] += 1
        for host in range(num_hosts):
            splits[host, bag + 1] = counts[host]
    start = 0
    for host in range(num_hosts):
        count = counts[host]
        counts[host] = start
        start += count
    for j in range(keys.shape[0]):
        host = bucket_owner[hashes[j] & mask]
        place = counts[host]
        counts[host] = place + 1
        routed[place] = keys[j]
        if is_weighted:
            routed_weights[place] = weights[j]
    return -1


def copy_keys(keys: np.ndarray, num_keys: int, out: np.ndarray) -> None:
    """Writes keys as they travel.

    Args:
      keys: int64 `[n]`.
      num_keys: as for `route`.
      out: int32 or int64 `[n]`; with int32, `num_keys` is at most 2^31.

    Raises:
      ValueError: a key is out of range.
    """
    bad = _copy_keys(plain(keys, np.int64), num_keys, out)
    if bad >= 0:
        raise outside(int(keys[bad]), num_keys)


@jit
def _copy_keys(keys, num_keys, out):
    for j in range(keys.shape[0]):
        if num_keys >= 0 and (keys[j] < 0 or keys[j] >= num_keys):
            return j
        out[j] = keys[j]
    return -1


def rows_of_dense_keys(
    keys: np.ndarray, places: np.ndarray, rows_per_bucket: int, out: np.ndarray, bad: np.ndarray
) -> bool:
    """Turns ids of a dense table into the local rows of a host that holds some buckets, one after another.

    Args:
      keys: int32 or int64 `[n]`.
      places: int32 `[num_buckets]`, which of the host's buckets each one is, from 0; -1 for one that is not held.
      rows_per_bucket: of the table's layout.
      out: int32 or int64 `[n]`, may be the memory of `keys`; receives the rows, -1 for an id that is not held here.
      bad: int64 `[1]`; receives an id that is not held here.

    Returns:
      Whether all ids are held here.
    """
    return _rows_of_dense_keys(keys, places, len(places).bit_length() - 1, rows_per_bucket, out, bad)


@inlined
def dense_row(key, places, shift, rows_per_bucket):
    """The row of an id, or -1."""
    place, position = np.int64(places[key & (places.shape[0] - 1)]), key >> shift
    # A negative id has a negative position. Behind the end of its bucket an id would name the row of another one.
    if place < 0 or position < 0 or position >= rows_per_bucket:
        return np.int64(-1)
    return place * rows_per_bucket + position


@jit
def _rows_of_dense_keys(keys, places, shift, rows_per_bucket, out, bad):
    holds_all = True
    for j in range(keys.shape[0]):
        key = np.int64(keys[j])
        row = dense_row(key, places, shift, rows_per_bucket)
        if row < 0:
            holds_all, bad[0] = False, key
        out[j] = row
    return holds_all


def outside(key: int, num_keys: int) -> ValueError:
    """A key that its table cannot have."""
    return ValueError(
        f"Found id {key} for a table of {num_keys} rows. Expected 0 to {num_keys - 1}. Check ids before the lookup, or "
        "set TableConfig.invalid_ids."
    )
