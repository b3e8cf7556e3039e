"""`zarr.json` of one array: the value and its bytes. Only other readers need the file: restores follow the manifest.

Source: Zarr core specification version 3, sections "Array metadata", "Chunk key encoding", and the codecs `bytes` and
`crc32c`. For files of several chunks it is the codec `sharding_indexed`, version 1.0. Element types outside the
specification are kept as the unsigned integer of their width with the true name as an attribute. So every reader opens
them. In use is `bfloat16` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from podembed.workers.storage.store import validate_name
from podembed.workers.storage.strict_json import canonical_bytes

DTYPE_ATTRIBUTE = "podembed_dtype"
_INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
_STANDARD_DTYPES = ["bool", *_INTEGERS, "float16", "float32", "float64"]
DTYPES: Mapping[str, np.dtype] = {
    **{name: np.dtype(name) for name in _STANDARD_DTYPES},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]

FLAT, NESTED = ".", "/"
"""Separators of the numbers in a file's name. Nested ones need two folders a file. To make these takes longer than what
a save does with the bytes of a small file.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMetadata:
    """One array on storage.

    Attributes:
      path: path of the array's folder, relative to the store.
      shape: shape of the array; any rank, zero lengths allowed.
      chunk_shape: shape of every chunk, at least 1 on each axis.
      dtype: one of `DTYPES`.
      fill_value: number that other readers show where a chunk is missing; here a missing chunk is an error.
      attributes: for people and other tools; plain JSON.
      separator: between the numbers of a file's name, `NESTED` or `FLAT`.
      chunks_per_file: along the first axis, which has whole files. Above 1 the file is what Zarr calls a shard.
    """

    path: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype
    fill_value: float | int | bool = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    separator: str = NESTED
    chunks_per_file: int = 1

    def __post_init__(self) -> None:
        validate_name(self.path)
        object.__setattr__(self, "dtype", np.dtype(self.dtype).newbyteorder("="))
        if self.dtype not in DTYPES.values():
            raise ValueError(
                f"Array '{self.path}' has elements of {self.dtype}; one of {', '.join(DTYPES)} is expected. Convert "
                "before saving."
            )
        if (
            len(self.shape) != len(self.chunk_shape)
            or min(self.shape, default=0) < 0
            or min(self.chunk_shape, default=1) < 1
        ):
            raise ValueError(
                f"Array '{self.path}' has shape {self.shape} and chunks {self.chunk_shape}; equal ranks, lengths >= 0 "
                "and chunk lengths >= 1 are expected. Check the table's layout."
            )
        if self.chunks_per_file != 1 and (
            self.chunks_per_file < 1 or not self.shape or self.shape[0] % self.file_shape[0]
        ):
            raise ValueError(
                f"Array '{self.path}' of shape {self.shape} has {self.chunks_per_file} chunks of {self.chunk_shape} a "
                "file. Expected whole files along the first axis. Check the number of buckets per file."
            )

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-length // chunk) for length, chunk in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the part of the array that one file holds."""
        if self.chunks_per_file == 1:
            return self.chunk_shape
        return (self.chunks_per_file * self.chunk_shape[0], *self.chunk_shape[1:])


def dtype_name(dtype: np.dtype) -> str:
    """The name of an element type as manifests and metadata spell it."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def metadata_bytes(metadata: ArrayMetadata) -> bytes:
    """The content of `zarr.json`; equal metadata give equal bytes."""
    attributes = dict(metadata.attributes)
    stored = dtype_name(metadata.dtype)
    if stored not in _STANDARD_DTYPES:
        attributes[DTYPE_ATTRIBUTE] = stored
        stored = f"uint{8 * metadata.dtype.itemsize}"
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(metadata.shape),
        "data_type": stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(metadata.file_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": metadata.separator}},
        "fill_value": _fill_value_json(stored, metadata.fill_value),
        "codecs": _CODECS if metadata.chunks_per_file == 1 else [_sharding(metadata.chunk_shape)],
        "attributes": attributes,
    }
    return canonical_bytes(document) + b"\n"


def _sharding(chunk_shape: Sequence[int]) -> dict[str, Any]:
    """The codec of files with several chunks, each as it would be in a file of its own."""
    configuration = {"chunk_shape": list(chunk_shape), "codecs": _CODECS, "index_codecs": _CODECS}
    return {"name": "sharding_indexed", "configuration": {**configuration, "index_location": "end"}}


def _fill_value_json(stored: str, value: float | int | bool) -> float | int | bool | str:
    if stored == "bool":
        return bool(value)
    if not stored.startswith("float"):
        return int(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(value)
