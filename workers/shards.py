"""What one host writes of a checkpoint and reads back: its buckets of every table, and its replica of the dense state.

How a bucket becomes files is `workers.checkpoint_files`' business, and whether an attempt counts is the driver's; this module only goes
over the buckets that this host owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embedding.table import Table
from embedding.table_spec import TableSpec
from workers import checkpoint_files
from workers.checkpoint_files import ArrayFiles, BucketReceipt, DenseFile, TableFiles, TablePlan
from workers.storage import Store

__all__ = [
    "CheckpointMismatch",
    "DenseFile",
    "ShardReceipt",
    "TableFiles",
    "read_dense",
    "read_shard",
    "table_plan",
    "write_dense",
    "write_shard",
]


class CheckpointMismatch(ValueError):
    """A commit's tables are not those of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard:
    """One host's part of one table. `arrays` describes the whole table, on the host that wrote its metadata."""

    table: str
    arrays: tuple[ArrayFiles, ...]
    buckets: tuple[BucketReceipt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """All that a host wrote, one entry a table."""

    tables: tuple[TableShard, ...]


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
        for bucket in table.buckets:
            checkpoint_files.read_bucket(store, entry, int(bucket), out=list(table.bucket(int(bucket)).values()))
            on_chunk()


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
