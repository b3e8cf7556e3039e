"""What hosts do in the phases of a step: counts that follow from tables, batch and placement.

A table takes one of three ways. `WHOLE` ones lie on one host, which pools the bags of all hosts. Of `PARTIAL` ones
each host pools its part of every bag. Of `ROWS` the distinct rows travel to the hosts that want them. Some work falls
to every host alike, and that of a whole table to its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from podembed.embedding.costs.constants import Counts, MemoryCurve
from podembed.embedding.kernels.grouped import scratch_bytes

_FLOAT_BYTES, _ID_BYTES, _MARK_BYTES = 4, 8, 4
# Two int64 a slot, and twice as many slots as ids, rounded up to a power of two.
_HASH_BYTES_PER_ID = 48


class TableWay(StrEnum):
    """Which way the bags of a table take."""

    WHOLE = "whole"
    PARTIAL = "partial"
    ROWS = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTraffic:
    """What one step asks of a table.

    Attributes:
      dim: floats of a row.
      slot_floats: of its optimizer's state.
      num_rows: of the whole table.
      features: that look up in it.
      bags: of all its features, in one host's share of a batch.
      ids: the same.
      divided_bags: those of `bags` whose sum is divided, as for a mean.
      host_rows: distinct rows in one host's share.
      all_rows: distinct rows in the batches of all hosts.
      free_bags, free_rows: share of bags, and of distinct rows, that the step before does not touch.
    """

    dim: int
    slot_floats: int
    num_rows: int
    way: TableWay
    features: int
    bags: float
    ids: float
    divided_bags: float = 0.0
    host_rows: float
    all_rows: float
    free_bags: float = 0.0
    free_rows: float = 0.0


@dataclass(slots=True)
class Work:
    """Counts by phase and way, such as `pool/pooled`. Mutated by `add` and `merge`."""

    counts: dict[str, Counts] = field(default_factory=dict)

    def add(self, key: str, counts: Counts) -> None:
        self.counts[key] = self.counts.get(key, Counts()) + counts

    def merge(self, other: Work, *, times: float = 1.0) -> None:
        for key, counts in other.counts.items():
            self.add(key, counts if times == 1.0 else counts * times)

    def of_host(self, num_hosts: int) -> dict[str, Counts]:
        """With what a phase costs once, however many tables there are."""
        once = Counts(steps=1.0, peers=num_hosts - 1.0)
        return {key: counts + once for key, counts in self.counts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """What a table costs every host, and what it costs the owner of a whole one besides."""

    every_host: Work
    owner: Work


def footprint_bytes(tables: Sequence[TableTraffic], num_hosts: int) -> float:
    """Memory that a host touches in one step: rows, slots, activations and their gradients."""
    found = 0.0
    for table in tables:
        vectors = table.bags * table.dim * (num_hosts if table.way is TableWay.PARTIAL else 1)
        rows = table.all_rows / num_hosts * (table.dim + table.slot_floats)
        travelling = 2 * table.host_rows * table.dim if table.way is TableWay.ROWS else 0.0
        found += _FLOAT_BYTES * (2 * vectors + rows + travelling) + _ID_BYTES * 3 * table.ids
    return found


def table_work(table: TableTraffic, *, num_hosts: int, footprint: float, memory: MemoryCurve) -> TableWork:
    """The lookups and the update of one table.

    Args:
      footprint: as `footprint_bytes`, of all tables together.
    """
    every, owner = Work(), Work()
    # What a step left in the caches is gone when it has touched more than they hold.
    again = memory.far_share(footprint)
    held = table.num_rows / (1 if table.way is TableWay.WHOLE else num_hosts)
    cold = memory.far_share(footprint + _FLOAT_BYTES * held * table.dim)
    if table.way is TableWay.ROWS:
        _add_rows(every, table, num_hosts=num_hosts, again=again, cold=cold, memory=memory)
        return TableWork(every_host=every, owner=owner)
    own_calls = table.features * (num_hosts if table.way is TableWay.PARTIAL else 1)
    own_bags = table.bags * (num_hosts if table.way is TableWay.PARTIAL else 1)
    key = "dedup/partial" if table.way is TableWay.PARTIAL else "dedup/pooled"
    every.add(key, Counts(calls=own_calls, ids=table.ids, bags=own_bags))
    if table.way is TableWay.PARTIAL:
        every.add(
            "sums/partial", Counts(calls=own_calls, floats=own_bags * table.dim, shared_floats=own_bags * table.dim)
        )
    part = 1 / num_hosts if table.way is TableWay.PARTIAL else 1.0
    served = _Served(
        calls=table.features * num_hosts,
        ids=table.ids * num_hosts * part,
        bags=table.bags * num_hosts,
        divided=table.divided_bags * num_hosts,
        rows=table.all_rows * part,
        held=table.num_rows * part,
    )
    _add_pooled(every if table.way is TableWay.PARTIAL else owner, table, served, again=again, cold=cold, memory=memory)
    return TableWork(every_host=every, owner=owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """What an owner serves for all hosts: `held` are rows of the table that it has."""

    calls: float
    ids: float
    bags: float
    divided: float
    rows: float
    held: float


def _add_pooled(
    work: Work, table: TableTraffic, served: _Served, *, again: float, cold: float, memory: MemoryCurve
) -> None:
    dim, width = table.dim, table.dim + table.slot_floats
    marks = memory.far_share(_MARK_BYTES * served.held)
    repeats = max(0.0, served.ids - served.rows)
    work.add("id exchange/pooled", Counts(calls=served.calls, ids=served.ids, bags=served.bags))
    marked = Counts(
        calls=served.calls, ids=served.ids, bags=served.bags, rows=served.rows, far_rows=served.rows * marks
    )
    # Gradients that are divided get memory of their own.
    divided = Counts(shared_floats=served.divided * dim)
    sought = memory.far_share(scratch_bytes(served.ids, served.held))
    work.add("group/pooled", replace(marked, far_rows=served.rows * sought) + divided)
    work.add("split/pooled", marked)
    near = memory.far_share(_FLOAT_BYTES * served.rows * dim)
    work.add(
        "pool/pooled",
        Counts(
            calls=served.calls,
            ids=served.ids,
            bags=served.bags,
            floats=served.bags * dim,
            shared_floats=served.bags * dim,
            near_floats=served.ids * dim,
            far_rows=served.rows * cold + repeats * near,
            far_floats=dim * (served.rows * cold + repeats * near),
        ),
    )
    # The first id of a bag finds its gradient where the device left it, the others where the first one did.
    again_vectors = max(0.0, served.ids - served.bags)
    gradients = again * min(served.ids, served.bags)
    gradients += again_vectors * memory.far_share(_FLOAT_BYTES * served.bags * dim)
    work.add(
        "update/pooled",
        Counts(
            calls=served.calls,
            ids=served.ids,
            bags=served.divided,
            floats=served.rows * width + served.divided * dim,
            shared_floats=served.bags * dim,
            near_floats=served.ids * dim,
            rows=served.rows,
            far_rows=served.rows * again + gradients,
            far_floats=served.rows * width * again + gradients * dim,
        ),
    )


def _add_rows(
    work: Work, table: TableTraffic, *, num_hosts: int, again: float, cold: float, memory: MemoryCurve
) -> None:
    dim, width = table.dim, table.dim + table.slot_floats
    own_rows, served = table.host_rows, table.host_rows
    touched = table.all_rows / num_hosts
    calls, streams = float(table.features), float(num_hosts)
    slots = memory.far_share(_HASH_BYTES_PER_ID * table.ids)
    marks = memory.far_share(_MARK_BYTES * table.num_rows / num_hosts)
    near = memory.far_share(_FLOAT_BYTES * own_rows * dim)
    work.add("dedup/rows", Counts(calls=calls + streams, ids=table.ids, rows=own_rows, far_rows=own_rows * slots))
    work.add("id exchange/rows", Counts(calls=streams, rows=own_rows + served, floats=(own_rows + served) * dim))
    work.add("split/rows", Counts(calls=streams, rows=2 * served, far_rows=(served + touched) * marks))
    work.add(
        "gather/rows",
        Counts(
            calls=streams,
            rows=served,
            floats=served * dim,
            far_rows=touched * cold,
            far_floats=dim * (touched * cold + served * again),
        ),
    )
    walked = Counts(
        calls=calls,
        ids=table.ids,
        bags=table.bags,
        floats=table.bags * dim,
        shared_floats=table.bags * dim,
        near_floats=table.ids * dim,
        far_rows=own_rows * again + max(0.0, table.ids - own_rows) * near,
        far_floats=dim * (own_rows * again + max(0.0, table.ids - own_rows) * near),
    )
    work.add("pool/rows", walked)
    work.add("gradient sum/rows", walked)
    work.add(
        "update/rows",
        Counts(
            calls=streams,
            ids=served,
            floats=touched * width,
            near_floats=served * dim,
            rows=touched,
            far_rows=touched * again + touched * marks,
            far_floats=width * touched * again + dim * served * again,
        ),
    )
