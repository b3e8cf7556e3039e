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
from podembed.embedding.kernels.grouped import FLOATS_PER_ENTRY, RowEntries
from podembed.embedding.row_optimizers.row_step import TouchedRows
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


def group_together(
    tables: Sequence[Table],
    entries: Mapping[int, Callable[[], RowEntries]],
    sizes: Mapping[int, int],
    crew: Crew,
) -> dict[int, GroupedRows]:
    """As `Table.group` for several tables; a large one is grouped by several threads, each with a part of its rows.

    Args:
      entries: by position of the table, makes what is to be grouped.
      sizes: by position of the table, how many they are.
    """
    total = sum(sizes.values())
    num_parts = {at: _num_parts(size, total, crew.num_threads) for at, size in sizes.items()}
    made: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    found: dict[int, list[GroupedRows]] = {}

    def make(at: int) -> None:
        own = entries[at]()
        if num_parts[at] == 1:
            found[at] = [tables[at].group(own)]
        else:
            made[at] = own.rows, own.addresses()
            # A place for each part.
            found[at] = [NO_ROWS] * num_parts[at]

    def group(at: int, part: int) -> None:
        found[at][part] = tables[at].group_part(*made[at], part, num_parts[at])

    def join(at: int) -> None:
        found[at] = [GroupedRows.joined(found[at])]

    crew.run([partial(make, at) for at in entries], size=FLOATS_PER_ENTRY * total)
    if made:
        calls = [partial(group, at, part) for at in made for part in range(num_parts[at])]
        crew.run(calls, size=FLOATS_PER_ENTRY * total)
        crew.run([partial(join, at) for at in made], size=FLOATS_PER_ENTRY * total)
    return {at: found[at][0] for at in entries}


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
