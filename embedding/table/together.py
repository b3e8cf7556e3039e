"""Work on several tables at once, cut into parts for the threads of a crew.

Bags are cut into runs, since each has a vector of its own. Touched rows are cut into runs, since each is there once:
one thread sums the gradients of a row, in the order that `Table.group` found. Nothing else is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from podembed.embedding.kernels.arrays import can_stream, matrix_of
from podembed.embedding.kernels.bag_frames import NUM_IDS
from podembed.embedding.kernels.crew import Crew, cut, cut_into_runs, is_worth_sharing
from podembed.embedding.kernels.grouped import FLOATS_PER_ENTRY
from podembed.embedding.kernels.many_tables import BagLists, GroupedEntries, group_tables
from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.row_optimizers.row_step import TouchedRows
from podembed.embedding.row_optimizers.table_rules import (
    LINE,
    NUM_ADDRESSES,
    NUM_ROWS,
    ROW_BYTES,
    ROWS,
    START_BYTES,
    STARTS,
)
from podembed.embedding.table.kept_rows import Keeper
from podembed.embedding.table.table import NO_ROWS, GroupedRows, Table


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


class GroupedTables(Mapping[int, GroupedRows]):
    """Touched rows of several tables, by the position of the table.

    Attributes:
      held: positions of the tables.
      lines: int64 `[t, 5]`, the same for kernels, as `GroupedEntries.lines`.
    """

    def __init__(self, held: Sequence[int], parts: Sequence[tuple[Sequence[int], GroupedEntries]]) -> None:
        self.held = tuple(held)
        self._where = {table: (part, at) for tables, part in parts for at, table in enumerate(tables)}
        numbers = {table: number for number, table in enumerate(self.held)}
        self.lines = np.zeros((len(self.held), LINE), np.int64)
        for tables, part in parts:
            self.lines[[numbers[table] for table in tables]] = part.lines()

    @staticmethod
    def of(rows: Mapping[int, GroupedRows]) -> GroupedTables:
        """Tables that were grouped each by itself."""
        return GroupedTables([*rows], [([at], _entries_of(own)) for at, own in rows.items()])

    def __getitem__(self, table: int) -> GroupedRows:
        part, at = self._where[table]
        return GroupedRows(*part.of(at))

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def _entries_of(rows: GroupedRows) -> GroupedEntries:
    bounds = np.array([[0, len(rows.rows), 0, len(rows.addresses)]])
    return GroupedEntries(rows.rows, rows.starts, rows.addresses, bounds)


def group_together(
    tables: Sequence[Table], held: Sequence[int], lists: np.ndarray, firsts: np.ndarray, crew: Crew
) -> GroupedTables:
    """As `Table.group` for several tables; a large one is grouped by several threads, each with a part of its rows.

    Args:
      held: positions of the tables.
      lists: int64 `[p, 6]`, the lists of bags of one table after another, as `BagLists.lines`.
      firsts: int64 `[t + 1]`, where the lists of each table begin.

    Raises:
      ValueError: a row is not held here.
    """
    before = np.concatenate([[0], np.cumsum(lists[:, NUM_IDS])])
    sizes, total = np.diff(before[firsts]).tolist(), int(before[-1])
    scratch = np.array([(tables[at].num_rows, tables[at].marks_address) for at in held], np.int64).reshape(-1, 2)
    found: list[tuple[Sequence[int], GroupedEntries]] = []
    runs, shared = _runs(sizes, crew.num_threads)

    def group(first: int, stop: int) -> None:
        own = lists[firsts[first] : firsts[stop]], firsts[first : stop + 1] - firsts[first]
        found.append((held[first:stop], group_tables(*own, *scratch[first:stop].T)))

    crew.run([partial(group, *run) for run in runs], size=FLOATS_PER_ENTRY * total)
    for number, num_parts in shared.items():
        own = BagLists(lists[firsts[number] : firsts[number + 1]])
        rows = _group_in_parts(tables[held[number]], own, num_parts, crew)
        found.append(([held[number]], _entries_of(rows)))
    return GroupedTables(held, found)


def _runs(sizes: Sequence[int], num_threads: int) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Runs of tables that one thread groups, as (first, the one after the last). All others, by their number, with the
    parts of their rows.
    """
    total = sum(sizes)
    num_parts = [_num_parts(size, total, num_threads) for size in sizes]
    shared = {number: count for number, count in enumerate(num_parts) if count > 1}
    is_shared = num_threads > 1 and is_worth_sharing(FLOATS_PER_ENTRY * total)
    # One run a thread: more of them only add Python, of which one thread runs at a time.
    wanted = total / num_threads if is_shared else total
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


class TableUpdates:
    """Updates of tables whose rows are touched together. Those that have one rule and one width take one call.

    Args:
      tables: all tables of the job.
      held: positions of those that are updated, as of the `GroupedTables` of each step.
    """

    def __init__(self, tables: Sequence[Table], held: Sequence[int]) -> None:
        self._tables, self.held = tables, tuple(held)
        self._sets: list[_RuleSet] = []
        alone: set[int] = set()
        of_rule: dict[tuple[Optimizer, int], list[int]] = {}
        for number, at in enumerate(held):
            spec = tables[at].spec
            if spec.optimizer is not None and spec.optimizer.updates_together:
                of_rule.setdefault((spec.optimizer, spec.dim), []).append(number)
            else:
                alone.add(at)
        # In the order of the tables, since a rule in Python may keep something.
        self._in_order, self._alone = sorted(held), frozenset(alone)
        for (optimizer, dim), own in of_rule.items():
            stores = [tables[held[number]].store for number in own]
            # What an index keeps of each row comes behind the slots.
            trained = 1 + len(optimizer.slots)
            lines = [[matrix_of(array) for array in [*store.arrays.values()][:trained]] for store in stores]
            matrices = np.array(lines, np.int64).reshape(len(own), -1)
            self._sets.append(
                _RuleSet(optimizer, dim, np.array([held[number] for number in own]), np.array(own), matrices)
            )

    def run(self, grouped: GroupedTables, learning_rates: Sequence[float], crew: Crew) -> None:
        """As `Table.update_grouped` for every table.

        Args:
          grouped: of the tables that are held.
          learning_rates: one a table of the job.

        Raises:
          ValueError: as `Table.begin_update`, or `grouped` is of other tables. Nothing has changed then.
        """
        if grouped.held != self.held:
            raise ValueError(
                f"Found touched rows of tables {list(grouped.held)}. Expected those of {list(self.held)}, in this "
                "order. Group the tables that are updated."
            )
        if any(self._tables[at].updates_alone for at in self.held):
            for at in self._in_order:
                self._tables[at].update_grouped(grouped[at], learning_rates[at])
            return
        for at in self._in_order:
            if at in self._alone:
                self._tables[at].begin_update(grouped[at])
        self._announce(grouped)
        rates, calls, total = np.array(learning_rates, np.float64), [], 0
        for one in self._sets:
            lines = grouped.lines[one.numbers]
            own_rates = rates[one.tables]
            for rate in dict.fromkeys(own_rates.tolist()):
                some = np.flatnonzero(own_rates == rate)
                calls += one.calls(some, lines if len(some) == len(lines) else lines[some], rate, crew)
            total += int(one.sizes(lines).sum())
        crew.run(calls, size=total)
        for at in self._in_order:
            if at in self._alone:
                own = grouped[at]
                self._tables[at].update_run(own.touched, own.addresses, learning_rates[at], 0, len(own.rows))

    def _announce(self, grouped: GroupedTables) -> None:
        """As `Table.announce` for all tables that are not alone. Those that are kept together hear of it at once."""
        together: dict[Callable[..., None], list[tuple[int, int]]] = {}
        for number, at in enumerate(self.held):
            keeper = None if at in self._alone else self._tables[at].before_change
            if isinstance(keeper, Keeper):
                together.setdefault(keeper.keep, []).append((keeper.number, number))
            elif keeper is not None:
                keeper(grouped[at].rows)
        for keep, pairs in together.items():
            # In the order of the tables, whatever order they were grouped in.
            numbers, lines = zip(*sorted(pairs), strict=True)
            keep(numbers, grouped.lines[list(lines)][:, [ROWS, NUM_ROWS]])


@dataclass(frozen=True, slots=True, eq=False)
class _RuleSet:
    """Tables of one rule and one width, their numbers among those held, and the matrices of their rows and slots."""

    optimizer: Optimizer
    dim: int
    tables: np.ndarray
    numbers: np.ndarray
    matrices: np.ndarray

    def sizes(self, lines: np.ndarray) -> np.ndarray:
        """Floats read and written, by table."""
        return (lines[:, NUM_ADDRESSES] + 2 * lines[:, NUM_ROWS]) * self.dim

    def calls(self, some: np.ndarray, lines: np.ndarray, learning_rate: float, crew: Crew) -> list[partial[None]]:
        """For the threads of a crew."""
        rule = self.optimizer.table_rule(learning_rate)
        if crew.num_threads == 1:
            matrices = self.matrices if len(some) == len(self.matrices) else self.matrices[some]
            return [partial(rule, self.dim, matrices, lines)]
        calls = []
        for items, firsts, stops in cut_into_runs(lines[:, NUM_ROWS], self.sizes(lines), crew.num_threads):
            own = lines[items]
            own[:, ROWS] += ROW_BYTES * firsts
            own[:, STARTS] += START_BYTES * firsts
            own[:, NUM_ROWS] = stops - firsts
            calls.append(partial(rule, self.dim, self.matrices[some[items]], own))
        return calls


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
