"""`zarr.json`: every member that is written. That zarr-python and tensorstore read it is in `test_chunks`."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from podembed.workers.checkpoint.zarr_metadata import DTYPES, ArrayMetadata, metadata_bytes
from podembed.workers.storage.storage_errors import UnsafeName

BYTES = {"configuration": {"endian": "little"}, "name": "bytes"}


def document(**settings: object) -> dict[str, object]:
    shape = {"path": "data/a", "shape": (4, 5, 3), "chunk_shape": (1, 5, 3), "dtype": np.dtype("float32")}
    return json.loads(metadata_bytes(ArrayMetadata(**{**shape, **settings})))  # pyright: ignore[reportArgumentType]


def test_every_member_is_as_the_specification_spells_it() -> None:
    assert document(attributes={"k": [1, {"x": None}]}) == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 5, 3],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 5, 3]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [BYTES, {"name": "crc32c"}],
        "attributes": {"k": [1, {"x": None}]},
    }


def test_a_file_of_several_chunks_is_a_shard() -> None:
    written = document(chunks_per_file=2, separator=".")
    assert written["chunk_grid"] == {"name": "regular", "configuration": {"chunk_shape": [2, 5, 3]}}
    assert written["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "."}}
    configuration = {
        "chunk_shape": [1, 5, 3],
        "codecs": [BYTES, {"name": "crc32c"}],
        "index_codecs": [BYTES, {"name": "crc32c"}],
        "index_location": "end",
    }
    assert written["codecs"] == [{"name": "sharding_indexed", "configuration": configuration}]


def test_bfloat16_is_kept_as_its_bits_with_its_name() -> None:
    written = document(dtype=DTYPES["bfloat16"])
    assert (written["data_type"], written["attributes"]) == ("uint16", {"podembed_dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("dtype", "value", "written"),
    [("float64", math.nan, "NaN"), ("float32", -math.inf, "-Infinity"), ("int8", 1, 1), ("bool", 1, True)],
)
def test_fill_values_have_their_elements_form(dtype: str, value: float, written: object) -> None:
    assert document(dtype=DTYPES[dtype], fill_value=value)["fill_value"] == written


def test_equal_metadata_give_equal_bytes() -> None:
    one, other = (
        ArrayMetadata(path="a", shape=(2,), chunk_shape=(1,), dtype=DTYPES["int8"], attributes=attributes)
        for attributes in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    )
    assert metadata_bytes(one) == metadata_bytes(other)


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
