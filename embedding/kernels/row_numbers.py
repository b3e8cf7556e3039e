"""Kernels that turn ids into row numbers: of a table held whole, and of owners that hold some buckets each.

The number of buckets V is a power of two. Id r is in bucket r mod V at position r div V; see `buckets.BucketLayout`,
which says the same for whole arrays. Who calls these is `table.key_index`.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.row_vectors import inlined, jit


@inlined
def _row(place, position, rows_per_bucket):
    """The row of a position of the bucket that is its holder's `place`-th."""
    return place * rows_per_bucket + position


def rows_of_ids(ids: np.ndarray, *, num_buckets: int, rows_per_bucket: int, out: np.ndarray) -> None:
    """Turns ids of a table that one host holds whole into its local rows.

    Args:
      ids: int64 `[n]`.
      num_buckets, rows_per_bucket: number of buckets and rows per bucket of the table's layout.
      out: int32 or int64 `[n]`.

    Raises:
      ValueError: an id lies outside every bucket.
    """
    bad = _rows_of_ids(plain(ids, np.int64), num_buckets.bit_length() - 1, rows_per_bucket, out)
    if bad >= 0:
        raise _outside(int(ids[bad]), num_buckets, rows_per_bucket)


@jit
def _rows_of_ids(ids, shift, rows_per_bucket, out):
    mask = (np.int64(1) << shift) - 1
    for i in range(ids.shape[0]):
        position = ids[i] >> shift
        if position < 0 or position >= rows_per_bucket:
            return i
        out[i] = _row(ids[i] & mask, position, rows_per_bucket)
    return -1


def route(
    unique: np.ndarray,
    bucket_owner: np.ndarray,
    bucket_local: np.ndarray,
    rows_per_bucket: int,
    counts: np.ndarray,
    local_rows: np.ndarray,
    position: np.ndarray,
) -> None:
    """Sorts distinct ids by owner, keeping their order within one owner, and turns them into row numbers at the owner.

    Args:
      unique: int64 `[U]`, ids of the table.
      bucket_owner: int32 `[num_buckets]`, the owner of each bucket; the number of buckets is a power of two.
      bucket_local: int32 `[num_buckets]`, the number of the bucket among its owner's buckets of the table.
      rows_per_bucket: rows per bucket of the table's layout.
      counts: int64 `[num_hosts]`; receives the number of ids of each owner.
      local_rows: int64 `[U or more]`; receives the rows at the owners, first those of owner 0, then those of owner 1,
        and so on.
      position: int32 `[U or more]`; receives the place of each id in `local_rows`.

    Raises:
      ValueError: an id lies outside every bucket, the number of buckets is not a power of two, or an array is too
        small.
    """
    num_buckets = len(bucket_owner)
    if (
        num_buckets & (num_buckets - 1)
        or len(bucket_local) != num_buckets
        or min(len(local_rows), len(position)) < len(unique)
    ):
        raise ValueError(
            f"Found {num_buckets} bucket owners, {len(bucket_local)} local bucket numbers and room for "
            f"{len(local_rows)} rows and {len(position)} positions, for {len(unique)} ids. Expected a power of two of "
            "buckets and room for all ids. Pass the arrays of one table's placement."
        )
    shift = num_buckets.bit_length() - 1
    owner, local = plain(bucket_owner, np.int32), plain(bucket_local, np.int32)
    bad = _route(plain(unique, np.int64), owner, local, shift, rows_per_bucket, counts, local_rows, position)
    if bad >= 0:
        raise _outside(int(unique[bad]), num_buckets, rows_per_bucket)


@jit
def _route(unique, bucket_owner, bucket_local, shift, rows_per_bucket, counts, local_rows, position):
    mask = np.int64(bucket_owner.shape[0] - 1)
    counts[:] = 0
    for u in range(unique.shape[0]):
        # Outside these, a row would be counted into the bucket that happens to lie next to its own.
        if unique[u] < 0 or (unique[u] >> shift) >= rows_per_bucket:
            return u
        counts[bucket_owner[unique[u] & mask]] += 1
    start = 0
    for host in range(counts.shape[0]):
        count = counts[host]
        counts[host] = start
        start += count
    for u in range(unique.shape[0]):
        bucket = unique[u] & mask
        host = bucket_owner[bucket]
        place = counts[host]
        counts[host] = place + 1
        local_rows[place] = _row(np.int64(bucket_local[bucket]), unique[u] >> shift, rows_per_bucket)
        position[u] = place
    # Each entry now is the end of its host's part; the part before it ends where this one starts.
    for host in range(counts.shape[0] - 1, 0, -1):
        counts[host] -= counts[host - 1]
    return -1


def route_bags(
    ids: np.ndarray,
    row_splits: np.ndarray,
    weights: np.ndarray | None,
    bucket_owner: np.ndarray,
    bucket_local: np.ndarray,
    rows_per_bucket: int,
    splits: np.ndarray,
    rows: np.ndarray,
    routed: np.ndarray,
) -> None:
    """Gives every owner its part of each bag: the ids whose rows it has, in their order, as row numbers there.

    Args:
      ids: int64 `[n]`, of the table; may repeat.
      row_splits: int64 `[B + 1]`.
      weights: float32 `[n]`, or None.
      bucket_owner, bucket_local, rows_per_bucket: as for `route`.
      splits: int64 `[num_hosts, B + 1]`; receives each owner's row splits, each from 0.
      rows: int32 `[n]`; receives the rows, first those of owner 0, then those of owner 1, and so on.
      routed: float32 `[n]`; receives the weights in the same order. Of any length without weights.

    Raises:
      ValueError: an id lies outside every bucket, or an array does not fit.
    """
    num_buckets, num_bags = len(bucket_owner), len(row_splits) - 1
    fits = splits.shape[1] == num_bags + 1 and len(rows) == len(ids) == int(row_splits[-1])
    if not fits or (weights is not None and len(weights) != len(routed)) or len(bucket_local) != num_buckets:
        raise ValueError(
            f"Found {len(ids)} ids in {num_bags} bags, room for {len(rows)} rows and splits of shape {splits.shape}. "
            "Expected room for all ids and one split more than bags. Pass the arrays of one feature."
        )
    bad = _route_bags(
        plain(ids, np.int64),
        plain(row_splits, np.int64),
        routed[:0] if weights is None else plain(weights, np.float32),
        plain(bucket_owner, np.int32),
        plain(bucket_local, np.int32),
        num_buckets.bit_length() - 1,
        rows_per_bucket,
        np.zeros(len(splits), np.int64),
        splits,
        rows,
        routed,
    )
    if bad >= 0:
        raise _outside(int(ids[bad]), num_buckets, rows_per_bucket)


@jit
def _route_bags(
    ids, row_splits, weights, bucket_owner, bucket_local, shift, rows_per_bucket, counts, splits, rows, routed
):
    mask = np.int64(bucket_owner.shape[0] - 1)
    num_hosts, num_bags = splits.shape[0], row_splits.shape[0] - 1
    is_weighted = weights.shape[0] > 0
    for host in range(num_hosts):
        splits[host, 0] = 0
    for bag in range(num_bags):
        for j in range(row_splits[bag], row_splits[bag + 1]):
            if ids[j] < 0 or (ids[j] >> shift) >= rows_per_bucket:
                return j
            counts[bucket_owner[ids[j] & mask]] += 1
        for host in range(num_hosts):
            splits[host, bag + 1] = counts[host]
    start = 0
    for host in range(num_hosts):
        count = counts[host]
        counts[host] = start
        start += count
    for j in range(ids.shape[0]):
        bucket = ids[j] & mask
        host = bucket_owner[bucket]
        place = counts[host]
        counts[host] = place + 1
        rows[place] = _row(np.int64(bucket_local[bucket]), ids[j] >> shift, rows_per_bucket)
        if is_weighted:
            routed[place] = weights[j]
    return -1


def _outside(row_id: int, num_buckets: int, rows_per_bucket: int) -> ValueError:
    return ValueError(
        f"Found id {row_id} for a table of {num_buckets} buckets of {rows_per_bucket} rows. Expected 0 to at most "
        f"{num_buckets * rows_per_bucket - 1}. Check ids before the lookup, or set TableConfig.invalid_ids."
    )
