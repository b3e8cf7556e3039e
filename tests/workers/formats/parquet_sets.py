"""Small Parquet sets whose every value follows from the row's number, so that a read row can be checked on its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DenseColumn, IdColumn
from podembed.workers.data.config import ParquetData

VOCABULARY_SIZE = 1 << 20


def bag_of(number: int) -> list[int]:
    """Zero to three ids."""
    return [number * 7 + k for k in range(number % 4)]


def table_of(numbers: range) -> pa.Table:
    return pa.table(
        {
            "label": pa.array([n % 2 for n in numbers], pa.int8()),
            "half": pa.array([n / 2 for n in numbers], pa.float64()),
            "count": pa.array(list(numbers), pa.int32()),
            "weight": pa.array([1 + n % 3 for n in numbers], pa.float32()),
            "item": pa.array([n + 5 for n in numbers], pa.int64()),
            "user": pa.array([n * 3 for n in numbers], pa.int32()),
            "history": pa.array([bag_of(n) for n in numbers], pa.list_(pa.int64())),
            "number": pa.array(list(numbers), pa.int64()),
        }
    )


def write_set(folder: Path, rows_per_file: list[int], *, rows_per_group: int) -> ParquetData:
    """Writes one file per entry and declares the set, resolved."""
    first = 0
    for at, num_rows in enumerate(rows_per_file):
        pq.write_table(
            table_of(range(first, first + num_rows)), folder / f"part-{at:03d}.parquet", row_group_size=rows_per_group
        )
        first += num_rows
    return declaration(str(folder / "part-*.parquet"))


def declaration(paths: str) -> ParquetData:
    return ParquetData(
        paths,
        label="label",
        dense=("half", DenseColumn("count", "log1p")),
        features={
            "item": IdColumn("item", vocabulary_size=VOCABULARY_SIZE),
            "user": IdColumn("user", vocabulary_size=VOCABULARY_SIZE),
            "history": IdColumn("history", vocabulary_size=VOCABULARY_SIZE),
        },
        sample_weight="weight",
        sample_id="number",
    )


def check_rows(batch: Batch) -> None:
    """Every row is the one its sample id names, or padding."""
    items, users, histories = (batch.features[name].to_lists() for name in ("item", "user", "history"))
    assert list(batch.features) == ["item", "user", "history"]
    for row, number in enumerate(batch.sample_ids.tolist()):
        if number < 0:
            assert (batch.weights[row], batch.labels[row]) == (0, 0)
            assert (items[row], users[row], histories[row]) == ([], [], [])
            assert not batch.dense[row].any()
            continue
        assert batch.labels[row] == number % 2
        assert batch.weights[row] == 1 + number % 3
        np.testing.assert_array_equal(
            batch.dense[row], np.array([number / 2, np.log1p(np.float32(number))], np.float32)
        )
        assert (items[row], users[row], histories[row]) == ([number + 5], [number * 3], bag_of(number))


def assert_same(left: Batch, right: Batch) -> None:
    for part in ("dense", "labels", "weights", "sample_ids"):
        np.testing.assert_array_equal(getattr(left, part), getattr(right, part), err_msg=part)
    assert list(left.features) == list(right.features)
    for name, bags in left.features.items():
        np.testing.assert_array_equal(bags.row_splits, right.features[name].row_splits, err_msg=name)
        np.testing.assert_array_equal(bags.values, right.features[name].values, err_msg=name)
