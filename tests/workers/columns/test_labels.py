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
from podembed.workers.data.config import CsvData, NpyData, ParquetData
from podembed.workers.data.errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from tests.small_job import small_job


def read(data: ParquetData | CsvData | NpyData) -> Batch:
    index = build_index(data)
    plan = training_plan(index, num_lanes=1, batch_size=index.num_rows, seed=1)
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


def test_the_default_loss_asks_for_binary_labels_and_another_one_does_not(small_data: str) -> None:
    job = small_job(folder=small_data, audit=False, evaluate=True)
    assert job.resolved_data.binary_labels
    assert job.resolved_data.for_evaluation().binary_labels
    assert not replace(job, loss=optax.squared_error).resolved_data.binary_labels
    assert not replace(job, loss=optax.sigmoid_binary_cross_entropy).resolved_data.binary_labels
