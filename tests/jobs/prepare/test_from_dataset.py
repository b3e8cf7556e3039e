"""Data sets of other libraries become Parquet files with the same rows in the same order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed import IdColumn, ParquetData, prepare_dataset
from podembed.jobs.prepare.settings import PrepareError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, evaluation_plan

NUM_ROWS = 25


def table() -> pa.Table:
    numbers = np.arange(NUM_ROWS)
    return pa.table(
        {
            "y": (numbers % 2).astype(np.int8),
            "word": [f"w{number % 7}" for number in numbers],
            "big": pa.array((numbers * 2**58).astype(np.uint64)),
            "tags": [list(range(number % 3)) for number in numbers],
        }
    )


def rows_of(pattern: str) -> list[dict[str, Any]]:
    files = sorted(Path(pattern).parent.glob(Path(pattern).name))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [10, 10, 20], [24]])
def test_rows_keep_their_order_in_groups_of_one_size(tmp_path: Path, cuts: list[int]) -> None:
    whole = table()
    bounds = [0, *cuts, NUM_ROWS]
    parts: Any = [whole.slice(first, last - first) for first, last in pairwise(bounds)]
    pattern = prepare_dataset(iter(parts), tmp_path / "set", rows_per_group=4, groups_per_file=3)
    assert rows_of(pattern) == whole.to_pylist()
    data = ParquetData(pattern, label="y", features={"word": IdColumn("word", "hash"), "big": IdColumn("big", "hash")})
    index = build_index(data.resolved({"word": 100, "big": 100}))
    assert index.row_group_rows == (4, 4, 4, 4, 4, 4, 1)
    assert [len(file.row_group_rows) for file in index.files] == [3, 3, 1]


def test_what_was_prepared_is_read(tmp_path: Path) -> None:
    pattern = prepare_dataset(table(), tmp_path / "set")
    data = ParquetData(pattern, label="y", features={"word": IdColumn("word", "hash")}).resolved({"word": 100})
    index = build_index(data)
    plan = evaluation_plan(index, num_lanes=1, batch_size=NUM_ROWS)
    ids = InputReader(data, index, plan, [0]).read(0).features["word"].to_lists()
    assert ids[:7] == ids[7:14]
    assert len({one for (one,) in ids}) == 7


def test_a_hugging_face_dataset_keeps_its_order(tmp_path: Path) -> None:
    import datasets

    rows = table().to_pylist()
    given = datasets.Dataset.from_list(rows)
    assert rows_of(prepare_dataset(given, tmp_path / "one", rows_per_group=10)) == rows
    chosen = given.filter(lambda row: row["y"] == 1).select(range(9, -1, -1)).with_format("numpy")
    assert rows_of(prepare_dataset(chosen, tmp_path / "two", rows_per_group=4)) == rows[1:20:2][::-1]
    streamed = given.to_iterable_dataset(num_shards=2)
    assert rows_of(prepare_dataset(streamed, tmp_path / "three", rows_per_group=4)) == rows
    with pytest.raises(PrepareError, match="Found a DatasetDict. .*Pass one split"):
        prepare_dataset(datasets.DatasetDict(train=given), tmp_path / "four")


@pytest.mark.ray
def test_a_dataset_of_ray_keeps_its_order(ray_cluster: None, tmp_path: Path) -> None:
    import ray.data

    # For each of them Ray starts a process, which takes seconds of a processor.
    parts = [table().slice(0, 13), table().slice(13)]
    (done := tmp_path / "done").mkdir()
    given = ray.data.from_arrow(parts).map_batches(
        _with_vector, batch_size=None, batch_format="pyarrow", fn_kwargs={"done": done}
    )
    found = rows_of(prepare_dataset(given, tmp_path / "set", rows_per_group=8))
    assert [row.pop("vector") for row in found] == [[float(row["y"]), 1.0] for row in found]
    assert found == table().to_pylist()
    assert not given.context.execution_options.preserve_order


def _with_vector(part: pa.Table, *, done: Path) -> pa.Table:
    """The first part is done after the last one."""
    if part.num_rows == 13:
        deadline = time.monotonic() + 60.0
        while not list(done.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
    (done / str(part.num_rows)).touch()
    vectors = [[float(label), 1.0] for label in part.column("y").to_pylist()]
    return part.append_column("vector", pa.array(vectors))


def test_tensors_become_lists(tmp_path: Path) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(3, 2, 2))
    pattern = prepare_dataset(pa.table({"image": tensors}), tmp_path / "set")
    assert rows_of(pattern)[1] == {"image": [4, 5, 6, 7]}


def parts_of(*columns: dict[str, Any]) -> Iterator[pa.Table]:
    return (pa.table(column) for column in columns)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (parts_of({"a": [1]}, {"a": ["x"]}), r"column 'a' of type string in a part.*Expected int64"),
        (parts_of({"a": [1]}, {"b": [1]}), r"columns \['b'\] in a part.*Expected \['a'\]"),
        (parts_of(), "Found no rows"),
        ([[1, 2]], "Found a list among the tables"),
        ({"train": table()}, "Found a dict.*Pass one split"),
        (7, "Found a int"),
        ([pa.table([[1], [2], [3]], names=["a", "b", "a"])], "Found 2 columns named 'a' in the data set"),
    ],
)
def test_what_is_no_data_set_is_refused_and_leaves_nothing(tmp_path: Path, given: Any, words: str) -> None:
    with pytest.raises(PrepareError, match=words):
        prepare_dataset(given, tmp_path / "set")
    assert not list(tmp_path.iterdir())


def test_a_part_without_values_fits_every_type_and_a_folder_is_never_replaced(tmp_path: Path) -> None:
    pattern = prepare_dataset(parts_of({"a": [1]}, {"a": [None]}), tmp_path / "set")
    assert rows_of(pattern) == [{"a": 1}, {"a": None}]
    with pytest.raises(PrepareError, match="Found a prepared data set in .*choose another name"):
        prepare_dataset(parts_of({"a": [2]}), tmp_path / "set")


def test_a_frame_is_a_data_set_and_a_path_is_none(tmp_path: Path) -> None:
    frame = pd.DataFrame({"y": [0, 1, 1], "word": ["a", None, "b"]}, index=[7, 8, 9])
    paths = prepare_dataset(frame, tmp_path / "frame", rows_per_group=2)
    assert rows_of(paths) == [{"y": 0, "word": "a"}, {"y": 1, "word": None}, {"y": 1, "word": "b"}]

    class Other:
        """As frames of polars are."""

        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return pa.table({"y": [0, 1]}).__arrow_c_stream__(requested_schema)

    paths = prepare_dataset(Other(), tmp_path / "other")
    assert rows_of(paths) == [{"y": 0}, {"y": 1}]
    for path in (tmp_path / "a.parquet", "a.csv"):
        with pytest.raises(PrepareError, match=r"Found the path '.*a\.\w+'.*ParquetData\(paths"):
            prepare_dataset(path, tmp_path / "path")
