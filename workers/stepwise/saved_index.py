"""`embedding.json`: the index of a saved embedding, which names each chunk of each table with its checksum.

The index is created last and exclusively, so a folder holds a whole embedding or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.tf.engine.table_storage import WrittenTables
from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import ROWS, ArrayFiles, ChunkFile, TableFiles
from podembed.workers.checkpoint.chunks import chunk_name
from podembed.workers.storage.records import from_document
from podembed.workers.storage.records import read_document as read_bytes
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
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
class IndexedTable:
    """One table in an index.

    Attributes:
      arrays: rows first, then the slots.
      keys: array name to its key in a TensorFlow checkpoint.
      chunks: array name to, per bucket, the size in bytes and the CRC32C of its chunk.
      digests: per bucket, over rows and slots.
    """

    name: str
    num_rows: int
    num_buckets: int
    arrays: tuple[ArrayFiles, ...]
    keys: Mapping[str, str]
    chunks: Mapping[str, tuple[tuple[int, ...], ...]]
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRecord:
    """All tables of an embedding, and the number of steps that made them."""

    num_steps: int
    tables: tuple[IndexedTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """The index of a checkpoint: names of its parts, their arrays, and the embedding if it has one."""

    format_version: int
    parts: tuple[str, ...]
    arrays: tuple[DenseFile, ...]
    embedding: EmbeddingRecord | None


def checkpoint_key(table: str, slot: str | None = None) -> str:
    """The key of a table's rows, or of one of its slots, below the embedding object in a TensorFlow checkpoint."""
    name = table if slot is None else f"{table}/{_TENSORFLOW_SLOTS.get(slot, slot)}"
    # TensorFlow escapes the path separator inside a name with ".S", and the dot itself by doubling it.
    return name.replace(".", "..").replace("/", ".S") + KEY_SUFFIX


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
            "tables or arrays in one place."
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
        "nothing saved is ever replaced. Pass a new path."
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
    name, saved = _saved_tables(Store(path))
    if saved.num_steps < 0:
        raise DocumentRefused(name, f"{saved.num_steps} steps", "0 or more")
    return tuple(_table_files(name, table) for table in saved.tables), saved.num_steps


def _saved_tables(store: Store) -> tuple[str, EmbeddingRecord]:
    """Name of the index and its record of tables."""
    try:
        document = read_document(store, INDEX_FILE)
    except NameNotFound:
        pass
    else:
        # Its tables and steps stand beside the version here, and as one member in a checkpoint's index.
        document.pop("format_version")
        return INDEX_FILE, from_document(EmbeddingRecord, INDEX_FILE, document)
    try:
        saved = read_checkpoint_record(store).embedding
    except NameNotFound:
        raise NothingSaved(
            f"Found no {INDEX_FILE} and no {CHECKPOINT_FILE} in {store.location}. Expected a folder written by "
            "TPUEmbedding.save or Checkpoint.save. Check the path; a save that was interrupted leaves neither."
        ) from None
    if saved is None:
        raise NothingSaved(
            f"Found a checkpoint without an embedding in {store.location}. Expected one with tables. Restore one that "
            "was saved with Checkpoint(embedding=...)."
        )
    return CHECKPOINT_FILE, saved


def read_checkpoint_record(store: Store) -> CheckpointRecord:
    """The index of a checkpoint.

    Raises:
      NameNotFound: there is none.
      DocumentRefused: it is damaged or not ours.
    """
    return from_document(CheckpointRecord, CHECKPOINT_FILE, read_document(store, CHECKPOINT_FILE))


# Of rows and slots, and of what an index keeps beside them.
_DTYPES = ("float32", "int64", "int32", "uint32")


def table_record(table: TableFiles) -> IndexedTable:
    """What the index says of a table."""
    return IndexedTable(
        name=table.name,
        num_rows=table.num_rows,
        num_buckets=table.num_buckets,
        arrays=table.arrays,
        keys={a.name: checkpoint_key(table.name, None if a.name == ROWS else a.name) for a in table.arrays},
        chunks={
            array.name: tuple(
                (chunk.size_bytes, *chunk.crc32c)
                for chunk in (table.chunk(array, bucket) for bucket in range(table.num_buckets))
            )
            for array in table.arrays
        },
        digests=tuple(table.digests),
    )


def _table_files(name: str, record: IndexedTable) -> TableFiles:
    """The files of a table that the index `name` holds. Raises DocumentRefused if they contradict each other."""
    problem = _problem(record)
    if problem is not None:
        raise DocumentRefused(name, f"table '{record.name}' with {problem}", "an index of tables")
    layout = BucketLayout(num_rows=record.num_rows, num_buckets=record.num_buckets)
    table = TableFiles(
        name=record.name,
        num_rows=record.num_rows,
        dim=record.arrays[0].width,
        num_buckets=record.num_buckets,
        rows_per_bucket=layout.rows_per_bucket,
        arrays=record.arrays,
        chunks=(),
        digests=record.digests,
    )
    try:
        chunks = [
            ChunkFile(
                array=array.name,
                bucket=bucket,
                name=chunk_name(table.metadata(array), (bucket, 0, 0)),
                size_bytes=size_bytes,
                crc32c=(crc32c,),
            )
            for array in record.arrays
            for bucket, (size_bytes, crc32c) in enumerate(record.chunks[array.name])
        ]
    except ValueError as error:
        # A path or shape that no array has.
        raise DocumentRefused(name, f"{error}"[:200], "an index of tables") from None
    return replace(table, chunks=tuple(chunks))


def _problem(record: IndexedTable) -> str | None:
    """Why no table can have this record; None if one can."""
    arrays, num_buckets = record.arrays, record.num_buckets
    if record.num_rows < 1 or num_buckets < 1 or num_buckets & (num_buckets - 1):
        return f"{record.num_rows} rows in {num_buckets} buckets"
    if len(record.digests) != num_buckets:
        return f"{num_buckets} buckets and {len(record.digests)} digests"
    if not arrays or arrays[0].name != ROWS or len({array.name for array in arrays}) != len(arrays):
        return "arrays without rows in front, or one twice"
    for array in arrays:
        if array.dtype not in _DTYPES or array.width < 1:
            return f"array {array.name} of width {array.width} and type {array.dtype}"
        if min(array.metadata_size_bytes, array.metadata_crc32c) < 0:
            return f"negative sizes of array {array.name}"
        pairs = record.chunks.get(array.name, ())
        if len(pairs) != num_buckets or any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
            return f"chunks of array {array.name} that do not fit {num_buckets} buckets"
    return None
