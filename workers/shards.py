"""What one host writes of a checkpoint and reads back: its buckets of every table, and its replica of the dense state.

How a bucket becomes files is `workers.checkpoint_files`' business, and whether an attempt counts is the driver's; this module only goes
over the buckets that this host owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from embedding.table import Table
from embedding.table_spec import TableSpec
from workers import checkpoint_files
from workers.checkpoint_files import ArrayFiles, BucketReceipt, DeltaPart, DenseFile, TableFiles, TablePlan
from workers.delta_files import PartWriter, read_part
from workers.storage import Store

__all__ = [
    "CheckpointMismatch",
    "DenseFile",
    "FrozenView",
    "ShardReceipt",
    "TableFiles",
    "read_dense",
    "read_shard",
    "table_plan",
    "write_dense",
    "write_shard",
    "write_shard_delta",
]


class CheckpointMismatch(ValueError):
    """A commit's tables are not those of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard:
    """One host's part of one table.

    Attributes:
      arrays: describes the whole table, on the host that wrote its metadata.
      buckets: every bucket held here, with its chunks, or, where only changed rows were written, with its digest alone.
      parts: the changed rows.
    """

    table: str
    arrays: tuple[ArrayFiles, ...]
    buckets: tuple[BucketReceipt, ...]
    parts: tuple[DeltaPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """All that a host wrote, one entry a table. `is_delta`: changed rows alone."""

    tables: tuple[TableShard, ...]
    is_delta: bool = False


class FrozenView(Protocol):
    """The rows of a host at one moment, and which of them changed since the commit before. Asked bucket by bucket, rising."""

    def values(self, table: Table, bucket: int) -> Sequence[np.ndarray]:
        """Rows and slots, each `[rows_per_bucket, width]`; valid until the next call."""
        ...

    def changed(self, table: Table, bucket: int) -> np.ndarray:
        """Positions of changed rows, int64, rising."""
        ...

    def digest_before(self, table: Table, bucket: int) -> str:
        """The bucket's digest in the commit before."""
        ...

    def skip(self, table: Table, bucket: int) -> None:
        """The bucket's values are not needed."""
        ...


def table_plan(spec: TableSpec, attempt: str) -> TablePlan:
    """What an attempt writes for a table."""
    return TablePlan(
        attempt=attempt,
        name=spec.name,
        num_rows=spec.num_rows,
        num_buckets=spec.layout.num_buckets,
        widths=spec.widths,
        dtypes={},
    )


def write_shard(
    store: Store,
    tables: Sequence[Table],
    attempt: str,
    *,
    is_first: bool,
    values_of: Callable[[Table, int], Sequence[np.ndarray]],
    on_chunk: Callable[[], None],
) -> ShardReceipt:
    """Writes this host's buckets below `data/<attempt>`, table by table, buckets rising.

    Args:
      is_first: whether this host also writes the arrays' metadata.
      values_of: rows and slots of one bucket, each `[rows_per_bucket, width]`; used before the next one is asked for.
      on_chunk: called after each bucket.

    Raises:
      StorageError: the storage failed, or the attempt has been written already.
    """
    shards = []
    for table in tables:
        plan = table_plan(table.spec, attempt)
        arrays = checkpoint_files.write_table_metadata(store, plan) if is_first else ()
        receipts = []
        for bucket in table.buckets:
            values = values_of(table, int(bucket))
            receipts.append(checkpoint_files.write_bucket(store, plan, int(bucket), values))
            on_chunk()
        shards.append(TableShard(table=table.spec.name, arrays=arrays, buckets=tuple(receipts)))
    return ShardReceipt(tables=tuple(shards))


def write_shard_delta(
    store: Store, tables: Sequence[Table], attempt: str, *, view: FrozenView, on_chunk: Callable[[], None]
) -> ShardReceipt:
    """Writes this host's rows that changed since the commit before, below `data/<attempt>`.

    Raises:
      StorageError: as `write_shard`.
    """
    shards = []
    for table in tables:
        plan = table_plan(table.spec, attempt)
        writer = PartWriter(store, plan.folder, list(plan.widths))
        receipts = []
        for bucket in map(int, table.buckets):
            positions = view.changed(table, bucket)
            if len(positions):
                values = view.values(table, bucket)
                writer.add(bucket, bucket + positions * plan.num_buckets, [value[positions] for value in values])
                digest = checkpoint_files.digest_of(plan, bucket, values)
            else:
                view.skip(table, bucket)
                digest = view.digest_before(table, bucket)
            receipts.append(BucketReceipt(bucket=bucket, chunks=(), digest=digest))
            on_chunk()
        shards.append(TableShard(table=table.spec.name, arrays=(), buckets=tuple(receipts), parts=writer.finish()))
    return ShardReceipt(tables=tuple(shards), is_delta=True)


def read_shard(
    store: Store, tables: Sequence[Table], files: Sequence[TableFiles], *, on_chunk: Callable[[], None]
) -> None:
    """Fills the buckets of this host from a commit; every chunk and every bucket's digest is verified.

    Raises:
      CheckpointMismatch: the commit has other tables, or the same with other shapes or slots.
      ChunkDamaged: a file is missing or is not what was committed.
    """
    by_name = {entry.name: entry for entry in files}
    wanted = [table.spec.name for table in tables]
    if set(wanted) != set(by_name):
        raise CheckpointMismatch(
            f"Found tables {sorted(by_name)} in the commit. Expected {sorted(wanted)}, as the job declares. "
            f"Resume with the tables of the run, or begin a new run."
        )
    for table in tables:
        entry = by_name[table.spec.name]
        _check(table.spec, entry)
        for bucket in map(int, table.buckets):
            read = checkpoint_files.read_base_bucket if entry.deltas else checkpoint_files.read_bucket
            read(store, entry, bucket, out=list(table.bucket(bucket).values()))
            on_chunk()
        if entry.deltas:
            _apply_deltas(store, table, entry, on_chunk)


def _apply_deltas(store: Store, table: Table, entry: TableFiles, on_chunk: Callable[[], None]) -> None:
    """Every part with a bucket of this host is read once, oldest commit first; then the digests tell whether all came out right."""
    held = {*map(int, table.buckets)}
    for delta in entry.deltas:
        for part in delta.parts:
            if held.isdisjoint(part.buckets):
                continue
            changes = read_part(store, part, num_buckets=entry.num_buckets, num_positions=entry.rows_per_bucket)
            with checkpoint_files.naming_changes(entry, delta, part):
                for bucket, positions, values in changes:
                    if bucket in held:
                        for array, value in zip(table.bucket(bucket).values(), values, strict=True):
                            array[positions] = value
            on_chunk()
    for bucket in held:
        checkpoint_files.check_digest(entry, bucket, list(table.bucket(bucket).values()))


def _check(spec: TableSpec, entry: TableFiles) -> None:
    found = (entry.num_rows, entry.num_buckets, {array.name: array.width for array in entry.arrays})
    expected = (spec.num_rows, spec.layout.num_buckets, dict(spec.widths))
    if found != expected:
        raise CheckpointMismatch(
            f"Table '{spec.name}': found rows, buckets and widths {found} in the commit. Expected {expected}, as the job declares. "
            f"Resume with the table and the optimizer of the run, or begin a new run."
        )


def write_dense(store: Store, attempt: str, arrays: Mapping[str, np.ndarray]) -> tuple[DenseFile, ...]:
    """Writes every leaf of the dense state."""
    return tuple(checkpoint_files.write_dense(store, attempt, key, values) for key, values in arrays.items())


def read_dense(store: Store, files: Sequence[DenseFile]) -> dict[str, np.ndarray]:
    """Reads and verifies every leaf of the dense state."""
    return {file.key: checkpoint_files.read_dense(store, file) for file in files}
