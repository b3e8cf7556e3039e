"""`RamGroup`: the tables of the features that a host pools, for work on all of them at once.

Between Python and the kernels, a feature is a line of numbers: where its bags, its rows and its vectors lie. What is
the same in every step is found out once. So hundreds of small tables cost little more than one of their size.

Bags are cut into runs for the threads of a pool, since each has a vector of its own. So are touched rows, since each is
there once: one thread sums the gradients of a row, in the order that `Table.group` found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from podembed.embedding.kernels.arrays import CACHE_LINE_BYTES, STREAMING_FLOATS, BlockLines, aligned_empty, matrix_of
from podembed.embedding.kernels.bag_frames import NUM_BAGS, NUM_IDS, SPLITS, WEIGHTS
from podembed.embedding.kernels.grouped import FLOATS_PER_ENTRY
from podembed.embedding.kernels.many_tables import (
    SPLIT_BYTES,
    BagLists,
    GroupedEntries,
    divide_gradients,
    group_tables,
    pool_tables,
)
from podembed.embedding.kernels.pool import COMBINER_CODES
from podembed.embedding.kernels.threads import Threads, cut_into_runs, is_worth_sharing
from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.row_optimizers.table_rules import (
    LINE,
    NUM_ADDRESSES,
    NUM_ROWS,
    ROW_BYTES,
    ROWS,
    START_BYTES,
    STARTS,
)
from podembed.embedding.table.stores.store import (
    NO_ROWS,
    GroupedRows,
    Keeper,
    PooledFeature,
    ScaledGradients,
)

if TYPE_CHECKING:
    from podembed.embedding.table.stores.ram import RamStore
    from podembed.embedding.table.table import Table

_FLOAT_BYTES = 4
_LINE_FLOATS = CACHE_LINE_BYTES // _FLOAT_BYTES


NOTHING_SCALED = ScaledGradients(np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64))


class RamGroup:
    """As `StoreGroup`; see the module.

    Args:
      tables, features, num_hosts: as of `StoreKind.group`.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[PooledFeature], *, num_hosts: int) -> None:
        self._tables = tables
        self.held = list(dict.fromkeys(feature.table for feature in features))
        self._updates = TableUpdates(tables, self.held)
        rows = [_arrays_of(tables[feature.table])["rows"] for feature in features]
        self._rows = BlockLines().of(rows)[:, :2]
        self.dims = np.array([own.shape[1] for own in rows], np.int64)
        self._pooling = np.array([COMBINER_CODES[feature.pooling] for feature in features], np.int64)
        self._combiners = np.array([COMBINER_CODES[feature.combiner] for feature in features], np.int64)
        self._divided = [at for at, feature in enumerate(features) if feature.combiner != "sum"]
        # Features of one width are worked on by one call.
        self._of_dim: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for dim in np.unique(self.dims).tolist():
            own = np.flatnonzero(self.dims == dim)
            self._of_dim[dim] = own, self._rows[own], self._pooling[own]
        # Lists of bags as they are grouped: table by table, and of each table host by host.
        of_table: dict[int, list[int]] = {table: [] for table in self.held}
        for at, feature in enumerate(features):
            of_table[feature.table].append(at)
        order = [
            host * len(features) + at for table in self.held for host in range(num_hosts) for at in of_table[table]
        ]
        self._list_order = np.array(order, np.int64)
        self._firsts = np.cumsum([0, *(num_hosts * len(of_table[table]) for table in self.held)])

    def pool(self, asked: Sequence[np.ndarray], out: Sequence[np.ndarray], thread_pool: Threads) -> None:
        """As `StoreGroup.pool`."""
        all_asked, all_out = np.stack(asked, axis=1), np.stack(out, axis=1)
        self._check(all_asked, all_out)
        floats = all_asked[:, :, NUM_BAGS] * self.dims[:, None]
        aligned = (all_out[:, :, :2] % CACHE_LINE_BYTES == 0).all(axis=2)
        streams = (floats >= STREAMING_FLOATS) & aligned
        calls, total = [], 0
        for dim, (features, rows, pooling) in self._of_dim.items():
            # Feature by feature, since rows that one host's bags brought into the caches serve those of the others.
            every = len(features) == len(self.dims)
            bags, where, streamed = (
                (array if every else array[features]).reshape(len(features) * len(asked), *array.shape[2:])
                for array in (all_asked, all_out, streams)
            )
            sizes = (bags[:, NUM_IDS] + bags[:, NUM_BAGS]) * dim
            static = (rows, pooling) if len(asked) == 1 else (rows.repeat(len(asked), 0), pooling.repeat(len(asked)))
            calls += _calls(dim, (bags, *static, streamed, where[:, :2]), sizes, thread_pool)
            total += int(sizes.sum())
        thread_pool.run(calls, size=total)

    def group(
        self, asked: Sequence[np.ndarray], gradients: Sequence[np.ndarray], thread_pool: Threads
    ) -> tuple[GroupedTables, ScaledGradients]:
        """As `StoreGroup.group`."""
        bags, lines = np.stack(asked), np.stack(gradients)
        self._check(bags.swapaxes(0, 1), lines.swapaxes(0, 1))
        lists = np.concatenate([bags[:, :, : WEIGHTS + 1], lines[:, :, :2]], axis=2)
        scaled = self._scaled(bags)
        lists[*scaled.where.T, WEIGHTS + 1 :] = scaled.lines
        flat = lists.reshape(-1, lists.shape[2])[self._list_order]
        return group_together(self._tables, self.held, flat, self._firsts, thread_pool), scaled

    def _scaled(self, bags: np.ndarray) -> ScaledGradients:
        if not self._divided:
            return NOTHING_SCALED
        where = np.array([(host, at) for host in range(len(bags)) for at in self._divided])
        counts, dims = bags[*where.T, NUM_BAGS], self.dims[where[:, 1]]
        floats = -(-counts * dims // _LINE_FLOATS) * _LINE_FLOATS
        memory = aligned_empty((int(floats.sum()),))
        starts = memory.ctypes.data + _FLOAT_BYTES * (np.cumsum(floats) - floats)
        return ScaledGradients(where, np.stack([starts, _FLOAT_BYTES * dims], 1), memory)

    def scale(
        self,
        scaled: ScaledGradients,
        asked: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray],
        thread_pool: Threads,
    ) -> None:
        """As `StoreGroup.scale`."""
        calls, total = [], 0
        where = scaled.where
        if not len(where):
            return
        all_asked, all_gradients, dims = np.stack(asked), np.stack(gradients), self.dims[where[:, 1]]
        self._check(all_asked.swapaxes(0, 1), all_gradients.swapaxes(0, 1))
        for dim in self._of_dim:
            mine = np.flatnonzero(dims == dim)
            if len(mine):
                at = tuple(where[mine].T)
                bags, source = all_asked[at], all_gradients[at][:, :2]
                arguments = bags, source, self._combiners[at[1]], scaled.lines[mine]
                calls.append(partial(divide_gradients, dim, *arguments))
                total += 2 * dim * int(bags[:, NUM_BAGS].sum())
        thread_pool.run(calls, size=total)

    def _check(self, bags: np.ndarray, blocks: np.ndarray) -> None:
        """Of every feature and host, whether its block has one vector a bag, as wide as its table's rows."""
        if (blocks[:, :, 2] == bags[:, :, NUM_BAGS]).all() and (blocks[:, :, 3] == self.dims[:, None]).all():
            return
        found = blocks[:, :, 2:]
        expected = np.stack([bags[:, :, NUM_BAGS], np.broadcast_to(self.dims[:, None], bags.shape[:2])], axis=2)
        at = tuple(np.argwhere((found != expected).any(axis=2))[0].tolist())
        raise ValueError(
            f"Found a block of shape {tuple(found[at].tolist())} for feature {at[0]} of those pooled here. Expected "
            f"{tuple(expected[at].tolist())}: one vector a bag, as wide as a row. Pass the blocks of that batch."
        )

    def update(self, grouped: Mapping[int, GroupedRows], learning_rates: Sequence[float], thread_pool: Threads) -> None:
        """As `StoreGroup.update`."""
        self._updates.run(cast("GroupedTables", grouped), learning_rates, thread_pool)


def _arrays_of(table: Table) -> Mapping[str, np.ndarray]:
    """Rows and slots, where they lie."""
    return cast("RamStore", table.store).arrays


def _calls(dim: int, arguments: tuple[np.ndarray, ...], sizes: np.ndarray, thread_pool: Threads) -> list[partial[None]]:
    """Calls of `pool_tables` for the threads of a thread pool."""
    if thread_pool.num_threads == 1:
        return [partial(pool_tables, dim, *arguments)]
    bags, rows, combiners, streams, out = arguments
    calls = []
    for items, firsts, stops in cut_into_runs(bags[:, NUM_BAGS], sizes, thread_pool.num_threads):
        own, vectors = bags[items], out[items]
        own[:, SPLITS] += SPLIT_BYTES * firsts
        own[:, NUM_BAGS] = stops - firsts
        vectors[:, 0] += firsts * vectors[:, 1]
        calls.append(partial(pool_tables, dim, own, rows[items], combiners[items], streams[items], vectors))
    return calls


class GroupedTables(Mapping[int, GroupedRows]):
    """Touched rows of several tables, by the position of the table.

    Attributes:
      held: positions of the tables.
      lines: int64 `[t, 6]`, the same for kernels, as `GroupedEntries.lines`.
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
    bounds = np.array([[0, len(rows.rows), 0, len(rows.addresses), rows.addresses.ndim - 1]])
    return GroupedEntries(rows.rows, rows.starts, rows.addresses.reshape(-1), bounds)


def group_together(
    tables: Sequence[Table], held: Sequence[int], lists: np.ndarray, firsts: np.ndarray, thread_pool: Threads
) -> GroupedTables:
    """As `Table.group` for several tables; a large one is grouped by several threads, each with a part of its rows.

    Args:
      held: positions of the tables.
      lists: int64 `[p, 7]`, the lists of bags of one table after another, as `BagLists.lines`.
      firsts: int64 `[t + 1]`, where the lists of each table begin.

    Raises:
      ValueError: a row is not held here.
    """
    before = np.concatenate([[0], np.cumsum(lists[:, NUM_IDS])])
    sizes, total = np.diff(before[firsts]).tolist(), int(before[-1])
    scratch = np.array([tables[at].marks_line for at in held], np.int64).reshape(-1, 2)
    found: list[tuple[Sequence[int], GroupedEntries]] = []
    runs, shared = _runs(sizes, thread_pool.num_threads)

    def group(first: int, stop: int) -> None:
        own = lists[firsts[first] : firsts[stop]], firsts[first : stop + 1] - firsts[first]
        found.append((held[first:stop], group_tables(*own, *scratch[first:stop].T)))

    thread_pool.run([partial(group, *run) for run in runs], size=FLOATS_PER_ENTRY * total)
    for number, num_parts in shared.items():
        own = BagLists(lists[firsts[number] : firsts[number + 1]])
        rows = _group_in_parts(tables[held[number]], own, num_parts, thread_pool)
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


def _group_in_parts(table: Table, lists: BagLists, num_parts: int, thread_pool: Threads) -> GroupedRows:
    """One table, by several threads."""
    rows, addresses = lists.entries()
    found = [NO_ROWS] * num_parts

    def group(part: int) -> None:
        found[part] = table.group_part(rows, addresses, part, num_parts)

    thread_pool.run([partial(group, part) for part in range(num_parts)], size=FLOATS_PER_ENTRY * len(rows))
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
            # What an index keeps of each row comes behind the slots.
            trained = 1 + len(optimizer.slots)
            lines = [
                [matrix_of(array) for array in [*_arrays_of(tables[held[number]]).values()][:trained]] for number in own
            ]
            matrices = np.array(lines, np.int64).reshape(len(own), -1)
            self._sets.append(
                _RuleSet(optimizer, dim, np.array([held[number] for number in own]), np.array(own), matrices)
            )

    def run(self, grouped: GroupedTables, learning_rates: Sequence[float], thread_pool: Threads) -> None:
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
                calls += one.calls(some, lines if len(some) == len(lines) else lines[some], rate, thread_pool)
            total += int(one.sizes(lines).sum())
        thread_pool.run(calls, size=total)
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

    def calls(
        self, some: np.ndarray, lines: np.ndarray, learning_rate: float, thread_pool: Threads
    ) -> list[partial[None]]:
        """For the threads of a thread pool."""
        rule = self.optimizer.table_rule(learning_rate)
        if thread_pool.num_threads == 1:
            matrices = self.matrices if len(some) == len(self.matrices) else self.matrices[some]
            return [partial(rule, self.dim, matrices, lines)]
        calls = []
        for items, firsts, stops in cut_into_runs(lines[:, NUM_ROWS], self.sizes(lines), thread_pool.num_threads):
            own = lines[items]
            own[:, ROWS] += ROW_BYTES * firsts
            own[:, STARTS] += START_BYTES * firsts
            own[:, NUM_ROWS] = stops - firsts
            calls.append(partial(rule, self.dim, self.matrices[some[items]], own))
        return calls
