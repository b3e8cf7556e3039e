"""What one host writes of a checkpoint and reads back: its buckets of every table, and its replica of the dense state.

How a bucket becomes files is `workers.checkpoint.files`' business, and whether an attempt counts is the driver's. This
module only goes over the buckets that this host owns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np

from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint import files as checkpoint_files
from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import (
    ArrayFiles,
    BucketReceipt,
    TableFiles,
    TablePlan,
    WrittenBuckets,
)
from podembed.workers.checkpoint.chunks import chunk_bytes
from podembed.workers.checkpoint.deltas import DeltaFiles, DeltaPart, PartWriter, read_part
from podembed.workers.checkpoint.digest import Digests
from podembed.workers.checkpoint.file_threads import FileThreads
from podembed.workers.checkpoint.files import split_buckets
from podembed.workers.checkpoint.spoilt_rows import SpoiltRows, require_numbers
from podembed.workers.storage.store import Store


class CheckpointMismatch(ValueError):
    """A commit's tables are not those of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard:
    """One host's part of one table.

    Attributes:
      arrays: describes the whole table, on the host that wrote its metadata.
      buckets: all that are held here, with their chunks, or, where only changed rows were written, their digests alone.
      buckets_per_file: number of buckets in a file; the same on all hosts.
      parts: the changed rows.
    """

    table: str
    arrays: tuple[ArrayFiles, ...] = ()
    buckets: WrittenBuckets
    buckets_per_file: int = 1
    parts: tuple[DeltaPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """All that a host wrote.

    Attributes:
      tables: one entry a table; none if the save was not written to its end.
      is_delta: changed rows alone.
      spoilt: rows that hold no numbers, for which the save was given up.
    """

    tables: tuple[TableShard, ...]
    is_delta: bool = False
    spoilt: SpoiltRows | None = None

    @property
    def digests(self) -> dict[tuple[str, int], str]:
        """(Table, bucket) → its digest."""
        return {
            (shard.table, bucket): digest
            for shard in self.tables
            for bucket, digest in zip(shard.buckets.buckets, shard.buckets.digests, strict=True)
        }


class BucketView(Protocol):
    """The rows of a host at one moment. Asked bucket by bucket, rising, by one thread."""

    def values(self, table: Table, bucket: int, count: int = 1) -> Sequence[np.ndarray]:
        """Rows and slots of `count` buckets in a row, each `[count * rows_per_bucket, width]`; valid until they are
        given to `done`, which may be waited for here.
        """
        ...

    def done(self, values: Sequence[np.ndarray]) -> None:
        """Takes back an answer of `values`. From any thread."""
        ...


class FrozenView(BucketView, Protocol):
    """A view that also knows which rows changed since the commit before."""

    def changed(self, table: Table, bucket: int) -> np.ndarray:
        """Positions of changed rows, int64, rising."""
        ...

    def digest_before(self, table: Table, bucket: int) -> str:
        """The bucket's digest in the commit before."""
        ...

    def skip(self, table: Table, bucket: int) -> None:
        """The bucket's values are not needed."""
        ...


def table_plan(spec: TableSpec, attempt: str, *, buckets_per_file: int = 1) -> TablePlan:
    """The arrays that an attempt writes for a table."""
    return TablePlan(
        attempt=attempt,
        name=spec.name,
        num_rows=spec.num_rows,
        num_buckets=spec.layout.num_buckets,
        widths=spec.stored_widths,
        dtypes=spec.keys.columns,
        buckets_per_file=buckets_per_file,
    )


def write_shard(
    store: Store,
    tables: Iterable[Table],
    attempt: str,
    *,
    is_first: bool,
    view: BucketView,
    threads: FileThreads,
    on_chunk: Callable[[], None],
    buckets_per_file: Mapping[str, int] = MappingProxyType({}),
) -> ShardReceipt:
    """Writes this host's buckets below `data/<attempt>`, table by table, buckets rising. Durable when it returns.

    Args:
      is_first: whether this host also writes the arrays' metadata.
      view: rows and slots of each bucket; several may be requested before the first is done.
      threads: write buckets.
      on_chunk: called whenever the buckets of a file have been handed to a thread.
      buckets_per_file: number of each table; 1 where it is missing. All buckets of a file must be held here.

    Raises:
      KeyError: they are not.
      StorageError: the storage failed, or the attempt has been written already. No thread is at work any more.
      RowsSpoilt: a row or slot is no number any more; what was written is of no use.
    """

    def write(plan: TablePlan, bucket: int, values: Sequence[np.ndarray], spec: TableSpec) -> BucketReceipt:
        with threads.writes():
            try:
                stored = spec.stored(values)
                pieces = zip(*(split_buckets(value, plan.rows_per_bucket) for value in stored), strict=True)
                # Before the write: a state with such rows must not even look like a part of a commit.
                for at, piece in enumerate(pieces):
                    require_numbers(plan, bucket + at, piece)
                return checkpoint_files.write_buckets(store, plan, bucket, stored)
            finally:
                # Inside the block, which may end with a wait for the disk.
                view.done(values)

    def describe(plan: TablePlan) -> tuple[ArrayFiles, ...]:
        with threads.writes():
            return checkpoint_files.write_table_metadata(store, plan)

    written = []
    for table in tables:
        count = buckets_per_file.get(table.spec.name, 1)
        plan = table_plan(table.spec, attempt, buckets_per_file=count)
        described = threads.submit(partial(describe, plan)) if is_first else None
        receipts = []
        for bucket in map(int, table.buckets[::count]):
            # Waits for a free staging buffer, so the threads bound what is copied ahead.
            values = view.values(table, bucket, count)
            receipts.append(threads.submit(partial(write, plan, bucket, values, table.spec)))
            on_chunk()
        written.append((plan, described, receipts))
    # Durable before the receipt exists: the driver publishes what receipts name.
    threads.finish()
    return ShardReceipt(
        tables=tuple(
            TableShard(
                table=plan.name,
                arrays=described.result() if described else (),
                buckets=WrittenBuckets.of(plan, [receipt.result() for receipt in receipts]),
                buckets_per_file=plan.buckets_per_file,
            )
            for plan, described, receipts in written
        )
    )


def write_shard_delta(
    store: Store,
    tables: Iterable[Table],
    attempt: str,
    *,
    view: FrozenView,
    threads: FileThreads,
    on_chunk: Callable[[], None],
) -> ShardReceipt:
    """Writes this host's rows that changed since the commit before, below `data/<attempt>`. Arguments as `write_shard`.

    Raises:
      StorageError, RowsSpoilt: as `write_shard`.
    """

    def digest(plan: TablePlan, bucket: int, values: Sequence[np.ndarray], spec: TableSpec) -> str:
        try:
            require_numbers(plan, bucket, spec.stored(values))
            return checkpoint_files.digest_of(plan, bucket, values)
        finally:
            view.done(values)

    written = []
    for table in tables:
        plan = table_plan(table.spec, attempt)
        writer = PartWriter(store, plan.folder, list(plan.widths), threads)
        digests: list[Future[str] | str] = []
        for bucket in map(int, table.buckets):
            positions = view.changed(table, bucket)
            if len(positions):
                values = view.values(table, bucket)
                # A copy: the buffer goes back as soon as the digest is there, and the part is written later.
                changed = [value[positions] for value in table.spec.stored(values)]
                digests.append(threads.submit(partial(digest, plan, bucket, values, table.spec)))
                writer.add(bucket, plan.layout.ids_of(bucket, positions), changed)
            else:
                view.skip(table, bucket)
                digests.append(view.digest_before(table, bucket))
            on_chunk()
        written.append((table, plan, writer.finish(), digests))
    threads.finish()
    return ShardReceipt(
        tables=tuple(
            TableShard(
                table=plan.name,
                buckets=WrittenBuckets(
                    folder=plan.folder,
                    firsts=table.buckets.astype("<i4").tobytes(),
                    digests=Digests.of(one if isinstance(one, str) else one.result() for one in digests),
                ),
                parts=parts,
            )
            for table, plan, parts, digests in written
        ),
        is_delta=True,
    )


def read_shard(
    store: Store,
    tables: Sequence[Table],
    files: Sequence[TableFiles],
    *,
    on_chunk: Callable[[], None],
    wanted: Sequence[Collection[int]] | None = None,
) -> int:
    """Fills the buckets of this host from a commit; every chunk and every bucket's digest is verified.

    Args:
      wanted: per table the buckets to fill; None for all that are held here.

    Returns:
      How many bytes were read.

    Raises:
      CheckpointMismatch: the commit has other tables, or the same with other shapes or slots, but for fewer rows of a
        table whose capacity was raised.
      ChunkDamaged: a file is missing or is not what was committed.
    """
    by_name = {entry.name: entry for entry in files}
    names = [table.spec.name for table in tables]
    if set(names) != set(by_name):
        raise CheckpointMismatch(
            f"Found tables {sorted(by_name)} in the commit. Expected {sorted(names)}, as the job declares. Resume with "
            "the tables of the run, or begin a new run."
        )
    num_bytes = 0
    with FileThreads(store) as threads:
        for at, table in enumerate(tables):
            entry = by_name[table.spec.name]
            check_table(table.spec, entry)
            buckets = {*map(int, table.buckets if wanted is None else wanted[at])}
            # Buckets that have more rows now do not lie one behind the other as in a file.
            together = entry.buckets_per_file if entry.rows_per_bucket == table.spec.layout.rows_per_bucket else 1
            for bucket, count in _whole_files(buckets, together):
                out = [values[: count * entry.rows_per_bucket] for values in _emptied(table, bucket, count, entry)]
                threads.submit(partial(checkpoint_files.read_file_buckets, store, entry, bucket, out=out))
                on_chunk()
            num_bytes += len(buckets) * sum(chunk_bytes(entry.metadata(array)) for array in entry.arrays)
            if entry.deltas:
                num_bytes += _apply_deltas(store, table, entry, buckets, threads, on_chunk)
        threads.finish()
    return num_bytes


def _emptied(table: Table, bucket: int, count: int, entry: TableFiles) -> list[np.ndarray]:
    """Rows and slots of some buckets, with nothing in the rows that the commit does not have."""
    out = table.spec.stored(table.bucket(bucket, count))
    for values in out:
        values[count * entry.rows_per_bucket :] = 0
    return out


def _whole_files(buckets: set[int], buckets_per_file: int) -> Iterator[tuple[int, int]]:
    """First bucket and number of buckets of what is read at once, rising: a whole file, or one bucket of it."""
    for first in sorted({bucket - bucket % buckets_per_file for bucket in buckets}):
        in_file = range(first, first + buckets_per_file)
        if buckets.issuperset(in_file):
            yield first, buckets_per_file
        else:
            yield from ((bucket, 1) for bucket in in_file if bucket in buckets)


def _apply_deltas(
    store: Store,
    table: Table,
    entry: TableFiles,
    held: set[int],
    threads: FileThreads,
    on_chunk: Callable[[], None],
) -> int:
    """Every part with one of these buckets is read once, oldest commit first; then the digests tell whether all came
    out right.

    Returns:
      How many bytes were read.
    """
    num_bytes = 0

    def apply(delta: DeltaFiles, part: DeltaPart) -> None:
        changes = read_part(store, part, num_buckets=entry.num_buckets, num_positions=entry.rows_per_bucket)
        with checkpoint_files.naming_changes(entry, delta, part):
            for bucket, positions, values in changes:
                if bucket in held:
                    for array, value in zip(table.spec.stored(table.bucket(bucket)), values, strict=True):
                        array[positions] = value

    for delta in entry.deltas:
        # What it replaces is there before; its own parts have no bucket in common.
        threads.finish()
        for part in delta.parts:
            if not held.isdisjoint(part.buckets):
                threads.submit(partial(apply, delta, part))
                num_bytes += sum(file.size_bytes for file in part.files)
                on_chunk()
    threads.finish()
    for bucket in held:
        values = list(table.bucket(bucket).values())
        threads.submit(partial(checkpoint_files.check_digest, entry, bucket, values))
    return num_bytes


def check_table(spec: TableSpec, entry: TableFiles) -> None:
    """Compares a commit's table with the job's.

    Raises:
      CheckpointMismatch: they have other rows, buckets, widths or slots. A table whose keys come and go may have more
        rows than the commit, in the same buckets.
    """
    found = (entry.num_rows, entry.num_buckets, {array.name: array.width for array in entry.arrays})
    expected = (spec.num_rows, spec.layout.num_buckets, spec.stored_widths)
    has_grown = entry.is_dynamic and entry.num_rows < spec.num_rows
    if found[has_grown:] != expected[has_grown:]:
        raise CheckpointMismatch(
            f"Table '{spec.name}': found rows, buckets and widths {found} in the commit. Expected {expected}, as the "
            "job declares. Resume with the table and the optimizer of the run, or begin a new run."
        )


def write_dense(
    store: Store,
    attempt: str,
    arrays: Mapping[str, np.ndarray],
    *,
    before_each: Callable[[np.ndarray], None] = lambda values: None,
) -> tuple[DenseFile, ...]:
    """Writes every leaf of the dense state. Durable when it returns.

    Args:
      before_each: called before a leaf is handed to a thread; may wait.
    """

    def write(key: str, values: np.ndarray) -> DenseFile:
        with threads.writes():
            return checkpoint_files.write_dense(store, attempt, key, values)

    with FileThreads(store) as threads:
        files = []
        for key, values in arrays.items():
            before_each(values)
            files.append(threads.submit(partial(write, key, values)))
        threads.finish()
        return tuple(file.result() for file in files)


def read_dense(store: Store, files: Sequence[DenseFile]) -> dict[str, np.ndarray]:
    """Reads and verifies every leaf of the dense state."""
    with FileThreads(store) as threads:
        read = {file.key: threads.submit(partial(checkpoint_files.read_dense, store, file)) for file in files}
        threads.finish()
        return {key: values.result() for key, values in read.items()}
