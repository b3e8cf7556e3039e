"""Which tables are placed whole, and who owns what.

The owner of a whole table combines rows where they lie, and only vectors cross the network (`PooledWay`). That is
the fastest way for long bags, and nothing is deduplicated. So every table that one host can hold is placed whole. Only
larger ones are cut into buckets; how these are looked up is decided in `pooling_choice`.

The owner of a whole table works for the samples of all hosts. With many hosts that is more than its share, so a table
that would make its owner too busy is cut as well. Small tables have enough buckets for that in a run that may have many
hosts (`buckets_for_work`). This is exact, since each row still has one owner. It adds the gradients of all hosts in
their order, and updates the row once a step.

A cut table is placed in blocks of several buckets in a row. Buckets in a row that have one owner may lie in one file of
a commit. Blocks are small enough for even shares, and for hot rows, whose numbers are often low, to be spread. Each
table begins with another host.

Hosts get even shares of memory and work together. A table costs its bytes, and for each of its features an even part of
all bytes. What a feature costs a step depends on samples and bags, not on the number of rows.

A caller that knows what tables cost may choose instead (`Chosen`). Memory still decides where a table would leave its
host with more than a fair share, and so does an optimizer that cannot pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.buckets import MAX_BUCKETS, buckets_together, place
from podembed.embedding.lookup.pooling_choice import why_not_pooled
from podembed.embedding.shards import owners_of_shards
from podembed.embedding.table_spec import TableSpec

MOST_WORK = 1.5
"""How many times the mean of all hosts the owner of a whole table may work, counted in features."""
MANY_HOSTS = 32
"""With fewer hosts, the owner of a small table works less for all of them than messages cost."""
BUCKETS_PER_SHARE = 4
"""A bucket of a small table is at most this part of a host's share of the work, so that shares can be even."""
BLOCKS_PER_HOST = 64
"""Of a cut table, where its buckets are large: the busiest host then has at most 1/64 more of it than the mean."""
FEWEST_BLOCKS_PER_HOST = 16
"""Where buckets are small and tables many, so that files of a commit are not. Hosts get even shares of all tables."""
MAX_BLOCK_BUCKETS = 64
MAX_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementWay:
    """How a table lies on the hosts.

    Attributes:
      is_whole: all buckets are placed on one host, which pools the bags if it can. Otherwise buckets are spread over
        the hosts.
      size_bytes: rows and slots, padding included.
      reason: why, with the numbers.
    """

    is_whole: bool
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """How a table is to lie and to be looked up, where costs were compared.

    Attributes:
      pools: where it is cut, each owner pools its rows of each bag; otherwise distinct rows travel.
      work: of all that its owners do for it in a step, in parts of what they do for all tables.
      reason: why, with the numbers.
    """

    is_whole: bool
    pools: bool
    work: float
    reason: str = "chosen by predicted time"


def ways(
    specs: Sequence[TableSpec],
    *,
    num_features: Sequence[int],
    num_hosts: int,
    chosen: Sequence[Chosen] | None = None,
) -> list[PlacementWay]:
    """Which tables are placed whole on so many hosts, and why.

    Args:
      num_features: per table, how many features look up in it.
      chosen: one a table; None follows from sizes and features.
    """
    sizes = [spec.bucket_bytes * spec.layout.num_buckets for spec in specs]
    # A table above the fair share would leave its host with more than the others even if it held nothing else.
    fair_bytes = sum(sizes) // num_hosts
    most_features = MOST_WORK * sum(num_features) / num_hosts
    return [
        _way(spec, size, fair_bytes, count, most_features, one)
        for spec, size, count, one in zip(specs, sizes, num_features, chosen or [None] * len(sizes), strict=True)
    ]


def _way(
    spec: TableSpec,
    size_bytes: int,
    fair_bytes: int,
    num_features: int,
    most_features: float,
    chosen: Chosen | None,
) -> PlacementWay:
    if spec.is_sharded:
        return PlacementWay(is_whole=False, size_bytes=size_bytes, reason="cut over the devices")
    share = f"a host's fair share, {fair_bytes / 2**20:,.1f} MiB"
    if spec.layout.num_buckets == 1:
        return PlacementWay(is_whole=True, size_bytes=size_bytes, reason="one bucket")
    if (why := why_not_pooled(spec)) is not None:
        return PlacementWay(is_whole=False, size_bytes=size_bytes, reason=why)
    if size_bytes > fair_bytes:
        return PlacementWay(is_whole=False, size_bytes=size_bytes, reason=f"above {share}")
    if chosen is not None:
        return PlacementWay(is_whole=chosen.is_whole, size_bytes=size_bytes, reason=chosen.reason)
    if num_features > most_features:
        reason = (
            f"work: features {num_features}, more than {most_features:.2g}, {MOST_WORK:g} times a host's fair share"
        )
        return PlacementWay(is_whole=False, size_bytes=size_bytes, reason=reason)
    return PlacementWay(is_whole=True, size_bytes=size_bytes, reason=f"within {share}")


def buckets_for_work(*, num_rows: int, num_features: int, all_features: int, most_hosts: int) -> int:
    """How many buckets a table needs so that no host works too much for it; 1 where one host never does.

    Args:
      num_features: that look up in the table.
      all_features: of the job.
      most_hosts: that a run may ever have.

    Returns:
      A power of two; no more than one row a bucket needs.
    """
    if most_hosts < MANY_HOSTS or num_features * most_hosts <= MOST_WORK * all_features:
        return 1
    wanted = -(-BUCKETS_PER_SHARE * num_features * most_hosts // all_features)
    return min(MAX_BUCKETS, 1 << (wanted - 1).bit_length(), 1 << (num_rows - 1).bit_length())


def place_tables(
    specs: Sequence[TableSpec],
    *,
    num_features: Sequence[int],
    num_hosts: int,
    previous: Sequence[np.ndarray] | None = None,
    chosen: Sequence[Chosen] | None = None,
) -> list[np.ndarray]:
    """Decides which host owns each bucket of each table. A function of its arguments alone.

    Args:
      specs: all tables.
      num_features: per table, how many features look up in it.
      num_hosts: hosts of the new generation.
      previous: per table, int32 `[num_buckets]` the owner in the previous generation; None for a new run.
      chosen: as of `ways`.

    Returns:
      Per table, int32 `[num_buckets]`, the owner; all the same for a table that is placed whole.
    """
    if any(spec.is_sharded for spec in specs):
        return _beside_shards(specs, num_features=num_features, num_hosts=num_hosts, previous=previous, chosen=chosen)
    found = ways(specs, num_features=num_features, num_hosts=num_hosts, chosen=chosen)
    table_bytes = [way.size_bytes for way in found]
    is_whole = [way.is_whole for way in found]
    # Work counts as much as memory does, all in all.
    if chosen is None:
        feature_bytes = sum(table_bytes) // max(1, sum(num_features))
        work_bytes = [count * feature_bytes for count in num_features]
    else:
        work_bytes = [int(one.work * sum(table_bytes)) for one in chosen]
    block_bytes = min(MAX_BLOCK_BYTES, sum(table_bytes) // (num_hosts * BLOCKS_PER_HOST))
    blocks = [
        spec.layout.num_buckets
        if whole
        else block_buckets(
            spec.layout.num_buckets,
            num_hosts,
            None if previous is None else previous[at],
            may_have=block_bytes // spec.bucket_bytes,
        )
        for at, (spec, whole) in enumerate(zip(specs, is_whole, strict=True))
    ]
    num_units = [spec.layout.num_buckets // block for spec, block in zip(specs, blocks, strict=True)]
    before = None
    if previous is not None:
        before = [
            _owner(owners, num_hosts) if whole else owners[::block]
            for owners, whole, block in zip(previous, is_whole, blocks, strict=True)
        ]
    placed = place(
        bucket_bytes=[np.full(units, size // units) for units, size in zip(num_units, table_bytes, strict=True)],
        work_bytes=[work // units for units, work in zip(num_units, work_bytes, strict=True)],
        num_hosts=num_hosts,
        previous=before,
    )
    return [np.repeat(owners, block) for owners, block in zip(placed, blocks, strict=True)]


def _beside_shards(
    specs: Sequence[TableSpec],
    *,
    num_features: Sequence[int],
    num_hosts: int,
    previous: Sequence[np.ndarray] | None,
    chosen: Sequence[Chosen] | None,
) -> list[np.ndarray]:
    """As `place_tables`. Sharded tables lie with their devices, evenly, and the others as if they were alone."""
    others = [at for at, spec in enumerate(specs) if not spec.is_sharded]
    placed = [owners_of_shards(spec.layout.num_buckets, num_hosts) for spec in specs]
    if others:
        alone = place_tables(
            [specs[at] for at in others],
            num_features=[num_features[at] for at in others],
            num_hosts=num_hosts,
            previous=None if previous is None else [previous[at] for at in others],
            chosen=None if chosen is None else [chosen[at] for at in others],
        )
        for at, owners in zip(others, alone, strict=True):
            placed[at] = owners
    return placed


def block_buckets(num_buckets: int, num_hosts: int, previous: np.ndarray | None, *, may_have: int = 0) -> int:
    """How many buckets in a row of a cut table go together.

    With a host's share of at least `BLOCKS_PER_HOST` blocks, the busiest has at most 1/64 more than the mean. Where
    buckets of a block had several owners, smaller blocks keep them where they are.

    Args:
      may_have: that are small beside a host's share of all tables. So many go together while a host gets at least
        `FEWEST_BLOCKS_PER_HOST`.

    Returns:
      A power of two.
    """
    of_table = num_buckets // (BLOCKS_PER_HOST * num_hosts)
    of_all = min(may_have, num_buckets // (FEWEST_BLOCKS_PER_HOST * num_hosts))
    before = np.zeros(num_buckets, np.int32) if previous is None else previous
    return buckets_together(before, most=min(MAX_BLOCK_BUCKETS, max(of_table, of_all)))


def _owner(owners: np.ndarray, num_hosts: int) -> np.ndarray:
    """Where a table that is whole was before: with the host that had most of its buckets, or with none."""
    counts = np.bincount(owners[(owners >= 0) & (owners < num_hosts)], minlength=num_hosts)
    return np.array([np.argmax(counts) if counts.any() else -1], np.int32)
