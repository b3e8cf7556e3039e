"""What a manifest says of the files of one checkpoint attempt, and what a host says of those that it wrote.

Values only, which travel from hosts to the driver, into the manifest, and back to the hosts that load.
`workers.checkpoint.files` writes and reads the files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from podembed.embedding.buckets import BucketLayout, buckets_together
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.arrays import ArrayFiles, safe_segment
from podembed.workers.checkpoint.chunks import ChunkReceipt, file_name
from podembed.workers.checkpoint.deltas import DeltaFiles
from podembed.workers.checkpoint.digest import Digests
from podembed.workers.checkpoint.zarr_metadata import DTYPES, FLAT, NESTED, ArrayMetadata

ROWS = "rows"
# Rows and slots of the buckets that lie in files together. Even a host with little memory has room for the least.
MIN_FILE_BYTES = 1 << 20
MAX_FILE_BYTES = 64 << 20
# Of each array, where a host's buckets lie together.
FILES_PER_HOST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFile:
    """One file of an array: the chunks of one bucket, or of several in a row.

    Attributes:
      bucket: the first one.
      size_bytes: size of the whole file.
      crc32c: checksum of each chunk without its four-byte trailer.
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
        """The receipt of one of the chunks."""
        crc32c = self.crc32c[bucket - self.bucket]
        return ChunkReceipt(name=self.name, size_bytes=self.size_bytes, crc32c=crc32c)


CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayChunks:
    """The files of one array, under the names that Zarr gives them.

    Attributes:
      array, path: its name, and where it lies.
      size_bytes: size of each file.
      crc32c: checksum of each chunk without its trailer, in the order of buckets: four bytes each, little-endian.
      separator: separator of `TableFiles`.
    """

    array: str
    path: str
    size_bytes: int
    crc32c: bytes
    separator: str = NESTED

    @staticmethod
    def of(array: ArrayFiles, *, size_bytes: int, crc32c: bytes, separator: str) -> ArrayChunks:
        return ArrayChunks(array=array.name, path=array.path, size_bytes=size_bytes, crc32c=crc32c, separator=separator)

    @property
    def num_chunks(self) -> int:
        return len(self.crc32c) // CHECKSUM_BYTES

    def name(self, file: int) -> str:
        """The name of a file, by its number."""
        return file_name(self.path, file, separator=self.separator)

    def checksums(self, first: int, count: int) -> tuple[int, ...]:
        """Checksums of consecutive chunks."""
        return tuple(np.frombuffer(self.crc32c, "<u4", count, first * CHECKSUM_BYTES).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFiles(Sequence[ChunkFile]):
    """All files of a table, by array, then by bucket. What is said of each is made when somebody asks for it.

    Attributes:
      arrays: rows first, then slots in their declared order; all have as many chunks.
    """

    buckets_per_file: int
    arrays: tuple[ArrayChunks, ...]

    @staticmethod
    def of(
        chunks: Iterable[ChunkFile],
        arrays: Sequence[ArrayFiles],
        *,
        num_buckets: int,
        buckets_per_file: int,
        separator: str,
    ) -> ChunkFiles | None:
        """The same as single files; None if they are not all there, once and in order, each where its array lies."""
        if isinstance(chunks, ChunkFiles):
            return chunks
        given, found = iter(chunks), []
        for array in arrays:
            files = list(itertools.islice(given, num_buckets // buckets_per_file))
            sizes, checksums = {file.size_bytes for file in files}, [file.crc32c for file in files]
            if len(sizes) != 1 or any(len(of_file) != buckets_per_file for of_file in checksums):
                return None
            crc32c = np.fromiter(itertools.chain.from_iterable(checksums), "<u4").tobytes()
            one = ArrayChunks.of(array, size_bytes=sizes.pop(), crc32c=crc32c, separator=separator)
            firsts = range(0, num_buckets, buckets_per_file)
            expected = [(array.name, first, one.name(number)) for number, first in enumerate(firsts)]
            if [(file.array, file.bucket, file.name) for file in files] != expected:
                return None
            found.append(one)
        return ChunkFiles(buckets_per_file=buckets_per_file, arrays=tuple(found)) if next(given, None) is None else None

    def __len__(self) -> int:
        return sum(array.num_chunks for array in self.arrays) // self.buckets_per_file

    @overload
    def __getitem__(self, at: int) -> ChunkFile: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[ChunkFile, ...]: ...
    def __getitem__(self, at: int | slice) -> ChunkFile | tuple[ChunkFile, ...]:
        if isinstance(at, slice):
            return tuple(self[one] for one in range(len(self))[at])
        number, file = divmod(range(len(self))[at], len(self) // len(self.arrays))
        array, bucket = self.arrays[number], file * self.buckets_per_file
        return ChunkFile(
            array=array.array,
            bucket=bucket,
            name=array.name(file),
            size_bytes=array.size_bytes,
            crc32c=array.checksums(bucket, self.buckets_per_file),
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkFiles):
            return (self.buckets_per_file, self.arrays) == (other.buckets_per_file, other.arrays)
        return NotImplemented if not isinstance(other, tuple) else tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(array.size_bytes * (array.num_chunks // self.buckets_per_file) for array in self.arrays)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Name and size of each file."""
        for array in self.arrays:
            for file in range(array.num_chunks // self.buckets_per_file):
                yield array.name(file), array.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFiles:
    """One table of a checkpoint.

    Attributes:
      arrays: rows first, then slots in their declared order.
      buckets_per_file: a power of two.
      separator: between the numbers of a file's name, `FLAT` or `NESTED`.
      chunks: every bucket of every array once, by array, then by bucket; mostly a `ChunkFiles`.
      digests: per bucket, `digest.bucket_digest` over rows and slots, with all deltas.
      deltas: rows that changed after the chunks were written, oldest first; each replaces what is before it.
    """

    name: str
    num_rows: int
    dim: int
    num_buckets: int
    rows_per_bucket: int
    buckets_per_file: int = 1
    separator: str = NESTED
    arrays: tuple[ArrayFiles, ...]
    chunks: Sequence[ChunkFile]
    digests: Sequence[str]
    deltas: tuple[DeltaFiles, ...] = ()

    @property
    def layout(self) -> BucketLayout:
        """The places of rows in buckets."""
        return BucketLayout(num_rows=self.num_rows, num_buckets=self.num_buckets)

    @property
    def is_dynamic(self) -> bool:
        """Whether its keys come and go. Then `key` says whose a row is, and `last` whether it has a key at all."""
        found = {array.name: array.dtype for array in self.arrays}
        return found.get("key") == "int64" and found.get("last") == "int32"

    @property
    def slots(self) -> tuple[ArrayFiles, ...]:
        """State of the optimizer."""
        is_dynamic = self.is_dynamic
        return tuple(array for array in self.arrays[1:] if not is_dynamic or array.dtype == "float32")

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that a reader needs."""
        chunks = self.chunks
        held = chunks.size_bytes if isinstance(chunks, ChunkFiles) else sum(chunk.size_bytes for chunk in chunks)
        return held + sum(delta.size_bytes for delta in self.deltas)

    def chunk_sizes(self) -> Iterator[tuple[str, int]]:
        """Name and size of each file with chunks."""
        chunks = self.chunks
        return chunks.sizes() if isinstance(chunks, ChunkFiles) else ((one.name, one.size_bytes) for one in chunks)

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
            separator=self.separator,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """The arrays that an attempt will write for one table; every host of a save makes the same plan.

    Attributes:
      widths: array name → elements of one row; `rows` first, then slots in their declared order.
      dtypes: array name → element type; float32 where it is missing.
      buckets_per_file: a power of two.
      separator: separator of `TableFiles`.
    """

    attempt: str
    name: str
    num_rows: int
    num_buckets: int
    widths: Mapping[str, int]
    dtypes: Mapping[str, np.dtype]
    buckets_per_file: int = 1
    separator: str = FLAT

    @property
    def layout(self) -> BucketLayout:
        """The places of rows in buckets."""
        return BucketLayout(num_rows=self.num_rows, num_buckets=self.num_buckets)

    @property
    def rows_per_bucket(self) -> int:
        return self.layout.rows_per_bucket

    @property
    def folder(self) -> str:
        """The folder of the table in the attempt."""
        return f"data/{self.attempt}/tables/{safe_segment(self.name)}"

    def metadata(self, array: str) -> ArrayMetadata:
        """The content of `zarr.json`, with the layout for readers that have no manifest at hand."""
        shape = (self.num_buckets, self.rows_per_bucket, self.widths[array])
        layout = f"row r of {self.num_rows} is at [r mod {self.num_buckets}, r div {self.num_buckets}]"
        return ArrayMetadata(
            path=f"{self.folder}/{safe_segment(array)}",
            shape=shape,
            chunk_shape=(1, *shape[1:]),
            dtype=np.dtype(self.dtypes.get(array, np.float32)),
            attributes={"table": self.name, "array": array, "num_rows": self.num_rows, "layout": layout},
            chunks_per_file=self.buckets_per_file,
            separator=self.separator,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReceipt:
    """One bucket that a host wrote, or the several of one file.

    Attributes:
      bucket: the first one.
      chunks: one file for each array; none where only changed rows were written.
      digests: digest of each bucket over all arrays.
    """

    bucket: int
    chunks: tuple[ChunkFile, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBuckets:
    """The buckets of one table that a host wrote, as columns. A driver may get a million buckets from its hosts.

    Attributes:
      folder: folder of the table in the attempt. The names of files follow from it.
      firsts: int32 in little-endian order: the first bucket of each file, or each bucket if only changed rows were
        written.
      digests: digests of all buckets, in the order of `firsts`.
      arrays: their names, in the order of the plan; none if only changed rows were written.
      size_bytes: per array, of each of its files.
      crc32c: per array, of each chunk as in `ArrayChunks`, in the order of `firsts`.
      separator: separator of `TableFiles`.
    """

    folder: str
    firsts: bytes
    digests: Digests
    arrays: tuple[str, ...] = ()
    size_bytes: tuple[int, ...] = ()
    crc32c: tuple[bytes, ...] = ()
    separator: str = NESTED

    @staticmethod
    def of(plan: TablePlan, receipts: Sequence[BucketReceipt]) -> WrittenBuckets:
        """The columns of what was written bucket by bucket.

        Raises:
          RuntimeError: a file has another name, size or number of buckets than the plan says.
        """
        arrays = tuple(plan.widths) if any(receipt.chunks for receipt in receipts) else ()
        columns = [[receipt.chunks[at] for receipt in receipts] for at in range(len(arrays))]
        sizes = [{file.size_bytes for file in column} for column in columns]
        for array, column, found in zip(arrays, columns, sizes, strict=True):
            path = plan.metadata(array).path
            for file, receipt in zip(column, receipts, strict=True):
                name = file_name(path, file.bucket // plan.buckets_per_file, separator=plan.separator)
                expected = (array, receipt.bucket, name, plan.buckets_per_file, 1)
                if (file.array, file.bucket, file.name, len(file.crc32c), len(found)) != expected:
                    raise RuntimeError(
                        f"Found file '{file.name}' for bucket {file.bucket}, one of {len(found)} sizes. Expected "
                        f"'{name}' for bucket {receipt.bucket}, all of one size. Report this as a fault of podembed."
                    )
        return WrittenBuckets(
            folder=plan.folder,
            firsts=np.array([receipt.bucket for receipt in receipts], "<i4").tobytes(),
            digests=Digests.of(digest for receipt in receipts for digest in receipt.digests),
            arrays=arrays,
            size_bytes=tuple(found.pop() for found in sizes),
            crc32c=tuple(np.array([file.crc32c for file in column], "<u4").tobytes() for column in columns),
            separator=plan.separator,
        )

    @property
    def buckets(self) -> list[int]:
        """Numbers of the buckets, in the order of the digests."""
        firsts = np.frombuffer(self.firsts, "<i4")
        return (firsts[:, None] + np.arange(len(self.digests) // max(1, len(firsts)))).ravel().tolist()

    @property
    def written_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.size_bytes) * (len(self.firsts) // 4)

    def files(self) -> Iterator[ChunkFile]:
        """Each file of each array."""
        firsts = np.frombuffer(self.firsts, "<i4").tolist()
        for array, size_bytes, data in zip(self.arrays, self.size_bytes, self.crc32c, strict=True):
            checksums = np.frombuffer(data, "<u4").reshape(len(firsts), -1).tolist()
            path = f"{self.folder}/{safe_segment(array)}"
            for first, crc32c in zip(firsts, checksums, strict=True):
                name = file_name(path, first // max(1, len(crc32c)), separator=self.separator)
                yield ChunkFile(array=array, bucket=first, name=name, size_bytes=size_bytes, crc32c=tuple(crc32c))


def buckets_per_file(specs: Sequence[TableSpec], placement: Sequence[np.ndarray], *, num_hosts: int) -> dict[str, int]:
    """Number of buckets of each table in one file of a commit. A function of its arguments, so all hosts agree.

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
