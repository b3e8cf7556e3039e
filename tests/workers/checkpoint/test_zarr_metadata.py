"""`zarr.json`: what we write parses back, what zarr writes parses, and everything else is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.workers.checkpoint.zarr_metadata import DTYPES, ArrayMetadata, metadata_bytes, parse_metadata
from podembed.workers.storage.storage_errors import UnsafeName
from podembed.workers.storage.strict_json import DocumentRefused

GOOD = ArrayMetadata(
    path="data/a", shape=(4, 5, 3), chunk_shape=(1, 5, 3), dtype=np.dtype("float32"), attributes={"k": [1, {"x": None}]}
)


@st.composite
def arrays(draw) -> ArrayMetadata:
    shape = draw(st.lists(st.integers(0, 1 << 11), max_size=5).map(tuple))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    chunk_shape = tuple(draw(st.integers(1, max(1, length))) for length in shape)
    chunks_per_file = draw(st.integers(1, 9)) if shape else 1
    if shape and chunks_per_file > 1:
        shape = (draw(st.integers(0, 3)) * chunks_per_file * chunk_shape[0], *shape[1:])
    return ArrayMetadata(
        path="data/a",
        shape=shape,
        chunk_shape=chunk_shape,
        chunks_per_file=chunks_per_file,
        dtype=DTYPES[dtype],
        fill_value=draw(st.sampled_from([0.0, 1.5, math.inf, -math.inf])) if dtype.startswith("float") else 0,
        attributes=draw(st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(max_size=5), max_size=3)),
        separator=draw(st.sampled_from("/.")),
    )


@given(arrays())
def test_what_is_written_parses_back(metadata: ArrayMetadata) -> None:
    assert parse_metadata("data/a", "data/a/zarr.json", metadata_bytes(metadata)) == metadata
    assert metadata_bytes(parse_metadata("data/a", "x", metadata_bytes(metadata))) == metadata_bytes(metadata)


def test_not_a_number_as_fill_value() -> None:
    written = ArrayMetadata(path="a", shape=(2,), chunk_shape=(2,), dtype=np.dtype("float64"), fill_value=math.nan)
    assert json.loads(metadata_bytes(written))["fill_value"] == "NaN"
    assert math.isnan(parse_metadata("a", "x", metadata_bytes(written)).fill_value)


def changed(**members: object) -> bytes:
    # Files of several chunks have the grid of files.
    document = json.loads(metadata_bytes(SHARDED if "sharding_indexed" in str(members) else GOOD))
    document.update(members)
    return json.dumps({key: value for key, value in document.items() if value != "REMOVED"}).encode()


def codecs(*names: object) -> list[object]:
    return [{"name": name} if isinstance(name, str) else name for name in names]


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
SHARDED = replace(GOOD, chunks_per_file=2)


def sharded(**configuration: object) -> list[dict[str, object]]:
    """The codecs of an array whose files have two chunks, with some settings replaced."""
    (codec,) = json.loads(metadata_bytes(SHARDED))["codecs"]
    return [{**codec, "configuration": {**codec["configuration"], **configuration}}]


@pytest.mark.parametrize(
    "data",
    [
        changed(zarr_format=2),
        changed(node_type="group"),
        changed(shape="REMOVED"),
        changed(unknown=1),
        changed(shape=[4, 5]),
        changed(shape=[-4, 5, 3]),
        changed(shape=[4.0, 5, 3]),
        changed(shape=[True, 5, 3]),
        changed(shape=[2**62, 2**62, 3]),
        changed(shape=[1] * 17),
        changed(shape="4"),
        changed(data_type="object"),
        changed(data_type="complex64"),
        changed(data_type={"name": "numpy.datetime64"}),
        changed(data_type=["float32"]),
        changed(codecs=[]),
        changed(codecs=codecs(LITTLE)),
        changed(codecs=codecs("crc32c", LITTLE)),
        changed(codecs=codecs(LITTLE, "gzip", "crc32c")),
        changed(codecs=codecs({"name": "bytes", "configuration": {"endian": "big"}}, "crc32c")),
        changed(codecs=codecs("bytes", "crc32c")),
        changed(codecs="bytes"),
        changed(codecs=codecs("sharding_indexed")),
        changed(codecs=sharded(chunk_shape=[1, 5])),
        changed(codecs=sharded(chunk_shape=[1, 5, 1])),
        changed(codecs=sharded(chunk_shape=[0, 5, 3])),
        changed(codecs=sharded(chunk_shape=[3, 5, 3])),
        changed(codecs=sharded(chunk_shape=[2, 5, 3])),
        changed(codecs=sharded(chunk_shape="3")),
        changed(codecs=sharded(index_location="start")),
        changed(codecs=sharded(index_codecs=codecs(LITTLE))),
        changed(codecs=sharded(codecs=codecs(LITTLE))),
        changed(codecs=sharded(extra=1)),
        changed(codecs=sharded(), shape=[5, 5, 3]),
        changed(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [0, 5, 3]}}),
        changed(chunk_grid={"name": "rectangular", "configuration": {}}),
        changed(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [1, 5, 3], "x": 1}}),
        changed(chunk_grid=3),
        changed(chunk_key_encoding={"name": "v2"}),
        changed(chunk_key_encoding={"name": "default", "configuration": {"separator": "../"}}),
        changed(chunk_key_encoding=None),
        changed(fill_value="inf"),
        changed(fill_value=None),
        changed(fill_value=True),
        changed(storage_transformers=[{"name": "x"}]),
        changed(attributes=[]),
        changed(attributes={"podembed_dtype": "bfloat16"}),
        changed(attributes={"podembed_dtype": ["object"]}),
        b"[]",
        b"null",
        b"",
        b"\x80\x04\x95",
        b'{"zarr_format": 3}',
        b'{"attributes":' + b"[" * 100 + b"]" * 100 + b"}",
        b" " * (1 << 17),
    ],
)
def test_anything_else_is_refused_with_the_files_name(data: bytes) -> None:
    with pytest.raises(DocumentRefused, match=r"data/a/zarr\.json"):
        parse_metadata("data/a", "data/a/zarr.json", data)


def test_codecs_with_empty_settings_are_ours() -> None:
    same = changed(
        codecs=[{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c", "configuration": {}}]
    )
    assert parse_metadata("data/a", "x", same) == GOOD


def test_files_of_several_chunks_are_ours() -> None:
    assert parse_metadata("data/a", "x", changed(codecs=sharded())) == SHARDED


def test_bytes_of_one_byte_elements_have_no_order() -> None:
    one_byte = changed(codecs=codecs("bytes", "crc32c"), data_type="uint8", fill_value=0)
    assert parse_metadata("data/a", "x", one_byte).dtype == np.uint8


@given(st.binary(max_size=100) | st.integers(0, 300).map(lambda at: metadata_bytes(GOOD)[:at]))
def test_garbage_is_refused_and_never_crashes(data: bytes) -> None:
    with pytest.raises(DocumentRefused):
        parse_metadata("data/a", "x", data)


class TestConstruction:
    @pytest.mark.parametrize("dtype", [object, "complex64", "U4", "datetime64[s]"])
    def test_other_element_types_are_refused(self, dtype) -> None:
        with pytest.raises(ValueError, match="one of bool"):
            ArrayMetadata(path="a", shape=(2,), chunk_shape=(1,), dtype=np.dtype(dtype))

    @pytest.mark.parametrize(("shape", "chunks"), [((2,), (0,)), ((-1,), (1,)), ((2, 2), (1,))])
    def test_impossible_shapes_are_refused(self, shape, chunks) -> None:
        with pytest.raises(ValueError, match="equal ranks"):
            ArrayMetadata(path="a", shape=shape, chunk_shape=chunks, dtype=np.dtype("float32"))

    def test_unsafe_paths_are_refused(self) -> None:
        with pytest.raises(UnsafeName):
            ArrayMetadata(path="../a", shape=(2,), chunk_shape=(1,), dtype=np.dtype("float32"))
