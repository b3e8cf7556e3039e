"""`zarr.json` of one array: the value, its bytes, and a parser that accepts only what `chunks` can read.

Source: Zarr core specification version 3, sections "Array metadata", "Chunk key encoding", and the codecs `bytes` and
`crc32c`. For files of several chunks it is the codec `sharding_indexed`, version 1.0. Element types outside the
specification are kept as the unsigned integer of their width with the true name as an attribute. So every reader opens
them. In use is `bfloat16` alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from podembed.workers.storage.store import validate_name
from podembed.workers.storage.strict_json import DocumentRefused, canonical_bytes, parse_strictly

DTYPE_ATTRIBUTE = "podembed_dtype"
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_STANDARD_DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    )
}
DTYPES: Mapping[str, np.dtype] = {**_STANDARD_DTYPES, "bfloat16": _BFLOAT16}
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_SHARDING = "sharding_indexed"
_CODECS_OF_ONE_BYTE = [{"name": "bytes"}, {"name": "crc32c"}]
_SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_RANK = 16
_MAX_ARRAY_BYTES = 1 << 62
_REQUIRED = frozenset(
    {"zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"}
)
_OPTIONAL = frozenset({"attributes", "dimension_names", "storage_transformers"})

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


def parse_metadata(path: str, name: str, data: bytes) -> ArrayMetadata:
    """Reads `zarr.json`.

    Args:
      path, name: path of the array, and name of the file for messages.

    Raises:
      DocumentRefused: not JSON within the limits, unknown or missing members, another format, codec, grid or element
        type.
    """
    document = parse_strictly(name, data, max_bytes=1 << 16)
    if not isinstance(document, dict):
        raise DocumentRefused(name, type(document).__name__, "a JSON object")
    if not _REQUIRED <= document.keys() <= _REQUIRED | _OPTIONAL:
        odd = sorted(document.keys() ^ _REQUIRED - _OPTIONAL)
        raise DocumentRefused(name, f"missing or unknown members {odd[:5]}", f"the members {sorted(_REQUIRED)}")
    _check_constants(name, document)
    attributes = document.get("attributes", {})
    if not isinstance(attributes, dict):
        raise DocumentRefused(name, "attributes that are no object", "an object")
    shape = _lengths(name, "shape", document["shape"], smallest=0)
    file_shape = _lengths(name, "chunk_shape", _grid(name, document["chunk_grid"]), smallest=1)
    chunk_shape = _inner_shape(name, document["codecs"], file_shape)
    if len(shape) != len(chunk_shape):
        raise DocumentRefused(name, f"shape {shape} with chunks {chunk_shape}", "equal ranks")
    chunks_per_file = 1 if file_shape == chunk_shape else file_shape[0] // chunk_shape[0]
    if chunks_per_file > 1 and shape[0] % file_shape[0]:
        raise DocumentRefused(name, f"shape {shape} with {file_shape} a file", "whole files along the first axis")
    dtype = _dtype(name, document["data_type"], attributes.get(DTYPE_ATTRIBUTE))
    if max(math.prod(shape), math.prod(file_shape)) * dtype.itemsize > _MAX_ARRAY_BYTES:
        raise DocumentRefused(name, f"shape {shape} with chunks {chunk_shape}", "an array below 2**62 bytes")
    return ArrayMetadata(
        path=path,
        shape=shape,
        chunk_shape=chunk_shape,
        dtype=dtype,
        fill_value=_fill_value(name, document["data_type"], document["fill_value"]),
        attributes={key: value for key, value in attributes.items() if key != DTYPE_ATTRIBUTE},
        separator=_separator(name, document["chunk_key_encoding"]),
        chunks_per_file=chunks_per_file,
    )


def _sharding(chunk_shape: Sequence[int]) -> dict[str, Any]:
    """The codec of files with several chunks, each as it would be in a file of its own."""
    configuration = {"chunk_shape": list(chunk_shape), "codecs": _CODECS, "index_codecs": _CODECS}
    return {"name": _SHARDING, "configuration": {**configuration, "index_location": "end"}}


def _inner_shape(name: str, codecs: Any, file_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a chunk in a file: that of the file, unless several chunks are one behind the other in it."""
    match codecs:
        case [{"name": "sharding_indexed", "configuration": {"chunk_shape": inner}}]:
            chunk_shape = _lengths(name, "chunk_shape", inner, smallest=1)
        case _:
            return file_shape
    if chunk_shape == file_shape:
        # It would be read as a file without an index, and be called damaged.
        raise DocumentRefused(name, "`sharding_indexed` with one chunk a file", "several, or no `sharding_indexed`")
    if not file_shape or file_shape[1:] != chunk_shape[1:] or file_shape[0] % chunk_shape[0]:
        raise DocumentRefused(name, f"chunks {chunk_shape} in files of {file_shape}", "whole chunks on the first axis")
    return chunk_shape


def _check_constants(name: str, document: Mapping[str, Any]) -> None:
    if document["zarr_format"] != 3 or document["node_type"] != "array":
        found = f"format {document['zarr_format']!r}, node {document['node_type']!r}"
        raise DocumentRefused(name, found[:200], "an array of Zarr format 3")
    if not _are_ours(document["codecs"], document["data_type"]):
        found = f"codecs {json.dumps(document['codecs'])[:200]}"
        raise DocumentRefused(name, found, "`bytes` little-endian, then `crc32c`; or several such chunks a file")
    if document.get("storage_transformers"):
        raise DocumentRefused(name, "storage transformers", "none")


def _are_ours(codecs: Any, stored: Any) -> bool:
    """Whether the codecs are those of `chunks`. Elements of one byte have no byte order, so writers leave it out."""
    if not isinstance(codecs, list) or not all(isinstance(codec, dict) for codec in codecs):
        return False
    # A codec without settings may be written with an empty configuration.
    plain = [{key: value for key, value in codec.items() if value != {}} for codec in codecs]
    if len(plain) == 1 and plain[0].get("name") == _SHARDING:
        configuration = plain[0].get("configuration")
        inner = configuration.get("chunk_shape") if isinstance(configuration, dict) else None
        return isinstance(inner, list) and plain == [_sharding(inner)]
    return plain == _CODECS or (stored in ("bool", "int8", "uint8") and plain == _CODECS_OF_ONE_BYTE)


def _grid(name: str, grid: Any) -> Any:
    expected = {"name": "regular", "configuration": {"chunk_shape": None}}
    match grid:
        case {"name": "regular", "configuration": {"chunk_shape": lengths, **more}, **rest} if not more and not rest:
            return lengths
    raise DocumentRefused(name, f"chunk grid {json.dumps(grid)[:200]}", f"a regular grid like {json.dumps(expected)}")


def _separator(name: str, encoding: Any) -> str:
    match encoding:
        case {"name": "default", "configuration": {"separator": "/" | "." as separator, **more}, **rest} if (
            not more and not rest
        ):
            return separator
        case {"name": "default", **rest} if rest in ({}, {"configuration": {}}):
            return "/"
    raise DocumentRefused(name, f"chunk names {json.dumps(encoding)[:200]}", "the default encoding with '/' or '.'")


def _lengths(name: str, what: str, lengths: Any, *, smallest: int) -> tuple[int, ...]:
    is_list = isinstance(lengths, list) and len(lengths) <= _MAX_RANK
    if not is_list or any(type(length) is not int or length < smallest for length in lengths):
        raise DocumentRefused(
            name, f"{what} {json.dumps(lengths)[:200]}", f"at most {_MAX_RANK} integers of at least {smallest}"
        )
    return tuple(lengths)


def _dtype(name: str, stored: Any, declared: Any) -> np.dtype:
    if not isinstance(stored, str) or stored not in _STANDARD_DTYPES:
        raise DocumentRefused(name, f"data type {json.dumps(stored)[:100]}", f"one of {', '.join(_STANDARD_DTYPES)}")
    if declared is None:
        return _STANDARD_DTYPES[stored]
    if declared != "bfloat16" or stored != "uint16":
        raise DocumentRefused(
            name, f"elements {json.dumps(declared)[:100]} kept as {stored}", "bfloat16 kept as uint16"
        )
    return _BFLOAT16


def _fill_value(name: str, stored: str, value: Any) -> float | int | bool:
    if stored == "bool" and type(value) is bool:
        return value
    if stored.startswith("float"):
        if isinstance(value, str) and value in _SPECIAL_FLOATS:
            return _SPECIAL_FLOATS[value]
        if type(value) in (int, float):
            return float(value)
    if "int" in stored and type(value) is int:
        return value
    raise DocumentRefused(name, f"fill value {json.dumps(value)[:100]} for {stored}", f"a value of {stored}")


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
