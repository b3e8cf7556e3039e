"""The .npy form of torchrec and MLPerf as a source, and files that are not of that form."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest

from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DataConfigError, DenseColumn, IdColumn
from podembed.workers.data.config import NpyData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from tests.batches import joined

NUM_ROWS = (17, 5)


def write_part(folder: Path, part: int, first: int, count: int) -> None:
    numbers = np.arange(first, first + count)
    np.save(folder / f"day_{part}_labels.npy", (numbers % 2).astype(np.int32)[:, None])
    np.save(folder / f"day_{part}_dense.npy", np.stack([numbers / 2, -numbers, numbers], axis=1).astype(np.float32))
    np.save(folder / f"day_{part}_sparse.npy", np.stack([numbers * 3, numbers + 7], axis=1).astype(np.int32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_part(tmp_path, 0, 0, NUM_ROWS[0])
    write_part(tmp_path, 1, NUM_ROWS[0], NUM_ROWS[1])
    return tmp_path


def declared(folder: Path | str, **options: object) -> NpyData:
    settings = {"rows_per_block": 6} | options
    return NpyData(
        f"{folder}/day_*_labels.npy",
        dense=("int_0", DenseColumn("int_2", "log1p")),
        features={"a": "cat_0", "b": IdColumn("cat_1", "hash")},
        **settings,  # type: ignore[arg-type]
    ).resolved({"a": 100, "b": 1000})


def read_all(data: NpyData, *, lanes: int = 3, epochs: int = 1) -> list[Batch]:
    index = build_index(data)
    plan = training_plan(index, num_lanes=lanes, batch_size=2 * lanes, seed=4)
    reader = InputReader(data, index, plan, range(lanes))
    batches = [reader.read(step) for step in range(epochs * plan.steps_per_epoch)]
    reader.close()
    return batches


def check(batches: list[Batch], *, epochs: int) -> None:
    whole = joined(batches)
    rows = np.flatnonzero(~whole.is_padding)
    numbers = whole.sample_ids[rows]
    assert sorted(numbers.tolist()) == sorted(list(range(sum(NUM_ROWS))) * epochs)
    np.testing.assert_array_equal(whole.labels[rows], numbers % 2)
    np.testing.assert_array_equal(whole.dense[rows], np.stack([numbers / 2, np.log1p(numbers.astype(np.float32))], 1))
    assert [whole.features["a"].to_lists()[row] for row in rows] == [[3 * n] for n in numbers]


def test_every_row_comes_once_an_epoch(folder: Path) -> None:
    assert build_index(declared(folder)).row_group_rows == (6, 6, 5, 5)
    check(read_all(declared(folder), epochs=2), epochs=2)


@pytest.mark.parametrize("kind", [np.int64, np.float64, np.uint8, np.dtype(">i4"), np.float16])
def test_labels_of_other_types_and_without_a_second_axis(folder: Path, kind: type) -> None:
    labels = np.load(folder / "day_0_labels.npy")
    np.save(folder / "day_0_labels.npy", labels[:, 0].astype(kind))
    check(read_all(declared(folder)), epochs=1)


def test_files_of_a_store(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        memory.put(f"{folder}/", "/days/", recursive=True)
        check(read_all(declared("memory://days")), epochs=1)
    finally:
        memory.rm("/days", recursive=True)


SPOILT = [
    ("sparse", np.zeros((17, 2), np.float32), "dtype float32 .* Expected integers"),
    ("sparse", np.zeros((17, 2, 2), np.int32), r"shape \[17, 2, 2\]"),
    ("sparse", np.zeros((17, 0), np.int32), r"shape \[17, 0\]"),
    ("sparse", np.zeros((16, 2), np.int32), r"Expected as many in each"),
    ("sparse", np.asfortranarray(np.zeros((17, 2), np.int32)), "in Fortran order"),
    ("dense", np.zeros((17, 3), np.complex64), "dtype complex64"),
    ("dense", np.zeros((17, 3), "S4"), "dtype |S4"),
    ("dense", np.zeros((17, 2), np.float32), "no column named 'int_2'"),
    ("dense", np.zeros(17, [("x", np.float32)]), "shape"),
    ("labels", np.zeros((17, 2), np.int32), r"Expected floats or integers of shape \[n\] or \[n, 1\]"),
]


@pytest.mark.parametrize(("kind", "array", "message"), SPOILT)
def test_arrays_of_another_form_are_named(folder: Path, kind: str, array: np.ndarray, message: str) -> None:
    np.save(folder / f"day_0_{kind}.npy", array)
    with pytest.raises(InputError, match=message) as caught:
        build_index(declared(folder))
    assert "day_0_" in str(caught.value)


def test_an_array_of_objects_is_not_unpickled(folder: Path) -> None:
    np.save(folder / "day_0_dense.npy", np.array([[print]] * 17, object), allow_pickle=True)
    with pytest.raises(InputError, match="dtype object"):
        build_index(declared(folder))


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY", b"no array at all", b"\x93NUMPY\x01\x00\xff\xff{", b"\x93NUMPY\x09\x00"]
)
def test_files_that_are_no_arrays_are_named(folder: Path, content: bytes) -> None:
    (folder / "day_1_dense.npy").write_bytes(content)
    with pytest.raises(InputError, match=r"day_1_dense.npy, which does not open as .npy"):
        build_index(declared(folder))


def header(text: str, *, claimed: int | None = None) -> bytes:
    """The beginning of an array of version 2.0, which has four bytes for the length of its header."""
    length = len(text) if claimed is None else claimed
    return b"\x93NUMPY\x02\x00" + length.to_bytes(4, "little") + text.encode()


FORGED = [
    (header("{", claimed=1 << 30), "does not open as .npy"),
    (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976, 3), }"), "Expected 13,835,058,0"),
    (header("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 1000000000), }"), "1,000,000,000 columns"),
    (header("{'descr': '|O', 'fortran_order': False, 'shape': (1152921504606846976, 3), }"), "dtype object"),
    (header("(" * 9_000), "does not open as .npy"),
]


@pytest.mark.parametrize(("content", "message"), FORGED)
def test_headers_that_claim_very_much_are_refused_before_it_is_allocated(
    folder: Path, content: bytes, message: str
) -> None:
    path = folder / "day_1_dense.npy"
    with path.open("wb") as file:
        file.write(content)
        # A hole, so that there is as much as the longest header claims.
        file.truncate((1 << 30) + 12 if content[-1:] == b"{" else len(content))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=message) as caught:
            build_index(declared(folder))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "day_1_dense.npy" in str(caught.value)
    assert len(str(caught.value)) < 1_000
    assert peak < 4 << 20


def test_files_that_break_off_or_change_are_named(folder: Path) -> None:
    data = declared(folder)
    index = build_index(data)
    path = folder / "day_1_sparse.npy"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"day_1_sparse.npy with 164 bytes. Expected 168"):
        build_index(data)
    plan = training_plan(index, num_lanes=1, batch_size=22, seed=0)
    with pytest.raises(InputError, match=r"day_1_labels.npy with .* as when the run began"):
        InputReader(data, index, plan, [0]).read(0)
    path.unlink()
    with pytest.raises(InputError, match="Found no file [^ ]*day_1_sparse.npy, which belongs to .*day_1_labels.npy"):
        build_index(data)


def test_malformed_rows_are_left_out(folder: Path) -> None:
    dense = np.load(folder / "day_0_dense.npy")
    dense[3, 0] = np.nan
    np.save(folder / "day_0_dense.npy", dense)
    with pytest.raises(InputError, match=r"Found nan in .*day_0_labels.npy, row group 0, row 3, column 'int_0'"):
        read_all(declared(folder))
    ids = np.concatenate([batch.sample_ids for batch in read_all(declared(folder, max_bad_rows=1))])
    assert sorted(ids[ids >= 0].tolist()) == [n for n in range(sum(NUM_ROWS)) if n != 3]


def test_paths_name_label_files(folder: Path) -> None:
    with pytest.raises(InputError, match=r"Expected label files, whose names end with labels.npy"):
        build_index(NpyData(f"{folder}/*_dense.npy"))
    with pytest.raises(DataConfigError, match="rows_per_block 0"):
        declared(folder, rows_per_block=0)
