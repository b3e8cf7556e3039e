"""Row → bucket → host, and the placement of buckets as a pure function.

A table is cut into a power-of-two number V of buckets that is fixed when the run is created: row r lies in bucket r mod
V at position r div V. A bucket is the unit of ownership, of a move and of a checkpoint chunk; the number of hosts only
decides who holds which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TARGET_BUCKET_BYTES = 1 << 20
MAX_BUCKETS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """How the rows of one table are cut: the only place that knows which id lies where. `num_buckets` is a power of
    two.
    """

    num_rows: int
    num_buckets: int

    @property
    def rows_per_bucket(self) -> int:
        """Rows of the longest bucket; shorter ones are padded with rows that no id names."""
        return -(-self.num_rows // self.num_buckets)

    def buckets_of(self, ids: np.ndarray) -> np.ndarray:
        """The bucket of each id."""
        return ids % self.num_buckets

    def positions_of(self, ids: np.ndarray) -> np.ndarray:
        """Where in its bucket each id lies."""
        return ids // self.num_buckets

    def num_rows_of(self, bucket: int) -> int:
        """How many rows of the table lie in a bucket; the positions behind them are padding."""
        return max(0, -(-(self.num_rows - bucket) // self.num_buckets))

    def ids_of(self, bucket: int, positions: np.ndarray | None = None) -> np.ndarray:
        """The ids at some positions (int64) of a bucket; without positions those of all its rows, rising."""
        if positions is None:
            positions = np.arange(self.num_rows_of(bucket), dtype=np.int64)
        return bucket + positions * self.num_buckets


def bucket_layout(*, num_rows: int, row_bytes: int) -> BucketLayout:
    """Chooses V so that a bucket is about one MiB; a table below that is one bucket, so it is placed whole.

    Args:
      num_rows: rows of the table.
      row_bytes: bytes of one row with its slots.
    """
    wanted = max(1, num_rows * row_bytes // TARGET_BUCKET_BYTES)
    num_buckets = min(MAX_BUCKETS, 1 << (wanted - 1).bit_length())
    return BucketLayout(num_rows=num_rows, num_buckets=num_buckets)


def place(
    *, bucket_bytes: Sequence[np.ndarray], num_hosts: int, previous: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Decides which host owns each bucket of each table.

    Buckets stay with their previous owner unless that host is gone or holds more than its fair share; then the fewest
    bytes move, the largest buckets first onto the least loaded host. The result depends on the arguments alone.

    Args:
      bucket_bytes: per table, int64 `[num_buckets]` bytes of each bucket.
      num_hosts: hosts of the new generation, numbered from 0.
      previous: per table, int32 `[num_buckets]` the owner in the previous generation; -1 or a number >= num_hosts means
        none.

    Returns:
      Per table, int32 `[num_buckets]`, the owner.
    """
    sizes = np.concatenate([np.asarray(b, np.int64) for b in bucket_bytes]) if bucket_bytes else np.zeros(0, np.int64)
    owners = np.full(len(sizes), -1, np.int32)
    if previous is not None and len(sizes):
        owners = np.concatenate([np.asarray(p, np.int32) for p in previous])
        owners = np.where(owners < num_hosts, owners, -1).astype(np.int32)
    load = np.bincount(owners[owners >= 0], weights=sizes[owners >= 0], minlength=num_hosts).astype(np.int64)
    _release_surplus(owners, sizes, load, fair=-(-int(sizes.sum()) // num_hosts) if len(sizes) else 0)
    # Largest first, ties by position: a longest-processing-time schedule, within 4/3 of the best balance.
    for at in np.lexsort((np.arange(len(sizes)), -sizes)):
        if owners[at] < 0:
            host = int(np.argmin(load))
            owners[at] = host
            load[host] += sizes[at]
    lengths = [len(b) for b in bucket_bytes]
    return [part.copy() for part in np.split(owners, np.cumsum(lengths)[:-1])] if lengths else []


def _release_surplus(owners: np.ndarray, sizes: np.ndarray, load: np.ndarray, *, fair: int) -> None:
    """Takes buckets, smallest first, from hosts above the fair share as long as they stay at or above it. Changes
    owners and load.
    """
    for host in range(len(load)):
        mine = np.flatnonzero(owners == host)
        for at in mine[np.argsort(sizes[mine], kind="stable")]:
            if load[host] - sizes[at] < fair:
                break
            owners[at] = -1
            load[host] -= sizes[at]


def split_evenly(count: int, parts: int) -> list[range]:
    """Contiguous ranges of 0..count-1, one a part, the first `count % parts` one longer."""
    base, extra = divmod(count, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]
