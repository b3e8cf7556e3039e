"""A table written bucket by bucket by several hosts, and read by any other number of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.workers.checkpoint.arrays import read_dense, safe_segment
from podembed.workers.checkpoint.checkpoint_files import BucketReceipt, TableFiles, TablePlan, WrittenBuckets
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.checkpoint.files import (
    assemble_table,
    read_bucket,
    write_buckets,
    write_dense,
    write_table_metadata,
)
from podembed.workers.storage.store import Store, is_safe_name
from tests.long_tests import examples

ATTEMPT = "s000000010-g00000001"


def plan_for(num_rows: int, num_buckets: int, dim: int = 3, name: str = "users") -> TablePlan:
    return TablePlan(
        attempt=ATTEMPT,
        name=name,
        num_rows=num_rows,
        num_buckets=num_buckets,
        widths={"rows": dim, "accumulator": 1},
        dtypes={},
    )


def cut(values: np.ndarray, plan: TablePlan) -> np.ndarray:
    """[rows, width] → [V, rows per bucket, width], padding with 7."""
    padded = np.full((plan.num_buckets * plan.rows_per_bucket, values.shape[1]), 7, values.dtype)
    padded[: len(values)] = values
    return padded.reshape(plan.rows_per_bucket, plan.num_buckets, -1).transpose(1, 0, 2)


def save(store: Store, plan: TablePlan, seed: int = 0) -> tuple[TableFiles, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    values = {array: rng.random((plan.num_rows, width), np.float32) for array, width in plan.widths.items()}
    arrays = write_table_metadata(store, plan)
    buckets = {array: cut(value, plan) for array, value in values.items()}
    receipts: list[BucketReceipt] = []
    for host in (1, 0):
        for bucket in range(host, plan.num_buckets, 2):
            receipts.append(write_buckets(store, plan, bucket, [buckets[array][bucket] for array in plan.widths]))
    return assemble_table(plan, arrays, [WrittenBuckets.of(plan, receipts)]), values


@settings(max_examples=examples(25), deadline=None)
@given(num_rows=st.integers(1, 70), shift=st.integers(0, 4), dim=st.integers(1, 5))
def test_a_table_comes_back_bucket_by_bucket(tmp_path_factory, num_rows: int, shift: int, dim: int) -> None:
    store = Store(tmp_path_factory.mktemp("run"))
    table, values = save(store, plan_for(num_rows, 1 << shift, dim))
    for bucket in range(table.num_buckets):
        count = table.layout.num_rows_of(bucket)
        for read, written in zip(read_bucket(store, table, bucket), values.values(), strict=True):
            np.testing.assert_array_equal(read[:count], written[bucket :: table.num_buckets])


def test_buffers_of_the_caller_are_filled(tmp_path: Path) -> None:
    store = Store(tmp_path)
    table, values = save(store, plan_for(37, 4))
    out = [np.empty((10, 3), np.float32), np.empty((10, 1), np.float32)]
    read = read_bucket(store, table, 2, out=out)
    assert all(a is b for a, b in zip(read, out, strict=True))
    np.testing.assert_array_equal(out[0][:9], values["rows"][2::4])


def test_zarr_shows_the_rows_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path)
    table, values = save(store, plan_for(37, 4))
    for files in table.arrays:
        array = zarr.open(store.locate(files.path), mode="r")
        rows = array[:].transpose(1, 0, 2).reshape(-1, files.width)[: table.num_rows]  # pyright: ignore
        np.testing.assert_array_equal(rows, values[files.name])
    assert "[r mod 4, r div 4]" in str(array.attrs["layout"])  # pyright: ignore[reportPossiblyUnbound]


def test_two_sound_chunks_that_changed_places_are_found(tmp_path: Path) -> None:
    """Each file and each receipt is right by itself; only the digest knows which row numbers they belong to."""
    import dataclasses

    store = Store(tmp_path)
    table, _ = save(store, plan_for(40, 4))
    first, second, *others = table.chunks
    swapped = (
        dataclasses.replace(second, bucket=first.bucket),
        dataclasses.replace(first, bucket=second.bucket),
        *others,
    )
    with pytest.raises(ChunkDamaged, match="digest"):
        read_bucket(store, dataclasses.replace(table, chunks=swapped), 0)


@pytest.mark.parametrize("values", [np.float32(3), np.zeros((0, 4), np.int32), np.arange(6).reshape(2, 3)])
def test_dense_leaves_come_back(tmp_path: Path, values: np.ndarray) -> None:
    store = Store(tmp_path)
    file = write_dense(store, ATTEMPT, "['layer']['w']", values)
    back = read_dense(store, file)
    np.testing.assert_array_equal(back, values)
    assert back.dtype == values.dtype
    assert file.key == "['layer']['w']"


def test_a_damaged_dense_leaf_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = write_dense(store, ATTEMPT, "w", np.ones(9, np.float32))
    path = Path(store.locate(file.chunk_file))
    path.write_bytes(path.read_bytes()[:-5] + b"\0\0\0\0\0")
    with pytest.raises(ChunkDamaged):
        read_dense(store, file)


@given(st.lists(st.text(max_size=100), min_size=2, max_size=6, unique=True))
def test_any_name_becomes_a_safe_segment_of_its_own(texts: list[str]) -> None:
    segments = [safe_segment(text) for text in texts]
    assert len(set(segments)) == len(texts)
    for text, segment in zip(texts, segments, strict=True):
        assert is_safe_name(segment)
        assert "/" not in segment
        # A text made to look like another one's segment gets its own.
        assert safe_segment(segment) == segment if segment == text else safe_segment(segment) != segment


@pytest.mark.parametrize("text", ["users", "C1", "user_id.v2"])
def test_plain_names_stay_readable(text: str) -> None:
    assert safe_segment(text) == text
