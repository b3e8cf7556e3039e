"""Arrays on storage in the Zarr v3 format, with the codecs `bytes` (little-endian) and `crc32c` and nothing else.

A chunk is the array's bytes followed by four bytes of checksum. A write hands the kernel the array itself, and a read
fills the caller's array. On a local disk the payload is thus never copied. A table array is `[V, rows per bucket,
width]` with one chunk a bucket. A dense leaf is one chunk. zarr-python and tensorstore open these files.

A file is one chunk, or several in a row with an index behind them, which Zarr calls a shard. All chunks of an array
are equally long. So this module knows each place from the number of the chunk. It reads the index only to check it for
other readers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import google_crc32c
import numpy as np

from podembed.workers.checkpoint.zarr_metadata import ArrayMetadata, metadata_bytes
from podembed.workers.storage.storage_errors import NameNotFound, StorageError, WrongSize
from podembed.workers.storage.store import Store

CRC_BYTES = 4
# The checksum routine holds the interpreter lock, so it gets its input in pieces that others can wait for.
_CRC_PIECE_BYTES = 1 << 18
# Of the index behind the chunks of a file: place and length of each. The checksum of all follows.
_ENTRY_BYTES = 16


class ChunkDamaged(StorageError):
    """A chunk is missing, has the wrong length, or its bytes do not match a checksum. `place` says in words what the
    chunk holds, `at` which one of its file it is.
    """

    at: int | None = None
    remedy = "Restore the file from a copy, or load an older commit."

    def __init__(self, name: str, found: str, expected: str, *, place: str = ""):
        super().__init__(
            f"Chunk '{name}'{f', {place}' if place else ''}: found {found}; expected {expected}. {self.remedy}"
        )
        self.name = name
        self.found = found
        self.expected = expected


class IndexDamaged(ChunkDamaged):
    """The index behind the chunks of a file is not what was written. No restore reads it."""

    remedy = "Restores do not need it. For other readers restore the file from a copy, or save again."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReceipt:
    """A writer's promise about one chunk.

    Attributes:
      name: name of the file, relative to the store.
      size_bytes: size of the whole file, all chunks, trailers and the index included.
      crc32c: checksum of the chunk's bytes, which its trailer holds as well.
    """

    name: str
    size_bytes: int
    crc32c: int


def crc32c(data: np.ndarray | bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of an array's bytes in C order."""
    if isinstance(data, bytes):
        return google_crc32c.value(data)
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    value = 0
    for start in range(0, flat.size, _CRC_PIECE_BYTES):
        # The C routine takes any read-only buffer; its annotation says bytes.
        value = google_crc32c.extend(value, flat[start : start + _CRC_PIECE_BYTES])  # pyright: ignore[reportArgumentType]
    return value


def write_array_metadata(store: Store, metadata: ArrayMetadata) -> ChunkReceipt:
    """Writes `zarr.json` of one array. One writer of a save does this; the others only need the value.

    Returns:
      A receipt of the file; its checksum covers all of it.
    """
    name, data = f"{metadata.path}/zarr.json", metadata_bytes(metadata)
    store.write_new(name, [data])
    return ChunkReceipt(name=name, size_bytes=len(data), crc32c=crc32c(data))


def chunk_name(metadata: ArrayMetadata, index: Sequence[int]) -> str:
    """The file of a chunk, relative to the store.

    Raises:
      IndexError: the index is not inside the grid of chunks.
    """
    if len(index) != len(metadata.grid) or any(not 0 <= at < end for at, end in zip(index, metadata.grid, strict=True)):
        raise IndexError(
            f"Chunk {tuple(index)} of '{metadata.path}'; its grid is {metadata.grid}. Check the bucket number."
        )
    number = [index[0] // metadata.chunks_per_file, *index[1:]] if index else []
    return f"{metadata.path}/{metadata.separator.join(['c', *map(str, number)])}"


def file_name(path: str, file: int, *, separator: str) -> str:
    """The same of an array of buckets, by the number of the file."""
    return f"{path}/{separator.join(('c', str(file), '0', '0'))}"


def chunk_bytes(metadata: ArrayMetadata) -> int:
    """Bytes of a chunk, trailer included; every chunk of an array has the same."""
    return math.prod(metadata.chunk_shape) * metadata.dtype.itemsize + CRC_BYTES


def file_bytes(metadata: ArrayMetadata) -> int:
    """Bytes of a file; every file of an array has the same."""
    count = metadata.chunks_per_file
    # Counted, not made: a manifest may claim any size, and is refused for it by whoever compares.
    return count * chunk_bytes(metadata) + (_index_bytes(count) if count > 1 else 0)


def _index_bytes(count: int) -> int:
    return _ENTRY_BYTES * count + CRC_BYTES


def first_byte(metadata: ArrayMetadata, index: Sequence[int]) -> int:
    """The position of a chunk in its file."""
    return index[0] % metadata.chunks_per_file * chunk_bytes(metadata) if index else 0


def file_index(metadata: ArrayMetadata) -> bytes:
    """The end of a file with several chunks: the place and length of each, and a checksum. Empty for a single chunk.

    Source: Zarr specification, codec `sharding_indexed` version 1.0, with `index_location` "end" and the index codecs
    `bytes` and `crc32c`.
    """
    return _index_of(metadata.chunks_per_file, chunk_bytes(metadata)) if metadata.chunks_per_file > 1 else b""


@lru_cache(maxsize=64)
def _index_of(count: int, length: int) -> bytes:
    """Files of an array have the same, and a commit has few arrays."""
    entries = np.empty((count, 2), "<u8")
    entries[:, 0] = np.arange(count, dtype=np.uint64) * np.uint64(length)
    entries[:, 1] = length
    index = entries.tobytes()
    return index + struct.pack("<I", crc32c(index))


def write_chunk(store: Store, metadata: ArrayMetadata, index: Sequence[int], values: np.ndarray) -> ChunkReceipt:
    """Writes a file of one chunk under a new name and returns when it is durable.

    Args:
      index: position in the grid of chunks; `(bucket, 0, 0)` for a table array.
      values: exactly one chunk, `chunk_shape` with or without its leading ones. A C-contiguous array is written without
        a copy.
    """
    _check_values(metadata, values, chunk_name(metadata, index))
    (receipt,) = write_chunks(store, metadata, index, [values])
    return receipt


def write_chunks(
    store: Store, metadata: ArrayMetadata, index: Sequence[int], values: Sequence[np.ndarray]
) -> tuple[ChunkReceipt, ...]:
    """Writes a file with all of its chunks, as `write_chunk` does. Returns a receipt a chunk.

    Args:
      index: index of the first chunk of the file.
      values: each one chunk.
    """
    name = chunk_name(metadata, index)
    if len(values) != metadata.chunks_per_file or first_byte(metadata, index):
        raise ValueError(
            f"Found {len(values)} chunks from {tuple(index)} for file '{name}'. Expected all of its "
            f"{metadata.chunks_per_file}, from the first. Write a file at once."
        )
    buffers: list[memoryview | bytes] = []
    checksums = []
    for value in values:
        _check_values(metadata, value, name)
        little = np.ascontiguousarray(value, metadata.dtype.newbyteorder("<"))
        checksums.append(crc32c(little))
        buffers += [_byte_view(little), struct.pack("<I", checksums[-1])]
    if metadata.chunks_per_file > 1:
        buffers.append(file_index(metadata))
    store.write_new(name, buffers)
    size_bytes = file_bytes(metadata)
    return tuple(ChunkReceipt(name=name, size_bytes=size_bytes, crc32c=checksum) for checksum in checksums)


def read_chunk(
    store: Store, metadata: ArrayMetadata, index: Sequence[int], receipt: ChunkReceipt, *, out: np.ndarray | None = None
) -> np.ndarray:
    """Reads and verifies one chunk, and nothing else of its file.

    Args:
      receipt: the manifest's entry; file and chunk must match it, not only each other.
      out: filled and returned if given; C-contiguous, of the array's element type, `chunk_shape` with or without
        leading ones. If the chunk turns out to be damaged its content is undefined.

    Returns:
      The chunk, `chunk_shape` or the shape of `out`.

    Raises:
      ChunkDamaged: missing, wrong length, or a checksum differs. The length is checked before anything is allocated.
    """
    name = receipt.name
    _check_length(store, name, file_bytes(metadata), receipt)
    if out is None:
        out = np.empty(metadata.chunk_shape, metadata.dtype)
    _check_values(metadata, out, name)
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"'out' for '{name}' must be C-contiguous and writable. Pass a whole bucket, not a strided view of it."
        )
    trailer = bytearray(CRC_BYTES)
    _read(store, metadata, name, [_byte_view(out), memoryview(trailer)], start=first_byte(metadata, index))
    _check_checksum(name, crc32c(out), struct.unpack("<I", trailer)[0], receipt)
    return out


def read_chunks(
    store: Store, metadata: ArrayMetadata, name: str, *, out: Sequence[np.ndarray], receipts: Sequence[ChunkReceipt]
) -> None:
    """Reads and verifies all chunks of a file at once. The index, which is of no use here, is left unread.

    Args:
      out: per chunk, as in `read_chunk`.
      receipts: per chunk, what the manifest says.

    Raises:
      ChunkDamaged: as `read_chunk`, of the first chunk that differs. `ChunkDamaged.at` is its number in the file, or
        None if the file is missing or has another length.
    """
    _check_length(store, name, file_bytes(metadata), receipts[0])
    trailers = [bytearray(CRC_BYTES) for _ in out]
    buffers = [view for chunk, trailer in zip(out, trailers, strict=True) for view in (_byte_view(chunk), trailer)]
    _read(store, metadata, name, [memoryview(buffer) for buffer in buffers if len(buffer)], start=0)
    for at, (chunk, trailer, receipt) in enumerate(zip(out, trailers, receipts, strict=True)):
        try:
            _check_checksum(name, crc32c(chunk), struct.unpack("<I", trailer)[0], receipt)
        except ChunkDamaged as error:
            error.at = at
            raise


def check_file_index(store: Store, metadata: ArrayMetadata, name: str) -> None:
    """Reads the index of a file, which other readers need to find its chunks.

    Raises:
      IndexDamaged: it is not what was written.
      ChunkDamaged: the file is missing or has another length.
    """
    if metadata.chunks_per_file == 1:
        return
    found = bytearray(_index_bytes(metadata.chunks_per_file))
    # The length of the file is compared first: chunks of any size may be claimed, too long for an index.
    _read(store, metadata, name, [memoryview(found)], start=file_bytes(metadata) - len(found))
    if found != file_index(metadata):
        raise IndexDamaged(name, "another index", f"that of {metadata.chunks_per_file} chunks")


def _read(store: Store, metadata: ArrayMetadata, name: str, buffers: list[memoryview], *, start: int) -> None:
    size_bytes = file_bytes(metadata)
    try:
        if metadata.chunks_per_file == 1:
            store.read_into(name, buffers)
        else:
            store.read_into(name, buffers, start=start, size_bytes=size_bytes)
    except (NameNotFound, WrongSize) as error:
        raise ChunkDamaged(name, error.found, f"{size_bytes} bytes") from error


def write_whole(store: Store, path: str, values: np.ndarray) -> tuple[ArrayMetadata, ChunkReceipt, ChunkReceipt]:
    """Writes a small array of any rank as one chunk.

    Returns:
      Its metadata, the receipt of `zarr.json`, and the receipt of the chunk. An array without elements has no chunk
      file, so its receipt has size 0.
    """
    metadata = whole_metadata(path, values.shape, values.dtype)
    described = write_array_metadata(store, metadata)
    if values.size == 0:
        return metadata, described, ChunkReceipt(name=f"{path}/zarr.json", size_bytes=0, crc32c=0)
    return metadata, described, write_chunk(store, metadata, (0,) * values.ndim, values)


def whole_metadata(path: str, shape: tuple[int, ...], dtype: np.dtype) -> ArrayMetadata:
    """Metadata of an array that is one chunk. A chunk has at least one element along each axis, even where the array
    has none.
    """
    chunk_shape = tuple(max(1, length) for length in shape)
    return ArrayMetadata(path=path, shape=shape, chunk_shape=chunk_shape, dtype=dtype)


def _byte_view(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _check_values(metadata: ArrayMetadata, values: np.ndarray, name: str) -> None:
    shapes = {metadata.chunk_shape}
    trimmed = metadata.chunk_shape
    while trimmed and trimmed[0] == 1:
        trimmed = trimmed[1:]
        shapes.add(trimmed)
    if values.shape not in shapes or values.dtype != metadata.dtype:
        raise ValueError(
            f"Chunk '{name}' is {metadata.dtype} {metadata.chunk_shape}, but the array given is {values.dtype} "
            f"{values.shape}. Pass exactly one chunk."
        )


def _check_length(store: Store, name: str, computed_bytes: int, receipt: ChunkReceipt) -> None:
    try:
        found_bytes = store.size(name)
    except NameNotFound:
        raise ChunkDamaged(name, "no file", f"{computed_bytes} bytes") from None
    if found_bytes != computed_bytes:
        raise ChunkDamaged(name, f"{found_bytes} bytes", f"{computed_bytes} bytes from the array's shape")
    if receipt.size_bytes != found_bytes:
        raise ChunkDamaged(name, f"{found_bytes} bytes", f"{receipt.size_bytes} bytes as written")


def _check_checksum(name: str, found: int, trailer: int, receipt: ChunkReceipt) -> None:
    if found != trailer:
        raise ChunkDamaged(name, f"bytes with CRC-32C {found:08x}", f"{trailer:08x} from the file's own trailer")
    if receipt.crc32c != found:
        raise ChunkDamaged(name, f"bytes with CRC-32C {found:08x}", f"{receipt.crc32c:08x} as written")
