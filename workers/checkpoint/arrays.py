"""What a manifest says of an array. `ArrayFiles` is one of a table. `DenseFile` is one chunk: a leaf of the dense
state, or the changed rows of a table.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np

from podembed.workers.checkpoint.chunks import ChunkReceipt, chunk_name, read_chunk, whole_metadata, write_whole
from podembed.workers.checkpoint.zarr_metadata import DTYPES, ArrayMetadata, dtype_name
from podembed.workers.storage.store import Store, is_safe_name

_MAX_READABLE_LENGTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFiles:
    """One array of a table on storage: its rows, or one slot.

    Attributes:
      name: `rows`, or the slot's name.
      path: path of the Zarr array, relative to the run.
      width: elements of one row.
      dtype: element type, as `zarr_metadata.DTYPES` spells it.
      metadata_size_bytes, metadata_crc32c: size and checksum of the whole `zarr.json`.
    """

    name: str
    path: str
    width: int
    dtype: str
    metadata_size_bytes: int
    metadata_crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFile:
    """A Zarr array of one chunk. An empty one has no chunk and `size_bytes` 0.

    Attributes:
      key: name that its owner gives it: the place of a leaf in the dense state, or the name of an array.
      metadata_size_bytes, metadata_crc32c: size and checksum of the whole `zarr.json`.
    """

    key: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    crc32c: int
    metadata_size_bytes: int
    metadata_crc32c: int

    @property
    def metadata(self) -> ArrayMetadata:
        """The required content of its `zarr.json`."""
        return whole_metadata(self.path, self.shape, DTYPES[self.dtype])

    @property
    def chunk_file(self) -> str:
        """The name of its one chunk."""
        return chunk_name(self.metadata, (0,) * len(self.shape)) if self.size_bytes else f"{self.path}/c"

    def file_sizes(self) -> dict[str, int]:
        """Name → size of its files."""
        sizes = {f"{self.path}/zarr.json": self.metadata_size_bytes}
        return sizes | ({self.chunk_file: self.size_bytes} if self.size_bytes else {})


def safe_segment(text: str) -> str:
    """A file name for any text: itself if it is safe, else its readable part with a hash, so that distinct texts stay
    distinct.
    """
    # A text that looks like the second form is hashed too; otherwise it could be made to collide.
    if (
        is_safe_name(text)
        and "/" not in text
        and len(text) <= _MAX_READABLE_LENGTH
        and not re.search(r"-[0-9a-f]{16}$", text)
    ):
        return text
    readable = re.sub(r"[^A-Za-z0-9_]+", "_", text)[:_MAX_READABLE_LENGTH]
    return f"{readable or '_'}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def write_array(store: Store, path: str, key: str, values: np.ndarray) -> DenseFile:
    """Writes an array as one chunk. Durable when it returns."""
    metadata, described, receipt = write_whole(store, path, np.asarray(values))
    return DenseFile(
        key=key,
        path=metadata.path,
        shape=metadata.shape,
        dtype=dtype_name(metadata.dtype),
        size_bytes=receipt.size_bytes,
        crc32c=receipt.crc32c,
        metadata_size_bytes=described.size_bytes,
        metadata_crc32c=described.crc32c,
    )


def read_dense(store: Store, file: DenseFile) -> np.ndarray:
    """Reads and verifies one array.

    Raises:
      ChunkDamaged: it is missing or differs from the manifest.
    """
    if file.size_bytes == 0:
        return np.empty(file.shape, DTYPES[file.dtype])
    receipt = ChunkReceipt(name=file.chunk_file, size_bytes=file.size_bytes, crc32c=file.crc32c)
    return read_chunk(store, file.metadata, (0,) * len(file.shape), receipt)
