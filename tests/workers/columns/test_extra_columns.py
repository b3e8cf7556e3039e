"""Extra columns from Arrow to the arrays of a batch, and what is refused with its place."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DataConfigError, DenseColumn
from podembed.workers.data.config import CsvData, NpyData, ParquetData
from podembed.workers.data.extra_columns import ExtraColumn, IntegerColumn, ListColumn, VectorColumn
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan


def read(data: ParquetData | CsvData | NpyData) -> Batch:
    index = build_index(data)
    plan = training_plan(index, num_lanes=1, batch_size=index.num_rows + 1, seed=1, order="files")
    return InputReader(data, index, plan, [0]).read(0)


def column_of(folder: Path, values: pa.Array, declared: ExtraColumn | str, *, max_bad_rows: int = 0) -> Batch:
    """A file of one column beside the label, read with a row of padding."""
    table = pa.table({"y": pa.array([0.0] * len(values)), "c": values})
    pq.write_table(table, folder / "part.parquet")
    data = ParquetData(str(folder / "part.parquet"), label="y", extra=(declared,), max_bad_rows=max_bad_rows)
    return read(data)


BIG = 2**40 + 7
TIMES = [datetime(2024, 5, 1, 0, 0, 1), None, datetime(2024, 5, 1, 1)]


@pytest.mark.parametrize(
    ("values", "declared", "expected"),
    [
        (pa.array([1.5, None, 3.0]), "c", np.array([1.5, 0, 3, 0], np.float32)),
        (pa.array([0, 1, 2]), DenseColumn("c", "log1p"), np.log1p(np.array([0, 1, 2, 0], np.float32))),
        (pa.array([5, None, -7]), IntegerColumn("c", missing=-1), np.array([5, -1, -7, 0], np.int32)),
        (pa.array([BIG, -1]), IntegerColumn("c", "int64"), np.array([[7, 256], [2**32 - 1] * 2, [0, 0]], np.uint32)),
        (
            pa.array(TIMES),
            IntegerColumn("c", unit="s", since="2024-05-01", missing=-1),
            np.array([1, -1, 3600, 0], np.int32),
        ),
        (
            pa.array([[1, 2], None, [3, None]], pa.list_(pa.float64())),
            VectorColumn("c", 2),
            np.array([[1, 2], [0, 0], [3, 0], [0, 0]], np.float32),
        ),
        (
            pa.array([[1, 2], None], pa.list_(pa.float32(), 2)),
            VectorColumn("c", 2),
            np.array([[1, 2], [0, 0], [0, 0]], np.float32),
        ),
        (
            pa.array([[1, 2, 3, 4], [], None, [5]]),
            ListColumn("c", 3, "int32"),
            np.array([[1, 2, 3], [0, 0, 0], [0, 0, 0], [5, 0, 0], [0, 0, 0]], np.int32),
        ),
        (
            pa.array([[1, 2, 3, 4], [], None, [5], [6, None, 7, None]]),
            ListColumn("c", 3, "int32", keep="last"),
            np.array([[2, 3, 4], [0, 0, 0], [0, 0, 0], [5, 0, 0], [0, 7, 0], [0, 0, 0]], np.int32),
        ),
        (
            pa.array([[BIG, 8], [1, BIG, 3]]),
            ListColumn("c", 1, "int64", keep="last"),
            np.array([[[8, 0]], [[3, 0]], [[0, 0]]], np.uint32),
        ),
        (pa.array([[0.5, None]]), ListColumn("c", 2), np.array([[0.5, 0], [0, 0]], np.float32)),
        (
            pa.array([[BIG], [1, 2, 3]]),
            ListColumn("c", 2, "int64"),
            np.array([[[7, 256], [0, 0]], [[1, 0], [2, 0]], [[0, 0], [0, 0]]], np.uint32),
        ),
        (
            pa.array([TIMES[:1], TIMES]),
            ListColumn("c", 3, "int32", unit="s", since="2024-05-01"),
            np.array([[1, 0, 0], [1, 0, 3600], [0, 0, 0]], np.int32),
        ),
    ],
)
def test_a_column_becomes_an_array_of_the_batch(
    tmp_path: Path, values: pa.Array, declared: ExtraColumn | str, expected: np.ndarray
) -> None:
    batch = column_of(tmp_path, values, declared)
    found = batch.columns["c"]
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    if isinstance(declared, ListColumn):
        lengths = [min(declared.max_length, len(one)) if one is not None else 0 for one in values.to_pylist()]
        assert batch.columns["c/length"].tolist() == [*lengths, 0]
        assert batch.columns["c/length"].dtype == np.int32


def test_rows_are_shuffled_with_their_columns(tmp_path: Path) -> None:
    """Over lanes, row groups and steps, against the dense column of the same numbers."""
    numbers = np.arange(500)
    lists = [list(range(number, number + number % 4)) for number in numbers.tolist()]
    table = pa.table(
        {
            "y": numbers % 2,
            "x": numbers.astype(np.float32),
            "pair": pa.array(np.stack([numbers, -numbers], 1).tolist(), pa.list_(pa.float32())),
            "list": pa.array(lists),
        }
    )
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=64)
    extra = (VectorColumn("pair", 2), ListColumn("list", 2, "int32"))
    data = ParquetData(str(tmp_path / "part.parquet"), label="y", dense=("x",), extra=extra)
    plan = training_plan(build_index(data), num_lanes=4, batch_size=32, seed=1)
    reader = InputReader(data, build_index(data), plan, range(4))
    seen = 0
    for step in range(plan.steps_per_epoch):
        batch = reader.read(step)
        real = ~batch.is_padding
        x = batch.dense[:, 0]
        np.testing.assert_array_equal(batch.columns["pair"], np.stack([x, -x], 1))
        lengths = np.where(real, np.minimum(x.astype(int) % 4, 2), 0)
        np.testing.assert_array_equal(batch.columns["list/length"], lengths)
        items = np.where(np.arange(2) < lengths[:, None], x[:, None] + np.arange(2), 0)
        np.testing.assert_array_equal(batch.columns["list"], items)
        seen += int(real.sum())
    assert seen == 500


@pytest.mark.parametrize(
    ("values", "declared", "message"),
    [
        (pa.array([0, BIG]), IntegerColumn("c"), rf"Found {BIG} in .*row 1, column 'c'.*dtype='int64'"),
        (
            pa.array([0, 2**63], pa.uint64()),
            IntegerColumn("c", "int64"),
            rf"Found {2**63} in .*row 1, column 'c'",
        ),
        (
            pa.array([[1.0], [1.0, 2.0]]),
            VectorColumn("c", 1),
            r"Found 2 numbers in .*row 1, column 'c'. Vectors have 1",
        ),
        (pa.array([[1.0], []]), VectorColumn("c", 1), r"Found 0 numbers in .*row 1"),
        (pa.array([[1.0], [float("nan")]]), VectorColumn("c", 1), r"Found nan in .*row 1, column 'c'"),
        (pa.array([[], [1, BIG]]), ListColumn("c", 3, "int32"), rf"Found {BIG} in .*row 1, column 'c'"),
        (pa.array([[1.0], [float("inf")]]), ListColumn("c", 3), r"Found inf in .*row 1"),
    ],
)
def test_a_wrong_value_is_a_malformed_row(
    tmp_path: Path, values: pa.Array, declared: ExtraColumn, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        column_of(tmp_path, values, declared)
    batch = column_of(tmp_path, values, declared, max_bad_rows=1)
    assert batch.sample_ids.tolist() == [0, -1, -1]
    assert not batch.columns["c"][1].any()


@pytest.mark.parametrize(
    ("values", "declared", "message"),
    [
        (pa.array([0.5]), IntegerColumn("c"), "'c' of type double .* Expected a column of integers, or of times"),
        (pa.array([1]), VectorColumn("c", 3), "'c' of type int64 .* Expected a column of lists of 3 numbers"),
        (pa.array([[0.5]]), ListColumn("c", 3, "int32"), "Expected a column of lists of integers or times"),
        (pa.array([["a"]]), ListColumn("c", 3), "Expected a column of lists of numbers"),
        (pa.array([[1]]), ListColumn("c", 3, "int32", unit="s"), "Expected a column of lists of integers or times"),
        (pa.array(["a"]), "c", "'c' of type string .* Expected an integer, float or boolean column"),
    ],
)
def test_a_column_of_another_type_is_refused_by_name(
    tmp_path: Path, values: pa.Array, declared: ExtraColumn | str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        column_of(tmp_path, values, declared)


def test_csv_has_them_and_npy_has_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y,age,at,image,times,seen\n1,3,12,0.5 1.5,7 8 9,2024-05-01T00:01\n0,,,,,\n")
    extra = (
        "age",
        IntegerColumn("at", missing=-1),
        VectorColumn("image", 2),
        ListColumn("times", 2, "int32"),
        IntegerColumn("seen", unit="m", since="midnight"),
    )
    batch = read(CsvData(str(tmp_path / "a.csv"), label="y", extra=extra, list_separators={"image": " ", "times": " "}))
    found = {name: values[:2].tolist() for name, values in batch.columns.items()}
    assert found == {
        "age": [3, 0],
        "at": [12, -1],
        "image": [[0.5, 1.5], [0, 0]],
        "times": [[7, 8], [0, 0]],
        "times/length": [2, 0],
        "seen": [1, 0],
    }
    np.save(tmp_path / "labels.npy", np.array([0, 1], np.int32))
    for kind in ("dense", "sparse"):
        np.save(tmp_path / f"{kind}.npy", np.array([[3], [4]], np.int32))
    batch = read(NpyData(str(tmp_path / "labels.npy"), extra=("int_0", IntegerColumn("cat_0"))))
    assert [values[:2].tolist() for values in batch.columns.values()] == [[3, 4], [3, 4]]
    with pytest.raises(InputError, match=r"'int_0' of type int32 .*lists of 2 numbers"):
        read(NpyData(str(tmp_path / "labels.npy"), extra=(VectorColumn("int_0", 2),)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParquetData("a", label="y", extra="age"), r"extra='age'. Expected a tuple"),  # pyright: ignore
        (lambda: ParquetData("a", label="y", extra=("age", IntegerColumn("age"))), r"columns \['age'\] more than once"),
        (lambda: ParquetData("a", label="y", extra=("y",)), r"\['y'\] more than once, or among the labels \['y'\]"),
        (lambda: VectorColumn("a", 0), "Found 0 as size of vector column 'a'"),
        (lambda: ListColumn("a", 0), "Found 0 as max_length of list column 'a'"),
        (lambda: ListColumn("a", 3, "int8"), "'int8' as dtype of list column 'a'"),  # type: ignore[arg-type]
        (lambda: IntegerColumn("a", missing=2**31), "missing=2147483648 for column 'a'. Expected an int32"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_refused(make: Any, message: str) -> None:
    with pytest.raises(DataConfigError, match=message):
        make()


DENSE = ("x", VectorColumn("v", 2), DenseColumn("x2", "log1p"))
BLOCK = np.array([[1, 0.5, 2, np.log1p(np.float32(3))], [4, 0, 0, 0], [5, 6, 0, 0]], np.float32)


def test_vectors_are_dense_numbers_in_their_place(tmp_path: Path) -> None:
    columns = {"y": [0.0, 1.0, 1.0], "x": [1, 4, 5], "v": [[0.5, 2], None, [6, None]], "x2": [3, None, -1]}
    pq.write_table(pa.table(columns), tmp_path / "part.parquet")
    data = ParquetData(str(tmp_path / "part.parquet"), label="y", dense=DENSE, extra=(VectorColumn("v", 2),))
    batch = read(data)
    assert data.num_dense == 4
    np.testing.assert_array_equal(batch.dense, np.concatenate([BLOCK, np.zeros((1, 4))]))
    np.testing.assert_array_equal(batch.columns["v"], batch.dense[:, 1:3])
    (tmp_path / "part.csv").write_text("y,x,v,x2\n0,1,0.5 2,3\n1,4,,\n1,5,6 0,-1\n")
    lists = {"v": " "}
    found = read(CsvData(str(tmp_path / "part.csv"), label="y", dense=DENSE, list_separators=lists))
    np.testing.assert_array_equal(found.dense, batch.dense)


def test_dense_vectors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"y": [0.0, 1.0], "v": [[1.0, 2.0], [3.0]]}), path)
    with pytest.raises(InputError, match=r"Found 1 numbers in .*row 1, column 'v'. Vectors have 2 numbers"):
        read(ParquetData(str(path), label="y", dense=(VectorColumn("v", 2),)))
    tolerant = read(ParquetData(str(path), label="y", dense=(VectorColumn("v", 2),), max_bad_rows=1))
    np.testing.assert_array_equal(tolerant.dense, [[1, 2], [0, 0], [0, 0]])
    with pytest.raises(InputError, match=r"Found column 'y' of type double .*Expected a column of lists of 2 numbers"):
        build_index(ParquetData(str(path), label="y", dense=(VectorColumn("y", 2),)))
    with pytest.raises(DataConfigError, match=r"Found dense columns \['v'\] more than once"):
        ParquetData(str(path), label="y", dense=("v", VectorColumn("v", 2)))
    with pytest.raises(DataConfigError, match=r"Found dense=.*IntegerColumn.*Expected .*DenseColumn or VectorColumn"):
        ParquetData(str(path), label="y", dense=(IntegerColumn("v"),))  # pyright: ignore[reportArgumentType]
    for kind, values in (("labels", np.zeros(2)), ("dense", np.zeros((2, 3))), ("sparse", np.zeros((2, 1), int))):
        np.save(tmp_path / f"d_{kind}.npy", values)
    with pytest.raises(InputError, match=r"Found column 'int_0' of type double.*Expected a column of lists"):
        build_index(NpyData(str(tmp_path / "d_labels.npy"), dense=(VectorColumn("int_0", 3),)))
