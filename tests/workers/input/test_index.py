from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.data.extra_columns import IntegerColumn, ListColumn
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import InputIndex, build_index, check_alike, check_unchanged
from tests.workers.formats.parquet_sets import declaration, table_of, write_set


def test_files_are_listed_in_order_with_their_row_groups(tmp_path: Path) -> None:
    index = build_index(write_set(tmp_path, [5, 0, 3], rows_per_group=2))
    assert [Path(file.path).name for file in index.files] == [
        "part-000.parquet",
        "part-001.parquet",
        "part-002.parquet",
    ]
    assert index.row_group_rows == (2, 2, 1, 2, 1)
    assert index.num_rows == 8
    assert [(group.first_position, group.first_row) for group in index.row_groups()] == [
        (0, 0), (2, 2), (4, 4), (5, 0), (7, 2),
    ]  # fmt: skip


def test_a_file_that_two_patterns_match_counts_once(tmp_path: Path) -> None:
    write_set(tmp_path, [5, 3], rows_per_group=2)
    data = declaration(str(tmp_path / "*.parquet"))
    both = replace(data, paths=(*data.paths, str(tmp_path / "part-001.parquet")))
    assert build_index(both) == build_index(data)


def test_an_index_survives_being_saved(tmp_path: Path) -> None:
    index = build_index(write_set(tmp_path, [5, 3], rows_per_group=2))
    assert InputIndex.from_json(index.to_json()) == index
    assert InputIndex.from_json(index.to_json()).fingerprint == index.fingerprint
    for text in ("", "[1]", '[{"path": "a"}]', '{"a": 1}'):
        with pytest.raises(InputError, match="does not parse"):
            InputIndex.from_json(text)


def test_files_behind_a_url_are_indexed() -> None:
    filesystem = fsspec.filesystem("memory")
    with filesystem.open("/clicks/day_0/a.parquet", "wb") as file:
        pq.write_table(table_of(range(4)), file)
    try:
        data = declaration("memory://clicks/day_*/*.parquet")
        index = build_index(data)
        assert [file.path for file in index.files] == ["memory:///clicks/day_0/a.parquet"]
        check_unchanged(index.files[0], data)
        with filesystem.open("/clicks/day_0/a.parquet", "wb") as file:
            pq.write_table(table_of(range(4)), file)
        with pytest.raises(InputError, match=r"Found memory:///clicks/day_0/a.parquet with"):
            check_unchanged(index.files[0], data)
    finally:
        filesystem.rm("/clicks", recursive=True)


def test_patterns_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no file that matches .*/train-\*\.parquet"):
        build_index(declaration(str(tmp_path / "train-*.parquet")))
    with pytest.raises(InputError, match="Found the folder"):
        build_index(declaration(str(tmp_path / "empty")))


def test_data_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows in the 2 files"):
        build_index(write_set(tmp_path, [0, 0], rows_per_group=2))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    data = write_set(tmp_path, [2], rows_per_group=2)
    (tmp_path / "part-001.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"part-001.parquet, which does not open as Parquet"):
        build_index(data)


def test_one_file_of_another_schema_is_named(tmp_path: Path) -> None:
    data = write_set(tmp_path, [2], rows_per_group=2)
    pq.write_table(pa.table({"label": [1]}), tmp_path / "part-001.parquet")
    with pytest.raises(InputError, match=r"no column named 'half' in .*part-001.parquet"):
        build_index(data)


def test_a_changed_or_removed_file_is_refused_by_name(tmp_path: Path) -> None:
    data = write_set(tmp_path, [4, 4], rows_per_group=2)
    index = build_index(data)
    path = Path(index.files[1].path)
    times = path.stat()
    check_unchanged(index.files[1], data)
    os.utime(path, (times.st_atime, times.st_mtime + 10))
    with pytest.raises(InputError, match=r"part-001.parquet with .* as when the run began.*`rsync -t`"):
        check_unchanged(index.files[1], data)
    os.utime(path, (times.st_atime, times.st_mtime))
    check_unchanged(index.files[1], data)
    path.unlink()
    with pytest.raises(InputError, match=r"no file .*part-001.parquet"):
        check_unchanged(index.files[1], data)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (pa.array(["a"], pa.string()), "'item' with integers in .*a.parquet and with text in .*b.parquet"),
        (
            pa.array([[1]], pa.list_(pa.int64())),
            "'item' with integers in .*a.parquet and with lists of integers in .*b.parquet",
        ),
        (
            pa.array([["a"]], pa.list_(pa.string())),
            "'item' with integers in .*a.parquet and with lists of text in .*b.parquet",
        ),
        (pa.array([7], pa.uint8()), None),
    ],
)
def test_a_column_holds_one_kind_of_ids_in_all_files(tmp_path: Path, other: pa.Array, message: str | None) -> None:
    """Equal ids would become other rows: of the number, of the text, of a bag."""
    for name, item in (("a", pa.array([1], pa.int64())), ("b", other)):
        pq.write_table(pa.table({"y": [1.0], "user, of: text": [5], "item": item}), tmp_path / f"{name}.parquet")
    ids = {"item": IdColumn("item", "hash", 10), "user": IdColumn("user, of: text", "hash", 10)}
    data = ParquetData(str(tmp_path / "*.parquet"), label="y", features=ids)
    if message is None:
        assert build_index(data).num_rows == 2
        return
    with pytest.raises(InputError, match=f"Found column {message}.*Write the column alike"):
        build_index(data)


def test_an_extra_column_holds_one_kind_in_all_files(tmp_path: Path) -> None:
    """Days since 1970 are other numbers. The kinds change no fingerprint, since older runs do not have them."""
    days = pa.array([7], pa.date32())
    for name, day, item in (("a", pa.array([7]), [[1]]), ("b", pa.array([7], pa.int8()), [[1]]), ("c", days, [[1]])):
        pq.write_table(pa.table({"y": [1.0], "day": day, "items": item, "user": [1]}), tmp_path / f"{name}.parquet")
    data = ParquetData(
        str(tmp_path / "[ab].parquet"),
        label="y",
        features={"user": IdColumn("user", "hash", 10)},
        extra=(IntegerColumn("day"), ListColumn("items", 3, "int32")),
    )
    index = build_index(data)
    assert [file.extra_content for file in index.files] == ["day: numbers, items: numbers"] * 2
    assert index.fingerprint == build_index(replace(data, extra=())).fingerprint
    with pytest.raises(
        InputError, match="Found column 'day' with numbers in .*a.parquet and with times in .*c.parquet"
    ):
        build_index(replace(data, paths=(str(tmp_path / "*.parquet"),)))


def test_evaluation_files_hold_the_ids_of_training_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [1.0], "item": [5]}), tmp_path / "train.parquet")
    pq.write_table(pa.table({"y": [1.0], "item": ["5"]}), tmp_path / "test.parquet")
    data = ParquetData(str(tmp_path / "train.parquet"), label="y", features={"item": IdColumn("item", "hash", 10)})
    train, test = build_index(data), build_index(replace(data, paths=(str(tmp_path / "test.parquet"),)))
    check_alike(train.files)
    with pytest.raises(InputError, match=r"'item' with integers in .*train.parquet and with text in .*test.parquet"):
        check_alike((*train.files, *test.files))
