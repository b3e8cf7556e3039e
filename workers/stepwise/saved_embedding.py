"""A saved embedding: rows and slots of all tables in one folder, written by any number of hosts and read by any other
number.

Every array is a Zarr array below `data/<attempt>/tables/`, cut into buckets as in a run's checkpoint; `embedding.json`,
created last and exclusively, names each chunk with its checksum, so a folder holds a whole embedding or none. The
metadata of an array carries its key in TensorFlow's checkpoints: `<table>` for rows and `<table>.S<slot>` for a slot,
each with `/.ATTRIBUTES/VARIABLE_VALUE`. Implements `embedding.table.table_storage.TableStorage`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.table.table import Table
from podembed.embedding.table.table_storage import SavedTable, WrittenTables
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.chunks import chunk_name
from podembed.workers.checkpoint.files import (
    ROWS,
    ArrayFiles,
    BucketReceipt,
    ChunkFile,
    TableFiles,
    TablePlan,
    assemble_table,
    read_bucket,
    read_bucket_array,
    write_bucket,
    write_table_metadata,
)
from podembed.workers.checkpoint.shard import CheckpointMismatch
from podembed.workers.checkpoint.zarr_metadata import ArrayMetadata
from podembed.workers.storage.documents import read_document as read_bytes
from podembed.workers.storage.errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, beyond_limits, seal, unseal

INDEX_FILE = "embedding.json"
# Of a checkpoint with more than tables, see `workers.stepwise.checkpoint`.
CHECKPOINT_FILE = "checkpoint.json"
FORMAT_VERSION = 1
MAX_INDEX_BYTES = 256 << 20
KEY_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# What TensorFlow calls the slots of its embedding optimizers; slots of other optimizers keep their names.
_TENSORFLOW_SLOTS = {
    "accumulator": "accumulators",
    "momentum": "momenta",
    "velocity": "velocities",
    "linear": "linears",
}


class NothingSaved(StorageError):
    """A folder holds no saved embedding."""


class AlreadySaved(StorageError):
    """A folder holds a saved embedding, which is never replaced."""


class IndexTooLarge(StorageError):
    """An index has more entries than readers take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReceipt:
    """What one host wrote: per table the buckets, and on one host also the arrays' metadata."""

    arrays: tuple[tuple[ArrayFiles, ...], ...]
    buckets: tuple[tuple[BucketReceipt, ...], ...]


def checkpoint_key(table: str, slot: str | None = None) -> str:
    """The key of a table's rows, or of one of its slots, below the embedding object in a TensorFlow checkpoint."""
    name = table if slot is None else f"{table}/{_TENSORFLOW_SLOTS.get(slot, slot)}"
    # TensorFlow escapes the path separator inside a name with ".S", and the dot itself by doubling it.
    return name.replace(".", "..").replace("/", ".S") + KEY_SUFFIX


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
        buckets.append(
            tuple(write_bucket(store, plan, int(b), list(table.bucket(int(b)).values())) for b in table.buckets)
        )
    return HostReceipt(arrays=tuple(arrays), buckets=tuple(buckets))


def assemble(
    specs: Sequence[TableSpec], attempt: str, receipts: Sequence[HostReceipt], *, num_steps: int
) -> WrittenTables:
    """What an index says of the tables that the hosts wrote; it is JSON."""
    tables = []
    for at, spec in enumerate(specs):
        arrays = next(receipt.arrays[at] for receipt in receipts if receipt.arrays[at])
        buckets = [bucket for receipt in receipts for bucket in receipt.buckets[at]]
        tables.append(assemble_table(_plan(spec, attempt), arrays, buckets))
    return {"num_steps": num_steps, "tables": [_to_document(table) for table in tables]}


def publish(path: str, written: WrittenTables) -> None:
    """Makes what the hosts wrote the embedding of the folder.

    Raises:
      StorageError: the storage failed, or the folder holds an embedding already.
    """
    require_free(path)
    if not Store(path).create_exclusive(
        INDEX_FILE, sealed_index(INDEX_FILE, {"format_version": FORMAT_VERSION, **written})
    ):
        raise taken(path)


def sealed_index(name: str, document: dict[str, Any]) -> bytes:
    """The bytes of an index.

    Raises:
      IndexTooLarge: `read_document` would not take them.
    """
    data = seal(document)
    beyond = beyond_limits(data, max_bytes=MAX_INDEX_BYTES)
    if beyond is not None:
        found, expected = beyond
        raise IndexTooLarge(
            f"The index {name} would have {found}. Expected {expected}, since a restore reads no more. Save fewer "
            "tables or arrays in one "
            "place."
        )
    return data


def require_free(path: str) -> None:
    """Raises StorageError if the folder holds a saved embedding or a checkpoint."""
    if any(Store(path).exists(name) for name in (INDEX_FILE, CHECKPOINT_FILE)):
        raise taken(path)


def taken(path: str) -> AlreadySaved:
    """The error of a second save to one place."""
    return AlreadySaved(
        f"Found a saved embedding or checkpoint in {Store(path).location}. Expected a folder without one, since "
        "nothing saved is ever replaced. "
        "Pass a new path."
    )


def read_document(store: Store, name: str) -> dict[str, Any]:
    """An index, whole and of a version that is known here.

    Raises:
      NameNotFound: there is none.
      DocumentRefused: it is damaged or not ours.
    """
    document = unseal(name, read_bytes(store, name, max_bytes=MAX_INDEX_BYTES), max_bytes=MAX_INDEX_BYTES)
    if document.get("format_version") != FORMAT_VERSION:
        raise DocumentRefused(name, f"format version {str(document.get('format_version'))[:40]}", str(FORMAT_VERSION))
    return document


def read_index(path: str) -> tuple[tuple[TableFiles, ...], int]:
    """The tables of a folder, and the number of steps that made them; of a saved embedding, or of a checkpoint that has
    one.

    Raises:
      NothingSaved: there is none.
      DocumentRefused: the index is damaged or not ours.
    """
    store = Store(path)
    name, saved = _saved_tables(store)
    try:
        tables = tuple(_from_document(one) for one in saved["tables"])
        num_steps = whole(saved["num_steps"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DocumentRefused(name, f"{type(error).__name__}: {error}"[:200], "an index of tables") from None
    return tables, num_steps


def _saved_tables(store: Store) -> tuple[str, Any]:
    """Name of the index and its record of tables."""
    try:
        return INDEX_FILE, read_document(store, INDEX_FILE)
    except NameNotFound:
        pass
    try:
        saved = read_document(store, CHECKPOINT_FILE).get("embedding")
    except NameNotFound:
        raise NothingSaved(
            f"Found no {INDEX_FILE} and no {CHECKPOINT_FILE} in {store.location}. Expected a folder written by "
            "TPUEmbedding.save or "
            "Checkpoint.save. Check the path; a save that was interrupted leaves neither."
        ) from None
    if saved is None:
        raise NothingSaved(
            f"Found a checkpoint without an embedding in {store.location}. Expected one with tables. Restore one that "
            "was saved with "
            "Checkpoint(embedding=...)."
        )
    return CHECKPOINT_FILE, saved


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
        _fill(store, by_name[table.spec.name], table)
    return num_steps


def _fill(store: Store, entry: TableFiles, table: Table) -> None:
    for bucket in range(entry.num_buckets):
        local = table.index.rows_of(entry.layout.ids_of(bucket))
        mine = local >= 0
        if mine.any():
            found = _read(store, entry, bucket, table.spec.widths)
            table.store.write(local[mine], {name: values[: len(local)][mine] for name, values in found.items()})


def _read(store: Store, entry: TableFiles, bucket: int, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The wanted arrays of a bucket; all of them together are also compared with the bucket's digest."""
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
    expected = dict(spec.widths)
    if entry.num_rows != spec.num_rows or any(widths.get(name) != width for name, width in expected.items()):
        raise CheckpointMismatch(
            f"Table '{spec.name}': found {entry.num_rows} rows with columns {widths} in the saved embedding. Expected "
            f"{spec.num_rows} rows with "
            f"{expected}. Declare the table and its optimizer as they were saved, or no optimizer to read the rows "
            "alone."
        )


def _plan(spec: TableSpec, attempt: str) -> TablePlan:
    return _KeyedPlan(
        attempt=attempt,
        name=spec.name,
        num_rows=spec.num_rows,
        num_buckets=spec.layout.num_buckets,
        widths=spec.widths,
        dtypes={},
    )


def _to_document(table: TableFiles) -> dict[str, Any]:
    chunks = {
        array.name: [
            [c.size_bytes, c.crc32c] for c in (table.chunk(array, bucket) for bucket in range(table.num_buckets))
        ]
        for array in table.arrays
    }
    return {
        "name": table.name,
        "num_rows": table.num_rows,
        "num_buckets": table.num_buckets,
        "arrays": [asdict(array) for array in table.arrays],
        "keys": {a.name: checkpoint_key(table.name, None if a.name == ROWS else a.name) for a in table.arrays},
        "chunks": chunks,
        "digests": list(table.digests),
    }


def _from_document(document: Mapping[str, Any]) -> TableFiles:
    """Raises ValueError, KeyError or TypeError for anything that is not a table."""
    num_rows, num_buckets = whole(document["num_rows"], least=1), whole(document["num_buckets"], least=1)
    if num_buckets & (num_buckets - 1) or len(document["digests"]) != num_buckets:
        raise ValueError(f"{num_buckets} buckets with {len(document['digests'])} digests")
    arrays = tuple(_array(one) for one in document["arrays"])
    if not arrays or arrays[0].name != ROWS or len({a.name for a in arrays}) != len(arrays):
        raise ValueError("arrays without rows in front, or one twice")
    table = TableFiles(
        name=text(document["name"]),
        num_rows=num_rows,
        dim=arrays[0].width,
        num_buckets=num_buckets,
        rows_per_bucket=BucketLayout(num_rows=num_rows, num_buckets=num_buckets).rows_per_bucket,
        arrays=arrays,
        chunks=(),
        digests=tuple(text(digest) for digest in document["digests"]),
    )
    chunks: list[ChunkFile] = []
    for array in arrays:
        pairs = document["chunks"][array.name]
        if len(pairs) != num_buckets:
            raise ValueError(f"{len(pairs)} chunks of {array.name} for {num_buckets} buckets")
        metadata = table.metadata(array)
        chunks += [
            ChunkFile(
                array=array.name,
                bucket=bucket,
                name=chunk_name(metadata, (bucket, 0, 0)),
                size_bytes=whole(size_bytes),
                crc32c=whole(crc32c),
            )
            for bucket, (size_bytes, crc32c) in enumerate(pairs)
        ]
    return replace(table, chunks=tuple(chunks))


def _array(document: Mapping[str, Any]) -> ArrayFiles:
    if document["dtype"] != "float32":
        raise ValueError(f"elements of {document['dtype']}")
    return ArrayFiles(
        name=text(document["name"]),
        path=text(document["path"]),
        width=whole(document["width"], least=1),
        dtype="float32",
        metadata_size_bytes=whole(document["metadata_size_bytes"]),
        metadata_crc32c=whole(document["metadata_crc32c"]),
    )


def whole(value: Any, *, least: int = 0) -> int:
    """An integer of an index. Raises ValueError if it is none, or less than `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} for a whole number of at least {least}")
    return value


def text(value: Any) -> str:
    """A text of an index. Raises ValueError if it is none."""
    if type(value) is not str:
        raise ValueError(f"{value!r} for a text")
    return value


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
