"""A saved embedding: rows and slots of all tables in one folder, written by any number of hosts and read by any other
number.

Every array is a Zarr array below `data/<attempt>/tables/`, cut into buckets as in a run's checkpoint. A save creates
`embedding.json` last and exclusively, with the checksum of each chunk. So a folder holds a whole embedding or none. The
metadata of an array carries its key in TensorFlow's checkpoints: `<table>` for rows and `<table>.S<slot>` for a slot,
each with `/.ATTRIBUTES/VARIABLE_VALUE`. Implements `embedding.tf.engine.table_storage.TableStorage`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.table_storage import SavedTable, WrittenTables
from podembed.workers.checkpoint.checkpoint_files import ROWS, ArrayFiles, TableFiles, TablePlan, WrittenBuckets
from podembed.workers.checkpoint.files import (
    assemble_table,
    read_bucket,
    read_bucket_array,
    write_buckets,
    write_table_metadata,
)
from podembed.workers.checkpoint.shard import CheckpointMismatch
from podembed.workers.checkpoint.zarr_metadata import NESTED, ArrayMetadata
from podembed.workers.stepwise.saved_index import (
    EmbeddingRecord,
    checkpoint_key,
    publish,
    read_index,
    require_free,
    table_record,
)
from podembed.workers.storage.records import to_document
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReceipt:
    """What one host wrote: per table the buckets, and on one host also the arrays' metadata."""

    arrays: tuple[tuple[ArrayFiles, ...], ...]
    buckets: tuple[WrittenBuckets, ...]


class _KeyedPlan(TablePlan):
    """A plan whose arrays carry their checkpoint key."""

    def metadata(self, array: str) -> ArrayMetadata:
        metadata = super().metadata(array)
        key = checkpoint_key(self.name, None if array == ROWS else array)
        return replace(metadata, attributes={**metadata.attributes, "checkpoint_key": key})


def new_attempt() -> str:
    """A name for the files of one save; an attempt that failed leaves files that no index names."""
    return f"e{secrets.token_hex(8)}"


def write_host(path: str, tables: Sequence[Table], attempt: str, *, is_first: bool) -> HostReceipt:
    """Writes the buckets that are held here.

    Args:
      attempt: the same on all hosts.
      is_first: whether this host also writes the arrays' metadata.

    Raises:
      StorageError: the storage failed.
    """
    store = Store(path)
    arrays, buckets = [], []
    for table in tables:
        plan = _plan(table.spec, attempt)
        arrays.append(write_table_metadata(store, plan) if is_first else ())
        written = [write_buckets(store, plan, int(b), table.spec.stored(table.bucket(int(b)))) for b in table.buckets]
        buckets.append(WrittenBuckets.of(plan, written))
    return HostReceipt(arrays=tuple(arrays), buckets=tuple(buckets))


def assemble(
    specs: Sequence[TableSpec], attempt: str, receipts: Sequence[HostReceipt], *, num_steps: int
) -> WrittenTables:
    """What an index says of the tables that the hosts wrote; it is JSON."""
    tables = []
    for at, spec in enumerate(specs):
        arrays = next(receipt.arrays[at] for receipt in receipts if receipt.arrays[at])
        buckets = [receipt.buckets[at] for receipt in receipts]
        tables.append(assemble_table(_plan(spec, attempt), arrays, buckets))
    return to_document(EmbeddingRecord(num_steps=num_steps, tables=tuple(table_record(table) for table in tables)))


def restore_tables(path: str, tables: Sequence[Table]) -> int:
    """Fills the buckets that are held here, whatever number of hosts and buckets wrote them. Returns the number of
    steps.

    Slots that a table lacks are left out. After an error the tables may hold a part of the new values.

    Raises:
      CheckpointMismatch: a table is missing, or has other rows, columns or slots.
      ChunkDamaged: a file is missing or is not what was written.
    """
    files, num_steps = read_index(path)
    by_name = {entry.name: entry for entry in files}
    for table in tables:
        _check(table.spec, by_name)
    store = Store(path)
    for table in tables:
        entry = by_name[table.spec.name]
        (_fill_buckets if table.index.is_dynamic else _fill)(store, entry, table)
        table.index.rebuild()
    return num_steps


def _fill_buckets(store: Store, entry: TableFiles, table: Table) -> None:
    """Where a key lies in its bucket, the index cannot know before."""
    for bucket in map(int, table.buckets):
        found = _read(store, entry, bucket, table.spec.widths)
        for name, values in zip(table.spec.widths, table.spec.stored(table.bucket(bucket)), strict=True):
            values[...] = found[name]


def _fill(store: Store, entry: TableFiles, table: Table) -> None:
    for bucket in range(entry.num_buckets):
        local = table.index.rows_of(entry.layout.ids_of(bucket))
        mine = local >= 0
        if mine.any():
            found = _read(store, entry, bucket, table.spec.widths)
            table.store.write(local[mine], {name: values[: len(local)][mine] for name, values in found.items()})


def _read(store: Store, entry: TableFiles, bucket: int, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The wanted arrays of a bucket. Where all are wanted, they are also compared with the bucket's digest."""
    if all(array.name in wanted for array in entry.arrays):
        values = read_bucket(store, entry, bucket)
        return {array.name: value for array, value in zip(entry.arrays, values, strict=True)}
    return {a.name: read_bucket_array(store, entry, a, bucket) for a in entry.arrays if a.name in wanted}


def _check(spec: TableSpec, saved: Mapping[str, TableFiles]) -> None:
    entry = saved.get(spec.name)
    if entry is None:
        raise CheckpointMismatch(
            f"Found tables {sorted(saved)} in the saved embedding. Expected one called '{spec.name}'. Name the "
            "TableConfig as it was saved."
        )
    widths = {array.name: array.width for array in entry.arrays}
    expected = spec.stored_widths
    if (entry.num_rows, bool(spec.keys.columns)) != (spec.num_rows, entry.is_dynamic) or any(
        widths.get(name) != width for name, width in expected.items()
    ):
        raise CheckpointMismatch(
            f"Table '{spec.name}': found {entry.num_rows} rows with columns {widths} in the saved embedding. Expected "
            f"{spec.num_rows} rows with {expected}. Declare the table and its optimizer as they were saved, or no "
            "optimizer to read the rows alone."
        )


def _plan(spec: TableSpec, attempt: str) -> TablePlan:
    return _KeyedPlan(
        attempt=attempt,
        name=spec.name,
        num_rows=spec.num_rows,
        num_buckets=spec.layout.num_buckets,
        widths=spec.stored_widths,
        dtypes=spec.keys.columns,
        # The index does not say it.
        separator=NESTED,
    )


class _EmbeddingFiles:
    """`TableStorage` over the functions of this module, for tables that one process holds whole."""

    def save(self, path: str, tables: Sequence[Table], *, num_steps: int) -> None:
        require_free(path)
        publish(path, self.write(path, tables, num_steps=num_steps))

    def write(self, path: str, tables: Sequence[Table], *, num_steps: int) -> WrittenTables:
        attempt = new_attempt()
        receipt = write_host(path, tables, attempt, is_first=True)
        return assemble([table.spec for table in tables], attempt, [receipt], num_steps=num_steps)

    def restore(self, path: str, tables: Sequence[Table]) -> int:
        return restore_tables(path, tables)

    def describe(self, path: str) -> tuple[SavedTable, ...]:
        return tuple(
            SavedTable(name=entry.name, num_rows=entry.num_rows, widths={a.name: a.width for a in entry.arrays})
            for entry in read_index(path)[0]
        )


TABLE_STORAGE = _EmbeddingFiles()
