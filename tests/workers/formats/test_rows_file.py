"""First values of tables from files: the rows that a host holds, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.table import table as tables
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.data.input_errors import InputError
from podembed.workers.formats.rows_file import RowsOfFile

NUM_ROWS, DIM = 101, 6
ROWS = np.random.default_rng(0).normal(size=(NUM_ROWS, DIM))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ">f4"])
def test_hosts_hold_their_rows_of_a_numpy_file(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts that are smaller than the table, and of a table that is cut."""
    monkeypatch.setattr(tables, "_PART_BYTES", 4 * DIM * 17)
    path = tmp_path / "rows.npy"
    np.save(path, ROWS.astype(dtype))
    check(str(path), ROWS.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float32, "F32"), (np.float64, "F64"), (np.float16, "F16"), (ml_dtypes.bfloat16, "BF16")]
)
def test_hosts_hold_their_rows_of_a_safetensors_file(dtype: Any, name: str, tmp_path: Path) -> None:
    data = ROWS.astype(dtype).tobytes()
    for names in (("embeddings",), ("rows", "accumulator")):
        path = damaged(tmp_path / "rows.safetensors", header(*names, dtype=name, data_offsets=[0, len(data)]) + data)
        check(path, ROWS.astype(dtype).astype(np.float32))


def test_a_file_may_lie_in_a_store(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "rows.npy"), "/first/rows.npy")
    check("memory://first/rows.npy", ROWS.astype(np.float32))
    memory.rm("/first", recursive=True)


def check(path: str, expected: np.ndarray) -> None:
    source = RowsOfFile(path, "items")
    source.check(num_rows=NUM_ROWS, dim=DIM)
    spec = replace(TableSpec.of(TableConfig(NUM_ROWS, DIM, name="items"), seed=0, num_buckets=8), initializer=source)
    for buckets in (np.arange(8), np.array([1, 2, 6])):
        table = Table(spec, buckets)
        calls: list[None] = []
        table.initialize(on_part=lambda calls=calls: calls.append(None))
        assert len(calls) > len(buckets)
        for bucket in buckets:
            ids = np.arange(bucket, NUM_ROWS, 8)
            rows = table.bucket(int(bucket))["rows"]
            np.testing.assert_array_equal(rows[: len(ids)], expected[ids])
            assert not rows[len(ids) :].any()


def npy(path: Path, rows: Any) -> str:
    np.save(path, rows)
    return str(path)


def damaged(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def header(*names: str, **changed: Any) -> bytes:
    """Of a file in the form of safetensors, padded with spaces as that may be."""
    tensor = {"dtype": "F32", "shape": [NUM_ROWS, DIM], "data_offsets": [0, 4 * NUM_ROWS * DIM]} | changed
    text = json.dumps({"__metadata__": {"format": "np"}} | dict.fromkeys(names or ("rows",), tensor)).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: str(at / "none.npy"), "Found no file .*none.npy"),
        (lambda at: npy(at / "a.npy", ROWS[:50]), r"with shape \[50, 6\] of float64. Expected \[101, 6\] of floating"),
        (lambda at: npy(at / "a.npy", np.zeros((NUM_ROWS, DIM), int)), r"of int64. Expected \[101, 6\] of floating"),
        (lambda at: npy(at / "a.npy", np.asfortranarray(ROWS)), r"in Fortran order.*np.ascontiguousarray\(array"),
        (lambda at: npy(at / "a.npy", np.zeros((NUM_ROWS, DIM), object)), "Found .*a.npy of dtype object"),
        (lambda at: damaged(at / "a.npy", b"rows"), "does not open as .npy"),
        (lambda at: damaged(at / "a.safetensors", b"{}"), "with a header of"),
        (lambda at: damaged(at / "a.safetensors", (9).to_bytes(8, "little") + b"[1, 2, 3]"), r"the tensors \[\]"),
        (lambda at: damaged(at / "a.safetensors", header()), r"bytes for a tensor of shape \[101, 6\]"),
        (
            lambda at: damaged(at / "a.safetensors", header("users", "items")),
            r"with the tensors \['items', 'users'\]. Expected one tensor",
        ),
        (lambda at: damaged(at / "a.safetensors", header(dtype="I64")), "a tensor of dtype I64"),
        (lambda at: damaged(at / "a.safetensors", header(shape=[606])), r"shape \[606\]"),
    ],
)
def test_a_file_of_something_else_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        RowsOfFile(make(tmp_path), "items").check(num_rows=NUM_ROWS, dim=DIM)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_value_that_would_spoil_all_others_is_refused(value: float, tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[17, 3] = value
    path = npy(tmp_path / "rows.npy", rows)
    with pytest.raises(InputError, match="not finite in row 17 of initial_rows=.*rows.npy"):
        RowsOfFile(path, "items")(np.arange(10, 30), DIM, 0)
