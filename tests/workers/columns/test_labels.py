"""Labels under the default loss: a few wrong ones are malformed rows, many are a column that means something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import Label
from podembed.workers.data.config import CsvData, NpyData, ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from tests.small_job import small_job


def read(data: ParquetData | CsvData | NpyData) -> Batch:
    index = build_index(data)
    plan = training_plan(index, num_lanes=1, batch_size=index.num_rows, seed=1, order=data.order)
    return InputReader(data, index, plan, [0]).read(0)


def declared(folder: Path, labels: list[float | None], *, max_bad_rows: int = 0, binary: bool = True) -> ParquetData:
    pq.write_table(pa.table({"y": pa.array(labels, pa.float64())}), folder / "part.parquet")
    return ParquetData(str(folder / "*.parquet"), label="y", max_bad_rows=max_bad_rows, binary_labels=binary)


@pytest.mark.parametrize("label", [2, -1, 0.5])
def test_one_wrong_label_is_a_malformed_row_with_its_place(tmp_path: Path, label: float) -> None:
    labels: list[float | None] = [0, 1] * 20
    labels[17] = label
    with pytest.raises(
        InputError,
        match=rf"Found label {label:g} in .*part\.parquet, row group 0, row 17, column 'y'\. .*JobConfig\.loss",
    ):
        read(declared(tmp_path, labels))
    batch = read(declared(tmp_path, labels, max_bad_rows=1))
    assert batch.weights.sum() == len(labels) - 1
    assert sorted(batch.labels[batch.weights > 0].tolist()) == [0] * 20 + [1] * 19


def test_labels_that_are_no_numbers_keep_their_own_reason(tmp_path: Path) -> None:
    labels: list[float | None] = [0, 1] * 20
    labels[3], labels[4] = None, float("nan")
    batch = read(declared(tmp_path, labels, max_bad_rows=2))
    assert batch.weights.sum() == len(labels) - 2
    for wrong, message in ((None, "null in .*row 3"), (float("inf"), "inf in .*row 3")):
        labels[3], labels[4] = wrong, 0
        with pytest.raises(InputError, match=message):
            read(declared(tmp_path, labels))


@pytest.mark.parametrize("labels", [[1, 2, 3, 4, 5] * 8, [-1, 1] * 20, [0.1, 0.9] * 20])
def test_a_column_of_other_labels_stops_at_once_whatever_is_tolerated(
    tmp_path: Path, labels: list[float | None]
) -> None:
    with pytest.raises(InputError, match=r"labels such as .* in column 'y' of .*part\.parquet.*declare a loss"):
        read(declared(tmp_path, labels, max_bad_rows=1_000))
    assert read(declared(tmp_path, labels, binary=False)).weights.all()


def test_every_kind_of_file_is_checked(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y\n" + "1\n0\n" * 9 + "3\n")
    with pytest.raises(InputError, match=r"Found label 3 in .*a\.csv, row group 0, row 18"):
        read(CsvData(str(tmp_path / "a.csv"), label="y", binary_labels=True))
    np.save(tmp_path / "labels.npy", np.array([0, 1, 1, 4], np.int32))
    for kind in ("dense", "sparse"):
        np.save(tmp_path / f"{kind}.npy", np.zeros((4, 1), np.int32))
    with pytest.raises(InputError, match=r"Found label 4 in .*labels\.npy, row group 0, row 3"):
        read(NpyData(str(tmp_path / "labels.npy"), binary_labels=True))


def test_further_labels_are_columns_and_a_null_that_is_masked_is_nan(tmp_path: Path) -> None:
    table = pa.table({"click": [1, 0, 1, 0], "buy": [None, 1.0, None, 0.0], "grade": [0, 3, 2, 1]})
    pq.write_table(table, tmp_path / "part.parquet")
    labels = ("click", Label("buy", missing="mask"), Label("grade", num_classes=4))
    data = ParquetData(str(tmp_path / "part.parquet"), labels=labels, order="files")
    batch = read(data)
    assert batch.labels.tolist() == [1, 0, 1, 0]
    assert list(batch.columns) == ["buy", "grade"]
    np.testing.assert_array_equal(batch.columns["buy"], np.array([np.nan, 1, np.nan, 0], np.float32))
    assert batch.columns["grade"].tolist() == [0, 3, 2, 1]
    # The main label may be another one, and may be missing, too.
    assert np.isnan(read(replace(data, label="buy")).labels).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("grades", "message"),
    [
        ([0, 1, None], r"Found null in .*row 2, column 'grade'"),
        (
            [0, 1, 2.5],
            r"Found label 2\.5 in .*row 2, column 'grade'. Labels of 3 classes are whole numbers from 0 to 2",
        ),
        ([0, 1, 3], r"Found label 3 in "),
        ([0, 1, float("inf")], r"Found inf in .*row 2"),
        ([1, 2, 3] * 10, r"labels such as 3 in column 'grade'.* 10 of the 30 rows of row group 0 have no class"),
    ],
)
def test_a_further_label_is_checked_like_the_first(tmp_path: Path, grades: list[float | None], message: str) -> None:
    table = pa.table({"click": [1.0] * len(grades), "grade": pa.array(grades, pa.float64())})
    pq.write_table(table, tmp_path / "part.parquet")
    data = ParquetData(
        str(tmp_path / "part.parquet"), labels=("click", Label("grade", num_classes=3)), max_bad_rows=len(grades) // 30
    )
    with pytest.raises(InputError, match=message):
        read(data)
    if len(grades) == 3:
        batch = read(replace(data, max_bad_rows=1))
        np.testing.assert_array_equal(np.sort(batch.columns["grade"]), [0, 0, 1])


def test_the_default_loss_asks_for_binary_labels_and_another_one_does_not(small_data: str) -> None:
    job = small_job(folder=small_data, audit=False, evaluate=True)
    assert job.resolved_data.binary_labels
    assert job.resolved_data.for_evaluation().binary_labels
    assert not replace(job, loss=optax.squared_error).resolved_data.binary_labels
    assert not replace(job, loss=optax.sigmoid_binary_cross_entropy).resolved_data.binary_labels
