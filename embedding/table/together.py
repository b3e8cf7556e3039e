"""Work on several tables at once, cut into parts for the threads of a crew.

Bags are cut into runs, since each has a vector of its own. Touched rows are cut into runs, since each is there once:
one thread sums the gradients of a row, in the order that `Table.group` found. Nothing else is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from podembed.embedding.kernels.arrays import can_stream
from podembed.embedding.kernels.crew import Crew, cut, is_worth_sharing
from podembed.embedding.kernels.grouped import FLOATS_PER_ENTRY
from podembed.embedding.kernels.ids import bad_local_row
from podembed.embedding.kernels.many_tables import NUM_IDS, BagLists, group_tables
from podembed.embedding.row_optimizers.row_step import TouchedRows
from podembed.embedding.table.table import NO_ROWS, GroupedRows, Table

_RUNS_PER_THREAD = 4


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """The bags of one feature, to be combined into `out`; arguments as of `kernels.pool.pool`.

    Attributes:
      pool: of the rows, such as `RowStore.pool`.
      bags: rising, or None for all.
    """

    pool: Callable[..., None]
    index: np.ndarray
    row_splits: np.ndarray
    weights: np.ndarray | None
    combiner: str
    out: np.ndarray
    bags: np.ndarray | None = None
    is_packed: bool = False

    @property
    def num_bags(self) -> int:
        return len(self.row_splits) - 1 if self.bags is None else len(self.bags)

    @property
    def size(self) -> int:
        """Floats read and written."""
        num_all = max(1, len(self.row_splits) - 1)
        return (len(self.index) + num_all) * self.out.shape[1] * self.num_bags // num_all

    def run(self, first: int, stop: int) -> None:
        """Combines a run of the bags."""
        splits, bags, out = self.row_splits, self.bags, self.out
        # Asked of the whole, since a part of it looks as if it could stay in the cache.
        streams = can_stream(out[: self.num_bags], out.shape[1])
        if bags is None:
            splits = splits[first : stop + 1]
        else:
            bags = bags[first:stop]
        if bags is None or self.is_packed:
            out = out[first:stop]
        some = {"bags": bags, "is_packed": self.is_packed, "streams": streams}
        self.pool(self.index, splits, self.weights, self.combiner, out, **some)


def pool_together(poolings: Sequence[Pooling], crew: Crew) -> None:
    """Combines all bags of several features."""
    sizes = [pooling.size for pooling in poolings]
    parts = cut([pooling.num_bags for pooling in poolings], sizes, crew.num_threads)
    calls = [partial(poolings[item].run, first, stop) for item, first, stop in parts]
    crew.run(calls, size=sum(sizes))


def group_together(
    tables: Sequence[Table], held: Sequence[int], lists: np.ndarray, firsts: np.ndarray, crew: Crew
) -> dict[int, GroupedRows]:
    """As `Table.group` for several tables; a large one is grouped by several threads, each with a part of its rows.

    Args:
      held: positions of the tables, rising.
      lists: int64 `[p, 6]`, the lists of bags of one table after another, as `BagLists.lines`.
      firsts: int64 `[t + 1]`, where the lists of each table begin.

    Raises:
      ValueError: a row is not held here.
    """
    before = np.concatenate([[0], np.cumsum(lists[:, NUM_IDS])])
    sizes, total = np.diff(before[firsts]).tolist(), int(before[-1])
    found: dict[int, GroupedRows] = {}
    runs, shared = _runs(sizes, crew.num_threads)

    def group(first: int, stop: int) -> None:
        some = [tables[at] for at in held[first:stop]]
        limits, marks = np.array([[table.num_rows, table.marks_address] for table in some]).T
        own = lists[firsts[first] : firsts[stop]]
        grouped, bad = group_tables(own, firsts[first : stop + 1] - firsts[first], limits, marks)
        if bad >= 0:
            raise bad_local_row(int(grouped[bad][0][0]), int(limits[bad]))
        for at, arrays in zip(held[first:stop], grouped, strict=True):
            found[at] = GroupedRows(*arrays)

    crew.run([partial(group, *run) for run in runs], size=FLOATS_PER_ENTRY * total)
    for number, num_parts in shared.items():
        own = BagLists(lists[firsts[number] : firsts[number + 1]])
        found[held[number]] = _group_in_parts(tables[held[number]], own, num_parts, crew)
    return {at: found[at] for at in held}


def _runs(sizes: Sequence[int], num_threads: int) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Runs of tables that one thread groups, as (first, the one after the last). All others, by their number, with the
    parts of their rows.
    """
    total = sum(sizes)
    num_parts = [_num_parts(size, total, num_threads) for size in sizes]
    shared = {number: count for number, count in enumerate(num_parts) if count > 1}
    is_shared = num_threads > 1 and is_worth_sharing(FLOATS_PER_ENTRY * total)
    # A run is a piece of work: a thread that has ended its own takes another.
    wanted = total / (_RUNS_PER_THREAD * num_threads) if is_shared else total
    runs, first, held = [], 0, 0
    for number, size in enumerate([*sizes, 0]):
        if number == len(sizes) or number in shared or (held and held + size > wanted):
            runs += [(first, number)] if number > first else []
            first, held = number + (number in shared), 0
        held += 0 if number in shared else size
    return runs, shared


def _group_in_parts(table: Table, lists: BagLists, num_parts: int, crew: Crew) -> GroupedRows:
    """One table, by several threads."""
    rows, addresses = lists.entries()
    found = [NO_ROWS] * num_parts

    def group(part: int) -> None:
        found[part] = table.group_part(rows, addresses, part, num_parts)

    crew.run([partial(group, part) for part in range(num_parts)], size=FLOATS_PER_ENTRY * len(rows))
    return GroupedRows.joined(found)


def _num_parts(size: int, total: int, num_threads: int) -> int:
    """Into how many parts the rows of a table are cut: a power of two. More than one if it has so many of all entries
    that threads would wait for it.
    """
    count = 1
    while (
        2 * count <= num_threads
        and 4 * count * total <= 3 * num_threads * size
        and is_worth_sharing(FLOATS_PER_ENTRY * size)
    ):
        count *= 2
    return count


def update_together(
    tables: Sequence[Table], grouped: Mapping[int, GroupedRows], learning_rates: Sequence[float], crew: Crew
) -> None:
    """As `Table.update_grouped` for every table.

    Args:
      grouped: by position of the table.
      learning_rates: one a table.
    """
    # In the order of the tables, whichever thread grouped one first: a rule in Python may keep something.
    order = sorted(grouped)
    if crew.num_threads == 1:
        for at in order:
            tables[at].update_grouped(grouped[at], learning_rates[at])
        return
    for at in order:
        tables[at].begin_update(grouped[at])
    _run([_Update(tables[at], grouped[at].touched, grouped[at].addresses, learning_rates[at]) for at in order], crew)


def update_rows_together(
    tables: Sequence[Table],
    rows: Mapping[int, tuple[np.ndarray, np.ndarray]],
    learning_rates: Sequence[float],
    crew: Crew,
) -> None:
    """As `Table.update_at` for every table.

    Args:
      rows: by position of the table, local rows and addresses of their gradients.
      learning_rates: one a table.
    """
    if crew.num_threads == 1:
        for at, (local_rows, addresses) in rows.items():
            tables[at].update_at(local_rows, addresses, learning_rates[at])
        return
    touched: dict[int, TouchedRows] = {}

    def touch(at: int) -> None:
        touched[at] = tables[at].touch(rows[at][0])

    num_rows = sum(len(local_rows) for local_rows, _ in rows.values())
    crew.run([partial(touch, at) for at in rows], size=FLOATS_PER_ENTRY * num_rows)
    for at in rows:
        tables[at].announce(touched[at].rows)
    _run([_Update(tables[at], touched[at], rows[at][1], learning_rates[at]) for at in rows], crew)


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """Touched rows of a table, and where their gradients lie."""

    table: Table
    touched: TouchedRows
    addresses: np.ndarray
    learning_rate: float

    @property
    def size(self) -> int:
        """Floats read and written."""
        return (len(self.addresses) + 2 * len(self.touched.rows)) * self.table.spec.dim

    def run(self, first: int, stop: int) -> None:
        self.table.update_run(self.touched, self.addresses, self.learning_rate, first, stop)


def _run(updates: Sequence[_Update], crew: Crew) -> None:
    shared = [update for update in updates if update.table.can_be_cut]
    sizes = [update.size for update in shared]
    parts = cut([len(update.touched.rows) for update in shared], sizes, crew.num_threads)
    crew.run([partial(shared[item].run, first, stop) for item, first, stop in parts], size=sum(sizes))
    for update in updates:
        if not update.table.can_be_cut:
            update.run(0, len(update.touched.rows))
