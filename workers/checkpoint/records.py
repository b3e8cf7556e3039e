"""What a manifest says of the files of one checkpoint attempt, and what a host says of those that it wrote.

Values only, which travel from hosts to the driver, into the manifest, and back to the hosts that load.
`workers.checkpoint.files` writes and reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.buckets import BucketLayout, buckets_together
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.arrays import safe_segment
from podembed.workers.checkpoint.chunks import (
    ChunkReceipt,
)
from podembed.workers.checkpoint.deltas import DeltaFiles
from podembed.workers.checkpoint.zarr_metadata import DTYPES, ArrayMetadata

ROWS = "rows"
# Rows and slots of the buckets that lie in files together. Even a host with little memory has room for the least.
MIN_FILE_BYTES = 1 << 20
MAX_FILE_BYTES = 64 << 20
# Of each array, where a host's buckets lie together.
FILES_PER_HOST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFiles:
    """One array of a table on storage: its rows, or one slot.

    Attributes:
      name: `rows`, or the slot's name.
      path: of the Zarr array, relative to the run.
      width: elements of one row.
      dtype: element type, as `zarr_metadata.DTYPES` spells it.
      metadata_size_bytes, metadata_crc32c: of the whole `zarr.json`.
    """

    name: str
    path: str
    width: int
    dtype: str
    metadata_size_bytes: int
    metadata_crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFile:
    """One file of an array: the chunks of one bucket, or of several in a row.

    Attributes:
      bucket: the first one.
      size_bytes: of the whole file.
      crc32c: of each chunk without its four-byte trailer.
    """

    array: str
    bucket: int
    name: str
    size_bytes: int
    crc32c: tuple[int, ...]

    @property
    def buckets(self) -> range:
        return range(self.bucket, self.bucket + len(self.crc32c))

    def receipt(self, bucket: int) -> ChunkReceipt:
        """Of one of the chunks."""
        crc32c = self.crc32c[bucket - self.bucket]
        return ChunkReceipt(name=self.name, size_bytes=self.size_bytes, crc32c=crc32c)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFiles:
    """One table of a checkpoint.

    Attributes:
      arrays: rows first, then slots in their declared order.
      buckets_per_file: a power of two.
      chunks: every bucket of every array once, by array, then by bucket.
      digests: per bucket, `digest.bucket_digest` over rows and slots, with all deltas.
      deltas: rows that changed after the chunks were written, oldest first; each replaces what is before it.
    """

    name: str
    num_rows: int
    dim: int
    num_buckets: int
    rows_per_bucket: int
    buckets_per_file: int = 1
    arrays: tuple[ArrayFiles, ...]
    chunks: tuple[ChunkFile, ...]
    digests: tuple[str, ...]
    deltas: tuple[DeltaFiles, ...] = ()

    @property
    def layout(self) -> BucketLayout:
        """Which row lies where."""
        return BucketLayout(num_rows=self.num_rows, num_buckets=self.num_buckets)

    @property
    def slots(self) -> tuple[ArrayFiles, ...]:
        return self.arrays[1:]

    @property
    def size_bytes(self) -> int:
        """Of all files that a reader needs."""
        return sum(chunk.size_bytes for chunk in self.chunks) + sum(delta.size_bytes for delta in self.deltas)

    def chunk(self, array: ArrayFiles, bucket: int) -> ChunkFile:
        """The file with one bucket of one array."""
        return self.chunks[(self.arrays.index(array) * self.num_buckets + bucket) // self.buckets_per_file]

    def metadata(self, array: ArrayFiles) -> ArrayMetadata:
        """What the array's `zarr.json` must say; its free attributes are left out."""
        return ArrayMetadata(
            path=array.path,
            shape=(self.num_buckets, self.rows_per_bucket, array.width),
            chunk_shape=(1, self.rows_per_bucket, array.width),
            dtype=DTYPES[array.dtype],
            chunks_per_file=self.buckets_per_file,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReceipt:
    """What a host wrote of one bucket, or of the several that one file holds.

    Attributes:
      bucket: the first one.
      chunks: one file for each array; none where only changed rows were written.
      digests: of each bucket over all arrays.
    """

    bucket: int
    chunks: tuple[ChunkFile, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """The arrays that an attempt will write for one table; every host of a save makes the same plan.

    Attributes:
      widths: array name → elements of one row; `rows` first, then slots in their declared order.
      dtypes: array name → element type; float32 where it is missing.
      buckets_per_file: a power of two.
    """

    attempt: str
    name: str
    num_rows: int
    num_buckets: int
    widths: Mapping[str, int]
    dtypes: Mapping[str, np.dtype]
    buckets_per_file: int = 1

    @property
    def layout(self) -> BucketLayout:
        """Which row lies where."""
        return BucketLayout(num_rows=self.num_rows, num_buckets=self.num_buckets)

    @property
    def rows_per_bucket(self) -> int:
        return self.layout.rows_per_bucket

    @property
    def folder(self) -> str:
        """Of the table in the attempt."""
        return f"data/{self.attempt}/tables/{safe_segment(self.name)}"

    def metadata(self, array: str) -> ArrayMetadata:
        """What `zarr.json` will say, with the layout for readers that have no manifest at hand."""
        shape = (self.num_buckets, self.rows_per_bucket, self.widths[array])
        layout = f"row r of {self.num_rows} is at [r mod {self.num_buckets}, r div {self.num_buckets}]"
        return ArrayMetadata(
            path=f"{self.folder}/{safe_segment(array)}",
            shape=shape,
            chunk_shape=(1, *shape[1:]),
            dtype=np.dtype(self.dtypes.get(array, np.float32)),
            attributes={"table": self.name, "array": array, "num_rows": self.num_rows, "layout": layout},
            chunks_per_file=self.buckets_per_file,
        )


def buckets_per_file(specs: Sequence[TableSpec], placement: Sequence[np.ndarray], *, num_hosts: int) -> dict[str, int]:
    """How many buckets of each table a commit's files hold. A function of its arguments, so all hosts agree.

    A file has one writer, so its buckets have one owner. A host stages whole files in memory. So a file takes a small
    part of what a host holds.

    Returns:
      Table name → a power of two.
    """
    held_bytes = sum(spec.bucket_bytes * spec.layout.num_buckets for spec in specs) // num_hosts
    wanted_bytes = max(MIN_FILE_BYTES, min(MAX_FILE_BYTES, held_bytes // FILES_PER_HOST))
    return {
        spec.name: buckets_together(owners, most=wanted_bytes // spec.bucket_bytes)
        for spec, owners in zip(specs, placement, strict=True)
    }
