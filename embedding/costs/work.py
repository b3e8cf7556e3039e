"""What hosts do in the phases of a step: counts that follow from tables, batch and placement.

A table takes one of three ways. `WHOLE` ones lie on one host, which pools the bags of all hosts. Of `PARTIAL` ones
each host pools its part of every bag. Of `ROWS` the distinct rows travel to the hosts that want them. Some work falls
to every host alike, and that of a whole table to its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from podembed.embedding.costs.constants import Caches, Counts
from podembed.embedding.kernels.grouped import Grouping, grouping_of

_FLOAT_BYTES, _ID_BYTES, _MARK_BYTES = 4, 8, 4
_LINE_BYTES = 64
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
        before = self.counts.get(key)
        self.counts[key] = counts if before is None else before + counts

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
    """Memory that a host touches in one step: rows, slots, ids, activations and their gradients."""
    found = 0.0
    for table in tables:
        pooled = num_hosts if table.way is TableWay.PARTIAL else 1
        held, rows = table.num_rows / num_hosts, table.all_rows / num_hosts
        found += _touched_bytes(rows, held, table.dim) + _touched_bytes(rows, held, table.slot_floats)
        travelling = 4 * table.host_rows * table.dim if table.way is TableWay.ROWS else 0.0
        found += _FLOAT_BYTES * (2 * pooled * table.bags * table.dim + travelling) + 3 * _ID_BYTES * table.ids
    return found


def _lines(width: float) -> int:
    """Cache lines of so many floats."""
    return -(-int(_FLOAT_BYTES * width) // _LINE_BYTES)


def _touched_bytes(rows: float, held: float, width: float) -> float:
    """Cache lines of `rows` of the `held` rows of so many floats."""
    return min(_FLOAT_BYTES * held * width, _LINE_BYTES * rows * _lines(width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """What a host touches in one step, of all its tables together.

    Attributes:
      step_bytes: as `footprint_bytes`.
      held_bytes: of its rows, also of those that no step touches.
    """

    step_bytes: float
    held_bytes: float

    @staticmethod
    def of(tables: Sequence[TableTraffic], num_hosts: int) -> Touched:
        # No feature of a host looks up in a table on the devices.
        held = sum(_FLOAT_BYTES * table.num_rows * table.dim for table in tables if table.features) / num_hosts
        return Touched(step_bytes=footprint_bytes(tables, num_hosts), held_bytes=held)


def table_work(table: TableTraffic, *, num_hosts: int, touched: Touched, caches: Caches) -> TableWork:
    """The lookups and the update of one table.

    Args:
      touched: of all tables together.
    """
    every, owner = Work(), Work()
    where = _Where.of(touched, caches)
    if table.way is TableWay.ROWS:
        _add_rows(every, table, num_hosts=num_hosts, where=where)
        return TableWork(every_host=every, owner=owner)
    own_calls = table.features * (num_hosts if table.way is TableWay.PARTIAL else 1)
    own_bags = table.bags * (num_hosts if table.way is TableWay.PARTIAL else 1)
    key = "dedup/partial" if table.way is TableWay.PARTIAL else "dedup/pooled"
    every.add(key, Counts(calls=own_calls, ids=table.ids, ids_from_memory=table.ids * where.step_l3, bags=own_bags))
    if table.way is TableWay.PARTIAL:
        floats, lines = own_bags * table.dim, own_bags * _lines(table.dim)
        every.add(
            "sums/partial",
            Counts(
                calls=own_calls,
                floats=floats,
                shared_floats=floats,
                bag_lines_from_l3=lines * where.step_l2,
                bag_lines_from_memory=lines * where.step_l3,
            ),
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
    _add_pooled(every if table.way is TableWay.PARTIAL else owner, table, served, where=where)
    return TableWork(every_host=every, owner=owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """How much of what lies where is out of the caches.

    Attributes:
      step_l2, step_l3: what a step has touched is gone from them when the next phase wants it.
      row_l3: of the rows that a step touches for the first time.
    """

    caches: Caches
    step_l2: float
    step_l3: float
    row_l3: float

    @staticmethod
    def of(touched: Touched, caches: Caches) -> _Where:
        return _Where(
            caches=caches,
            step_l2=caches.beyond_l2(touched.step_bytes),
            step_l3=caches.beyond_l3(touched.step_bytes),
            row_l3=caches.beyond_l3(touched.step_bytes + touched.held_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """What an owner serves for all hosts: `held` are rows of the table that it has."""

    calls: float
    ids: float
    bags: float
    divided: float
    rows: float
    held: float


def _add_pooled(work: Work, table: TableTraffic, served: _Served, *, where: _Where) -> None:
    dim, lines = table.dim, _lines(table.dim)
    beyond_l2 = where.caches.beyond_l2
    work.add(
        "id exchange/pooled",
        Counts(calls=served.calls, ids=served.ids, bags=served.bags, bag_lines_from_memory=served.bags * where.step_l3),
    )
    work.add("group/pooled", _grouped(served, lines=lines, dim=dim, where=where))
    marks = beyond_l2(_touched_bytes(served.rows, served.held, 1))
    work.add(
        "split/pooled",
        Counts(
            calls=served.calls,
            ids=served.ids,
            bags=served.bags,
            rows=served.rows,
            row_lines_from_l3=served.rows * marks,
            rows_from_memory=served.rows * where.caches.beyond_l3(_MARK_BYTES * served.held),
        ),
    )
    # The first id of a row finds it in memory, the others where the first one did.
    again = max(0.0, served.ids - served.rows) * lines
    row_lines = served.rows * lines
    work.add(
        "pool/pooled",
        Counts(
            calls=served.calls,
            ids=served.ids,
            id_lines=served.ids * lines,
            id_lines_from_l3=again * beyond_l2(_touched_bytes(served.rows, served.held, dim)),
            bags=served.bags,
            bag_lines_from_memory=served.bags * lines * where.step_l3,
            floats=served.bags * dim,
            shared_floats=served.bags * dim,
            rows_from_memory=served.rows * where.row_l3,
            row_lines_from_l3=row_lines * where.step_l2,
            row_lines_from_memory=row_lines * where.row_l3,
        ),
    )
    # Rows are where pooling left them. So are gradients where the device did, at first.
    state = _lines(table.slot_floats)
    first = min(served.ids, served.bags) * lines
    work.add(
        "update/pooled",
        Counts(
            calls=served.calls,
            ids=served.ids,
            id_lines=served.ids * lines,
            id_lines_from_l3=served.ids * lines * beyond_l2(_FLOAT_BYTES * served.bags * dim),
            bag_lines_from_l3=first * where.step_l2,
            bag_lines_from_memory=first * where.step_l3,
            divided_bags=served.divided,
            divided_lines=served.divided * lines,
            shared_floats=served.bags * dim,
            rows=served.rows,
            row_lines=row_lines,
            row_lines_from_l3=served.rows * (lines + state) * where.step_l2,
            row_lines_from_memory=served.rows * (lines + state) * where.step_l3,
            wide_lines=row_lines if table.slot_floats >= dim else 0.0,
        ),
    )


def _grouped(served: _Served, *, lines: int, dim: int, where: _Where) -> Counts:
    """Grouping takes one of three ways by the ids and rows of a table. Each has its own cost."""
    found = Counts(
        calls=served.calls,
        ids_from_memory=served.ids * where.step_l3,
        bags=served.bags,
        divided_bags=served.divided,
        divided_lines=served.divided * lines,
        # Gradients that are divided get memory of their own.
        shared_floats=served.divided * dim,
    )
    match grouping_of(served.ids, served.held):
        case Grouping.HASHED:
            return found + Counts(hashed_ids=served.ids, hashed_rows=served.rows)
        case Grouping.COUNTED:
            return found + Counts(counted_ids=served.ids, counted_rows=served.rows, held_rows=served.held)
        case Grouping.MARKED:
            marks = _touched_bytes(served.rows, served.held, 1)
            return found + Counts(
                marked_ids=served.ids, row_lines_from_l3=served.ids * where.caches.beyond_l2(marks), rows=served.rows
            )


def _add_rows(work: Work, table: TableTraffic, *, num_hosts: int, where: _Where) -> None:
    dim, lines, state = table.dim, _lines(table.dim), _lines(table.slot_floats)
    own, served = table.host_rows, table.host_rows
    touched, held = table.all_rows / num_hosts, table.num_rows / num_hosts
    calls, streams = float(table.features), float(num_hosts)
    beyond_l2 = where.caches.beyond_l2
    slots = beyond_l2(_HASH_BYTES_PER_ID * table.ids)
    marks = beyond_l2(_touched_bytes(touched, held, 1))
    far_marks = where.caches.beyond_l3(_MARK_BYTES * held)
    work.add("dedup/rows", Counts(calls=calls, ids=table.ids, rows=own, row_lines_from_l3=own * slots))
    work.add("id exchange/rows", Counts(calls=streams, rows=own + served, floats=(own + served) * dim))
    work.add(
        "split/rows",
        Counts(
            calls=streams,
            ids=served,
            rows=touched,
            row_lines_from_l3=(served + touched) * marks,
            rows_from_memory=(served + touched) * far_marks,
        ),
    )
    work.add(
        "gather/rows",
        Counts(
            calls=streams,
            rows=served,
            row_lines=served * lines,
            row_lines_from_l3=served * lines * where.step_l2,
            rows_from_memory=touched * where.row_l3,
            row_lines_from_memory=touched * lines * where.row_l3,
            bag_lines_from_memory=served * lines * where.step_l3,
        ),
    )
    walked = Counts(
        calls=calls,
        ids=table.ids,
        id_lines=table.ids * lines,
        id_lines_from_l3=table.ids * lines * beyond_l2(_FLOAT_BYTES * own * dim),
        bags=table.bags,
        bag_lines_from_memory=table.bags * lines * where.step_l3,
        floats=table.bags * dim,
        shared_floats=table.bags * dim,
        row_lines_from_l3=own * lines * where.step_l2,
        row_lines_from_memory=own * lines * where.step_l3,
    )
    work.add("pool/rows", walked)
    work.add("gradient sum/rows", walked)
    work.add(
        "update/rows",
        Counts(
            calls=streams,
            ids=served,
            id_lines=served * lines,
            bag_lines_from_l3=served * lines * where.step_l2,
            bag_lines_from_memory=served * lines * where.step_l3,
            rows=touched,
            row_lines=touched * lines,
            row_lines_from_l3=touched * (lines + state) * where.step_l2,
            row_lines_from_memory=touched * (lines + state) * where.step_l3,
            rows_from_memory=touched * far_marks,
            wide_lines=touched * lines if table.slot_floats >= dim else 0.0,
        ),
    )
