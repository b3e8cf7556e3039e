"""Row → bucket → host, and the placement of buckets as a pure function.

A table is cut into a power-of-two number V of buckets that is fixed when the run is created. Row r lies in bucket r mod
V at position r div V. A bucket is the unit of ownership, of a move and of a checkpoint chunk; the number of hosts only
decides who holds which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TARGET_BUCKET_BYTES = 1 << 20
MIN_BUCKET_BYTES = 1 << 18
# A table beyond so many buckets of the target size is cut more finely, for the sake of many hosts.
USUAL_BUCKETS = 4096
MAX_BUCKETS = 65_536
# Of all tables of a run that have more than the usual number together: each costs some 40 bytes of a manifest.
MAX_FINE_BUCKETS = 1 << 20
# Of a host's share of a large table. With so many the busiest host has at most 1/64 more than the mean.
BUCKETS_PER_HOST = 64
# The golden ratio of 2^32: its multiples lie far from each other, however many there are.
_GOLDEN = 2_654_435_769
# How much busier than the mean host the busiest may be, where buckets are small enough.
MOST_OVER_MEAN = 1.02


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


def bucket_layout(*, num_rows: int, row_bytes: int, most_hosts: int = MAX_BUCKETS) -> BucketLayout:
    """Chooses V by size: a bucket is about one MiB, and a table below that is one bucket.

    A table above 4 GiB gets buckets of down to 256 KiB. With 4,096 buckets the busiest of 1,000 hosts would have 5,
    which is 1.22 times the mean.

    Args:
      num_rows: rows of the table.
      row_bytes: bytes of one row with its slots.
      most_hosts: that will ever share the table. Where they are few, larger buckets are fewer files and less to name.
    """
    size_bytes = num_rows * row_bytes
    wanted = max(1, size_bytes // TARGET_BUCKET_BYTES)
    if wanted <= USUAL_BUCKETS:
        return BucketLayout(num_rows=num_rows, num_buckets=1 << (wanted - 1).bit_length())
    # The largest power of two whose buckets are not too small.
    by_size = 1 << (size_bytes // MIN_BUCKET_BYTES).bit_length() - 1
    by_hosts = 1 << (BUCKETS_PER_HOST * most_hosts - 1).bit_length()
    return BucketLayout(num_rows=num_rows, num_buckets=max(USUAL_BUCKETS, min(MAX_BUCKETS, by_size, by_hosts)))


def within_reason(num_buckets: Sequence[int]) -> tuple[int, ...]:
    """The same numbers, of which the largest are halved until there are not too many. Usual numbers stay."""
    found = list(num_buckets)
    while sum(found) > MAX_FINE_BUCKETS and max(found) > USUAL_BUCKETS:
        found[found.index(max(found))] //= 2
    return tuple(found)


def place(
    *,
    bucket_bytes: Sequence[np.ndarray],
    num_hosts: int,
    previous: Sequence[np.ndarray] | None = None,
    work_bytes: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """Decides which host owns each bucket of each table.

    No host gets more than its even share of any table, rounded up to whole buckets. The reason is that batches request
    rows of a table from all its owners alike. Within that, the busiest host gets at most 1.02 times the mean load.
    Where buckets are too large for that, no single bucket could leave it for a host that would then be less busy.

    Buckets stay with their previous owner as far as these two limits allow. The result depends on the arguments alone,
    and placing it again moves nothing.

    Args:
      bucket_bytes: per table, int64 `[num_buckets]` bytes of each bucket, all equal.
      num_hosts: hosts of the new generation, numbered from 0.
      previous: per table, int32 `[num_buckets]` the owner in the previous generation; -1 or a number >= num_hosts means
        none.
      work_bytes: per table, what a bucket costs its owner beside its bytes, as bytes. The load of a host is the sum of
        both. None for nothing.

    Returns:
      Per table, int32 `[num_buckets]`, the owner.
    """
    before = [np.full(len(sizes), -1) for sizes in bucket_bytes] if previous is None else previous
    tables = [
        _Placed(held_bytes=int(sizes[0]), work_bytes=work, owners=_kept(was, num_hosts), num_hosts=num_hosts)
        for sizes, work, was in zip(bucket_bytes, work_bytes or [0] * len(bucket_bytes), before, strict=True)
    ]
    load = sum((table.size * table.counts for table in tables), np.zeros(num_hosts, np.int64))
    held = sum((table.held_bytes * table.counts for table in tables), np.zeros(num_hosts, np.int64))
    # By no placement can the busiest host have less than the even share of the largest table in whole buckets.
    total = sum(table.size * len(table.owners) for table in tables)
    limit = max([int(MOST_OVER_MEAN * total / num_hosts), *(table.most * table.size for table in tables)])
    is_complete = all((table.owners >= 0).all() for table in tables)
    if not is_complete or any(_best_move(tables, load, int(host)) for host in np.flatnonzero(load > limit)):
        _release_surplus(tables, load, held, limit=limit)
    # Largest buckets first, ties by position: a longest-processing-time schedule, within 4/3 of the best balance.
    for nth, at in enumerate(sorted(range(len(tables)), key=lambda at: -tables[at].size)):
        _fill(tables[at], load, nth=nth)
    _even_out(tables, load, limit=limit)
    return [table.owners for table in tables]


class _Placed:
    """One table while it is placed. Mutable: `owners` and `counts`.

    Attributes:
      held_bytes: rows and slots of a bucket.
      size: the load that a bucket is.
      owners: int32 `[num_buckets]`, -1 for no host yet.
      counts: int64 `[num_hosts]`, the buckets of each host.
      most: that a host may have.
    """

    def __init__(self, *, held_bytes: int, work_bytes: int, owners: np.ndarray, num_hosts: int) -> None:
        self.held_bytes = held_bytes
        self.size = held_bytes + work_bytes
        self.owners = owners
        self.counts = np.bincount(owners[owners >= 0], minlength=num_hosts)
        self.most = -(-len(owners) // num_hosts)
        self._was = owners.copy()

    def least_busy(self, load: np.ndarray) -> int:
        """The host with the least load among those that may have another bucket."""
        return int(np.argmin(np.where(self.counts < self.most, load, np.iinfo(np.int64).max)))

    def give(self, bucket: int, host: int) -> None:
        """Makes a host the owner of a bucket; -1 for no host."""
        if self.owners[bucket] >= 0:
            self.counts[self.owners[bucket]] -= 1
        self.owners[bucket] = host
        if host >= 0:
            self.counts[host] += 1

    def keeps_all(self, host: int) -> bool:
        """Whether a host gets no bucket that it does not have already."""
        return not ((self.owners == host) & (self._was != host)).any()

    def spare(self, host: int) -> int:
        """The bucket that a host gives away first: one that it has yet to get, else the last one."""
        mine = np.flatnonzero(self.owners == host)
        new = mine[self._was[mine] != host]
        return int(new[-1] if len(new) else mine[-1])


def _kept(owners: np.ndarray, num_hosts: int) -> np.ndarray:
    """What stays with its owner: the first buckets of each host, up to its share of the table. -1 for all others."""
    kept = np.full(len(owners), -1, np.int32)
    most = -(-len(owners) // num_hosts)
    at = np.flatnonzero((owners >= 0) & (owners < num_hosts))
    at = at[np.argsort(owners[at], kind="stable")]
    ends = np.cumsum(np.bincount(owners[at], minlength=num_hosts))
    firsts = at[np.arange(len(at)) - np.append(0, ends)[owners[at]] < most]
    kept[firsts] = owners[firsts]
    return kept


def _release_surplus(tables: Sequence[_Placed], load: np.ndarray, held: np.ndarray, *, limit: int) -> None:
    """Takes buckets from hosts above the limit until they are within it, but none that takes them below the mean.
    Changes all arguments.

    Of several buckets it takes the one after which the host is as far above the mean in bytes as in load. Many small
    tables are as much load as a large one, and would leave memory uneven.
    """
    mean_load = sum(len(table.owners) * table.size for table in tables) / len(load)
    mean_held = max(1.0, sum(len(table.owners) * table.held_bytes for table in tables) / len(load))
    for host in map(int, np.flatnonzero(load > limit)):
        mine = [table for table in tables if table.counts[host]]
        while load[host] > limit:
            fitting = [table for table in mine if table.counts[host] and load[host] - table.size >= mean_load]
            if not fitting:
                break
            above = load[host] / mean_load - held[host] / mean_held
            table = min(fitting, key=lambda t: abs(above - t.size / mean_load + t.held_bytes / mean_held))
            table.give(table.spare(host), -1)
            load[host] -= table.size
            held[host] -= table.held_bytes


def _fill(table: _Placed, load: np.ndarray, *, nth: int) -> None:
    """Gives each bucket without an owner to the least busy host that may have another one, the first of several.
    Changes table and load.

    Buckets of a table are equal. So a host's load before its next bucket, and the one after that, is known at the
    beginning. In the order of these loads the hosts take the buckets.

    Low row numbers are often frequent ones, and all hosts want them of the owners of the first buckets. Hosts that are
    alike stand in the same order for each table. So each table begins elsewhere in that order.

    Args:
      nth: of the tables, in the order in which they are placed.
    """
    free = np.flatnonzero(table.owners < 0)
    room = np.maximum(table.most - table.counts, 0)
    hosts = np.repeat(np.arange(len(room)), room)
    before = np.arange(len(hosts)) - np.repeat(np.cumsum(room) - room, room)
    order = np.lexsort((hosts, load[hosts] + before * table.size))[: len(free)]
    table.owners[free] = np.roll(hosts[order], -(len(free) * (nth * _GOLDEN % 2**32) >> 32))
    given = np.bincount(hosts[order], minlength=len(room))
    table.counts += given
    load += given * table.size


def _even_out(tables: Sequence[_Placed], load: np.ndarray, *, limit: int) -> None:
    """Takes buckets from hosts above the limit, the busiest first, until no single bucket helps. Changes tables and
    load.

    Every move makes the sum of squared loads smaller, so it ends.
    """
    above = np.flatnonzero(load > limit)
    while len(above):
        for busiest in above[np.argsort(-load[above], kind="stable")]:
            if move := _best_move(tables, load, int(busiest)):
                table, host = move
                table.give(table.spare(int(busiest)), host)
                load[busiest] -= table.size
                load[host] += table.size
                break
        else:
            return
        above = np.flatnonzero(load > limit)


def _best_move(tables: Sequence[_Placed], load: np.ndarray, busiest: int) -> tuple[_Placed, int] | None:
    """The table of which a host should give a bucket away, and to whom; None if the other would be as busy then."""
    moves = []
    for at, table in enumerate(tables):
        if not table.counts[busiest]:
            continue
        host = table.least_busy(load)
        if table.counts[host] < table.most and load[host] + table.size < load[busiest]:
            # The move that makes the two most alike; rather of a bucket that has yet to come than of one that is there.
            unlike = abs(int(load[busiest] - load[host]) - 2 * table.size)
            moves.append((table.keeps_all(busiest), unlike, at, host))
    if not moves:
        return None
    *_, at, host = min(moves)
    return tables[at], host


def buckets_together(owners: np.ndarray, *, most: int) -> int:
    """How many buckets in a row have one owner, all over the table, if it is cut into rows of equal length.

    Args:
      owners: int32 `[num_buckets]`, a power of two.
      most: to look for.

    Returns:
      The largest power of two, at least 1.
    """
    together = 1
    while 2 * together <= min(most, len(owners)):
        rows = owners.reshape(-1, 2, together)
        # Both halves of each row have one owner already.
        if (rows[:, 0, 0] != rows[:, 1, 0]).any():
            break
        together *= 2
    return together


def split_evenly(count: int, parts: int) -> list[range]:
    """Contiguous ranges of 0..count-1, one a part, the first `count % parts` one longer."""
    base, extra = divmod(count, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]
