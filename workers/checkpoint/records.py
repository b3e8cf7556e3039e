"""What a manifest says of the files of one checkpoint attempt, and what a host says of those that it wrote.

Values only, which travel from hosts to the driver, into the manifest, and back to the hosts that load.
`workers.checkpoint.files` writes and reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.workers.checkpoint.arrays import safe_segment
from podembed.workers.checkpoint.chunks import (
    ChunkReceipt,
)
from podembed.workers.checkpoint.deltas import DeltaFiles
from podembed.workers.checkpoint.zarr_metadata import DTYPES, ArrayMetadata

ROWS = "rows"


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
    """One bucket of one array. `size_bytes` counts the whole file, `crc32c` covers it without its four-byte trailer."""

    array: str
    bucket: int
    name: str
    size_bytes: int
    crc32c: int

    @property
    def receipt(self) -> ChunkReceipt:
        return ChunkReceipt(name=self.name, size_bytes=self.size_bytes, crc32c=self.crc32c)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFiles:
    """One table of a checkpoint.

    Attributes:
      arrays: rows first, then slots in their declared order.
      chunks: every bucket of every array once, by array, then by bucket.
      digests: per bucket, `digest.bucket_digest` over rows and slots, with all deltas.
      deltas: rows that changed after the chunks were written, oldest first; each replaces what is before it.
    """

    name: str
    num_rows: int
    dim: int
    num_buckets: int
    rows_per_bucket: int
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
        """The entry of one bucket of one array."""
        return self.chunks[self.arrays.index(array) * self.num_buckets + bucket]

    def metadata(self, array: ArrayFiles) -> ArrayMetadata:
        """What the array's `zarr.json` must say; its free attributes are left out."""
        return ArrayMetadata(
            path=array.path,
            shape=(self.num_buckets, self.rows_per_bucket, array.width),
            chunk_shape=(1, self.rows_per_bucket, array.width),
            dtype=DTYPES[array.dtype],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReceipt:
    """What a host wrote of one bucket: one chunk for each array, none where only changed rows were written; and the
    digest over all.
    """

    bucket: int
    chunks: tuple[ChunkFile, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """The arrays that an attempt will write for one table; every host of a save makes the same plan.

    Attributes:
      widths: array name → elements of one row; `rows` first, then slots in their declared order.
      dtypes: array name → element type; float32 where it is missing.
    """

    attempt: str
    name: str
    num_rows: int
    num_buckets: int
    widths: Mapping[str, int]
    dtypes: Mapping[str, np.dtype]

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
        )
