"""`Table`: rows and slots of the buckets of one table that this host holds.

Mutable state: the store, changed by `initialize`, `update` and through the views of `bucket`; a small scratch for
`update`. The rows of a bucket are contiguous, so a bucket is one copy; `row_index` says which row an id has. Which host
holds which bucket is decided elsewhere. Not safe for two threads to update at once.

`pool_in_parallel` and `update_in_parallel` work on several tables, whatever their stores, cut into parts for the
threads of a pool. Bags are cut into runs, since each has a vector of its own. Touched rows are cut into runs, since
each is there once: one thread sums the gradients of a row, in the order that `Table.touch` found. Nothing else is
shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from podembed.embedding.initializers import FillRows, row_source, table_seed
from podembed.embedding.kernels.arrays import can_stream, mapped_zeros, plain, row_addresses
from podembed.embedding.kernels.grouped import FLOATS_PER_ENTRY, group_by_row, select_part
from podembed.embedding.kernels.ids import chain_all_rows, merge
from podembed.embedding.kernels.many_tables import BagLists, group_bags
from podembed.embedding.kernels.requests import mark_rows
from podembed.embedding.kernels.threads import Threads, cut
from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.row_optimizers.row_step import TouchedRows
from podembed.embedding.table.stores.ram import RAM
from podembed.embedding.table.stores.store import GroupedRows, RowStore, StoreKind
from podembed.embedding.table_spec import TableSpec

# Of a table whose first values are read in order.
_PART_BYTES = 16 << 20


class Table:
    """One host's part of one table.

    Args:
      spec: of the whole table.
      buckets: int64 `[k]`, the bucket numbers held here, rising; may be empty.

    Attributes:
      store: rows and slots, zero until `initialize` or a restore.
      stores: the kind of the store.
      index: which local row an id has.
      before_change: called with the local rows (int64, may repeat) that an update is about to change, if set. What it
        raises leaves the table unchanged.
      updates_alone: whether its updates, and those of all tables beside it, go by `update_grouped`, one after another.

    Raises:
      ValueError: the buckets are not rising bucket numbers of the table.
    """

    def __init__(self, spec: TableSpec, buckets: np.ndarray) -> None:
        self.spec = spec
        self.buckets = np.asarray(buckets, np.int64).reshape(-1)
        _check_buckets(spec, self.buckets)
        self._number_here = {int(bucket): number for number, bucket in enumerate(self.buckets)}
        self.stores: StoreKind = spec.stores or RAM
        num_spare = 2 * spec.keys.num_spare if len(self.buckets) else 0
        self.store: RowStore = self.stores.new(spec.widths, self.num_rows, num_spare)
        # One number a row: a mark of `merge`, or, for an optimizer that touches all rows, the head of the row's chain.
        num_marks = self.num_rows + num_spare
        self._marks = mapped_zeros((num_marks,)).view(np.int32) if num_spare else np.zeros(num_marks, np.int32)
        self._room = _Room(0)
        self._source: FillRows | None = None
        self.before_change: Callable[[np.ndarray], None] | None = None
        self.updates_alone = False
        self.index = spec.keys.index(self, spec.layout)

    @property
    def num_rows(self) -> int:
        """Rows held here, padding included."""
        return len(self.buckets) * self.spec.layout.rows_per_bucket

    @property
    def size_bytes(self) -> int:
        """Bytes of rows and slots."""
        return self.store.size_bytes

    @property
    def rows(self) -> np.ndarray:
        """float32 `[num_rows, dim]`, the rows themselves; programs read and write through `store`."""
        return self.store.view(0, self.num_rows)["rows"]

    @property
    def slots(self) -> dict[str, np.ndarray]:
        """Name of each slot to float32 `[num_rows, dim or 1]`, the slots themselves."""
        return {name: array for name, array in self.store.view(0, self.num_rows).items() if name != "rows"}

    def initialize(self, on_part: Callable[[], None] = lambda: None) -> None:
        """Gives every row its first value and every slot its initial value; padding rows become zero.

        Args:
          on_part: called after each bucket, and after each part of rows that are read in order.
        """
        spec = self.spec
        fill = row_source(spec.initializer, seed=spec.seed, table_name=spec.name, num_rows=spec.num_rows, dim=spec.dim)
        # Rows of a bucket lie far apart in a file.
        in_order = getattr(spec.initializer, "reads_in_order", False)
        for bucket in self.buckets:
            ids, held = self.index.first_keys(int(bucket)), self.bucket(int(bucket))
            if not in_order:
                fill(ids, held["rows"][: len(ids)])
            held["rows"][len(ids) :] = 0
            for slot in () if spec.optimizer is None else spec.optimizer.slots:
                held[slot.name][...] = slot.initial_value
            for name in spec.keys.columns:
                held[name][...] = 0
            on_part()
        if in_order and len(self.buckets):
            self._fill_in_order(fill, on_part)

    @property
    def table_seed(self) -> int:
        """As `KeyedRows.table_seed`."""
        return table_seed(self.spec.seed, self.spec.name)

    def deciding_step(self, training_step: int | None) -> int | None:
        """The step in which keys may get a row: none where the table is frozen, or nothing is trained."""
        return None if self.spec.optimizer is None else training_step

    def in_place(self) -> dict[str, np.ndarray]:
        """As `KeyedRows.in_place`."""
        return self.store.view(0, self.num_rows)

    def begin_rows(self, rows: np.ndarray, keys: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """As `KeyedRows.begin_rows`."""
        spec = self.spec
        first = np.empty((len(rows), spec.dim), np.float32)
        self._fill(keys, first)
        slots = () if spec.optimizer is None else spec.optimizer.slots
        shapes = {slot.name: (len(rows), slot.columns(spec.dim)) for slot in slots}
        starts = {slot.name: np.full(shapes[slot.name], slot.initial_value, np.float32) for slot in slots}
        self.set_columns(rows, {"rows": first, **starts, **columns})

    def set_columns(self, rows: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """As `KeyedRows.set_columns`."""
        self.announce(rows)
        self.store.write(rows, columns)

    def spare_rows(self, half: int, keys: np.ndarray | None) -> np.ndarray:
        """As `KeyedRows.spare_rows`."""
        spec, num_spare = self.spec, self.spec.keys.num_spare
        count = 1 if keys is None else len(keys)
        if count > num_spare:
            raise ValueError(
                f"Found {count:,} keys without a row in one step of table '{spec.name}', on one host. Expected at most "
                f"{num_spare:,}, since each is given its first value. Set default='zeros' or 'shared', or make batches "
                "smaller."
            )
        rows = np.arange(count) + (self.num_rows + half * num_spare)
        values = np.zeros((count, spec.dim), np.float32)
        if keys is not None:
            self._fill(keys, values)
        self.store.write(rows, {"rows": values})
        return rows

    def _fill(self, keys: np.ndarray, out: np.ndarray) -> None:
        """First values of rows."""
        if self._source is None:
            spec = self.spec
            self._source = row_source(
                spec.initializer, seed=spec.seed, table_name=spec.name, num_rows=spec.num_rows, dim=spec.dim
            )
        self._source(keys, out)

    def bucket_places(self, rows: np.ndarray) -> np.ndarray:
        """Which of the buckets held here each local row lies in, from 0."""
        return rows // self.spec.layout.rows_per_bucket

    def _fill_in_order(self, fill: FillRows, on_part: Callable[[], None]) -> None:
        """Fills the rows held here, some megabytes of the whole table at a time."""
        count = max(1, _PART_BYTES // (4 * self.spec.dim))
        for first in range(0, self.spec.num_rows, count):
            ids = np.arange(first, min(first + count, self.spec.num_rows))
            local_rows = self.index.rows_of(ids)
            is_here = local_rows >= 0
            if is_here.any():
                values = np.empty((int(is_here.sum()), self.spec.dim), np.float32)
                fill(ids[is_here], values)
                self.store.write(local_rows[is_here], {"rows": values})
            on_part()

    def bucket(self, bucket: int, count: int = 1) -> dict[str, np.ndarray]:
        """Views of a bucket: "rows" and each slot, `[rows_per_bucket, width]`, contiguous. Writing to them changes the
        table. With `count` those of so many buckets in a row, one behind the other.

        Raises:
          KeyError: a bucket is not held here.
        """
        start = self.first_row(bucket, count)
        return self.store.view(start, start + count * self.spec.layout.rows_per_bucket)

    def first_row(self, bucket: int, count: int = 1) -> int:
        """The local row at which a bucket begins, and with it those of `count` buckets in a row.

        Raises:
          KeyError: a bucket is not held here.
        """
        number, last = self._number_here.get(bucket), self._number_here.get(bucket + count - 1)
        # Numbers of held buckets rise, so all between the two are held if there are as many.
        if number is None or last is None or last - number != count - 1:
            raise KeyError(
                f"Found bucket {bucket} of table '{self.spec.name}' asked of a host that holds {len(self.buckets)} "
                "others. "
                "Expected one of Table.buckets. Ask its owner in the placement."
            )
        return number * self.spec.layout.rows_per_bucket

    def gather(self, local_rows: np.ndarray, out: np.ndarray) -> None:
        """Copies rows (int64 `[n]`) to `out` (float32 `[n, dim]`).

        Raises:
          ValueError: a row is not held here.
        """
        self.store.gather(local_rows, out)

    def gather_to(self, local_rows: np.ndarray, addresses: np.ndarray) -> None:
        """Copies rows (int64 `[n]`) to addresses (int64 `[n]`), room for `dim` float32 side by side at each.

        Raises:
          ValueError: a row is not held here.
        """
        self.store.gather_to(local_rows, addresses)

    def update(
        self,
        local_rows: np.ndarray | Sequence[np.ndarray],
        gradients: np.ndarray | Sequence[np.ndarray],
        learning_rate: float,
    ) -> None:
        """Applies one step of the table's optimizer.

        Takes one array each, or one for each host, in host order; then the gradients are read where they lie. A row may
        occur several times, once for each host that used it: its gradients are summed in the order given and applied
        once, or, with `use_gradient_accumulation=False`, applied one after another. With an optimizer that touches all
        rows, call it in every step, even without any gradient.

        Args:
          local_rows: int64 `[m]`.
          gradients: float32 `[m, dim]`, columns side by side.
          learning_rate: of this step.

        Raises:
          ValueError: a row is not held here, shapes do not fit, or the table has no optimizer. Nothing has changed
            then.
        """
        row_parts = [local_rows] if isinstance(local_rows, np.ndarray) else list(local_rows)
        gradient_parts = [gradients] if isinstance(gradients, np.ndarray) else list(gradients)
        expected = [(len(part), self.spec.dim) for part in row_parts]
        if [part.shape for part in gradient_parts] != expected:
            raise ValueError(
                f"Found gradients of shapes {[part.shape for part in gradient_parts]} for table '{self.spec.name}'. "
                f"Expected {expected}. Send one gradient per row."
            )
        rows = row_parts[0] if len(row_parts) == 1 else np.concatenate([*row_parts, np.empty(0, np.int64)])
        self.update_at(plain(rows, np.int64), row_addresses(gradient_parts, self.spec.dim), learning_rate)

    def update_at(self, local_rows: np.ndarray, addresses: np.ndarray, learning_rate: float) -> None:
        """The same for gradients that lie anywhere.

        Args:
          local_rows: int64 `[m]`.
          addresses: int64 `[m]`, of each gradient: `dim` float32 side by side. The caller keeps them alive.
          learning_rate: of this step.

        Raises:
          ValueError: a row is not held here, or the table has no optimizer. Nothing has changed then.
        """
        touched = self.touch(local_rows)
        self.announce(touched.rows)
        self.update_run(touched, addresses, learning_rate, 0, len(touched.rows))

    def group(self, lists: BagLists) -> GroupedRows:
        """Prepares an update in which rows have many gradients each.

        Args:
          lists: the bags that have gradients.

        Raises:
          ValueError: a row is not held here.
        """
        return GroupedRows(*group_bags(lists, self._marks).of(0))

    @property
    def marks_line(self) -> tuple[int, int]:
        """How long the scratch of `kernels.many_tables.group_tables` is, and where it lies."""
        return len(self._marks), self._marks.ctypes.data

    def group_part(self, rows: np.ndarray, addresses: np.ndarray, part: int, num_parts: int) -> GroupedRows:
        """As `group`, of one part of the rows. A thread may group each part.

        Args:
          rows: int32 `[m]`, of all entries.
          addresses: int64 `[m]`, of the gradient of each.
          part, num_parts: which rows: those of one part of a power of two.
        """
        own_rows, own_addresses = np.empty_like(rows), np.empty_like(addresses)
        count = select_part(rows, addresses, part, num_parts, own_rows, own_addresses)
        return GroupedRows(*group_by_row(own_rows[:count], own_addresses[:count], self._marks))

    def update_grouped(self, grouped: GroupedRows, learning_rate: float) -> None:
        """Applies one step of the table's optimizer, once a row. The gradients must lie where `group` says.

        Raises:
          ValueError: the table has no optimizer, or one that this does not serve.
        """
        self.begin_update(grouped)
        self.update_run(grouped.touched, grouped.addresses, learning_rate, 0, len(grouped.rows))

    def begin_update(self, grouped: GroupedRows) -> None:
        """The first part of `update_grouped`: nothing changes yet."""
        optimizer = self.spec.optimizer
        if optimizer is None or optimizer.touches_all_rows or not optimizer.use_gradient_accumulation:
            raise ValueError(
                f"Table '{self.spec.name}' has optimizer {optimizer!r}. Expected one that updates each touched row "
                "once. Use Table.update."
            )
        self.announce(grouped.rows)

    def touch(self, local_rows: np.ndarray) -> TouchedRows:
        """The first part of `update_at`: finds which gradients belong to which row. What it returns is used up before
        the next call.

        Raises:
          As `update_at`.
        """
        optimizer = self.spec.optimizer
        if optimizer is None:
            raise ValueError(
                f"Table '{self.spec.name}' has no optimizer. Expected one to train it. Set TableConfig.optimizer."
            )
        return self._touched(optimizer, local_rows)

    def announce(self, local_rows: np.ndarray) -> None:
        """Says that rows are about to change: before any `update_run` of them, by the thread that owns the table."""
        # Read once: another thread may take it away meanwhile.
        before_change = self.before_change
        if before_change is not None:
            before_change(local_rows)

    @property
    def can_be_cut(self) -> bool:
        """Whether several threads may be in `update_run` at once, each with a run of the touched rows."""
        optimizer = self.spec.optimizer
        # Without accumulation a row is there several times, and its updates have an order.
        return optimizer is not None and optimizer.is_compiled and optimizer.use_gradient_accumulation

    def update_run(
        self, touched: TouchedRows, addresses: np.ndarray, learning_rate: float, first: int, stop: int
    ) -> None:
        """The last part of an update, for some of the touched rows, from `first` to `stop - 1`."""
        if self.spec.optimizer is not None:
            self.store.update(self.spec.optimizer, touched.run(first, stop), addresses, learning_rate)

    @contextmanager
    def marked(self, local_rows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Lends int32 `[num_rows]` that is not 0 at the given rows, until the block ends.

        Args:
          local_rows: int64 arrays of rows held here. The table's optimizer must not touch all rows, and nothing else of
            the table may be called inside.

        Raises:
          ValueError: a row is not held here.
        """
        for rows in local_rows:
            mark_rows(rows, self._marks, 1)
        yield self._marks
        for rows in local_rows:
            mark_rows(rows, self._marks, 0)

    def _touched(self, optimizer: Optimizer, local_rows: np.ndarray) -> TouchedRows:
        count = len(local_rows)
        if self._room.size < count:
            self._room = _Room(count + count // 4)
        room = self._room
        if optimizer.touches_all_rows and self.index.is_dynamic:
            return self._all_existing(local_rows, room)
        if optimizer.touches_all_rows:
            chain_all_rows(local_rows, self._marks, room.following)
            return TouchedRows(
                rows=np.arange(self.num_rows, dtype=np.int64), head=self._marks, following=room.following
            )
        num_unique = merge(local_rows, self._marks, room.unique, room.head, room.following)
        if not optimizer.use_gradient_accumulation:
            # Each entry is a row of its own; the merge has only checked them.
            room.following[:count] = -1
            return TouchedRows(rows=local_rows, head=np.arange(count, dtype=np.int32), following=room.following)
        return TouchedRows(rows=room.unique[:num_unique], head=room.head[:num_unique], following=room.following)

    def _all_existing(self, local_rows: np.ndarray, room: _Room) -> TouchedRows:
        """As `touch`, of an optimizer that touches all rows, where some do not exist yet."""
        # All spare rows count as the first one.
        heads = self._marks[: self.num_rows + 1]
        chain_all_rows(np.minimum(local_rows, self.num_rows), heads, room.following)
        rows = self.index.existing_rows
        return TouchedRows(rows=rows, head=heads[rows], following=room.following)


class _Room:
    """Scratch for merging up to `size` rows; replaced by a larger one when a step needs it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.unique = np.empty(size, np.int64)
        self.head = np.empty(size, np.int32)
        self.following = np.empty(size, np.int32)


def kind_of(tables: Sequence[Table]) -> StoreKind:
    """Where the rows of all tables of a job lie.

    Raises:
      ValueError: they lie in stores of several kinds.
    """
    kinds = [table.stores for table in tables] or [RAM]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            f"Found tables in stores of several kinds: {list(dict.fromkeys(map(repr, kinds)))}. Expected one kind for "
            "all tables of a job, since a step works on many tables at once. Give all of them the same stores."
        )
    return kinds[0]


def _check_buckets(spec: TableSpec, buckets: np.ndarray) -> None:
    rising = bool((np.diff(buckets) > 0).all())
    if not rising or (len(buckets) and not 0 <= buckets[0] <= buckets[-1] < spec.layout.num_buckets):
        raise ValueError(
            f"Found buckets {buckets.tolist()[:8]} of table '{spec.name}'. Expected rising numbers from 0 to "
            f"{spec.layout.num_buckets - 1}. Pass np.flatnonzero(owner == this_host)."
        )


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


def pool_in_parallel(poolings: Sequence[Pooling], thread_pool: Threads) -> None:
    """Combines all bags of several features."""
    sizes = [pooling.size for pooling in poolings]
    parts = cut([pooling.num_bags for pooling in poolings], sizes, thread_pool.num_threads)
    calls = [partial(poolings[item].run, first, stop) for item, first, stop in parts]
    thread_pool.run(calls, size=sum(sizes))


def update_in_parallel(
    tables: Sequence[Table],
    rows: Mapping[int, tuple[np.ndarray, np.ndarray]],
    learning_rates: Sequence[float],
    thread_pool: Threads,
) -> None:
    """As `Table.update_at` for every table.

    Args:
      rows: by position of the table, local rows and addresses of their gradients.
      learning_rates: one a table.
    """
    if thread_pool.num_threads == 1:
        for at, (local_rows, addresses) in rows.items():
            tables[at].update_at(local_rows, addresses, learning_rates[at])
        return
    touched: dict[int, TouchedRows] = {}

    def touch(at: int) -> None:
        touched[at] = tables[at].touch(rows[at][0])

    num_rows = sum(len(local_rows) for local_rows, _ in rows.values())
    thread_pool.run([partial(touch, at) for at in rows], size=FLOATS_PER_ENTRY * num_rows)
    for at in rows:
        tables[at].announce(touched[at].rows)
    _run([_Update(tables[at], touched[at], rows[at][1], learning_rates[at]) for at in rows], thread_pool)


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


def _run(updates: Sequence[_Update], thread_pool: Threads) -> None:
    shared = [update for update in updates if update.table.can_be_cut]
    sizes = [update.size for update in shared]
    parts = cut([len(update.touched.rows) for update in shared], sizes, thread_pool.num_threads)
    thread_pool.run([partial(shared[item].run, first, stop) for item, first, stop in parts], size=sum(sizes))
    for update in updates:
        if not update.table.can_be_cut:
            update.run(0, len(update.touched.rows))
