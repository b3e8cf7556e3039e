"""Chunks against zarr-python and tensorstore in both directions, and against every kind of damage."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
import zarr.codecs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from podembed.workers.checkpoint.chunks import (
    ChunkDamaged,
    ChunkReceipt,
    IndexDamaged,
    check_file_index,
    chunk_bytes,
    chunk_name,
    crc32c,
    file_index,
    read_chunk,
    read_chunks,
    write_array_metadata,
    write_chunk,
    write_chunks,
    write_whole,
)
from podembed.workers.checkpoint.zarr_metadata import DTYPES, ArrayMetadata
from podembed.workers.storage.storage_errors import NameTaken
from podembed.workers.storage.store import Store
from tests.long_tests import examples

V, ROWS_PER_BUCKET, DIM = 4, 5, 3


def write_and_read_whole(store: Store, path: str, values: np.ndarray) -> np.ndarray:
    metadata, _, receipt = write_whole(store, path, values)
    if not values.size:
        return np.empty(metadata.shape, metadata.dtype)
    return read_chunk(store, metadata, (0,) * values.ndim, receipt)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


def table_metadata(separator: str = "/", dtype: str = "float32") -> ArrayMetadata:
    return ArrayMetadata(
        path="data/users/rows",
        shape=(V, ROWS_PER_BUCKET, DIM),
        chunk_shape=(1, ROWS_PER_BUCKET, DIM),
        dtype=DTYPES[dtype],
        attributes={"table": "users"},
        separator=separator,
    )


def write_table(store: Store, metadata: ArrayMetadata) -> tuple[np.ndarray, list[ChunkReceipt]]:
    values = np.random.default_rng(0).random((V, ROWS_PER_BUCKET, DIM), np.float32).astype(metadata.dtype)
    write_array_metadata(store, metadata)
    return values, [write_chunk(store, metadata, (bucket, 0, 0), values[bucket]) for bucket in range(V)]


def write_files(store: Store, metadata: ArrayMetadata) -> tuple[np.ndarray, list[ChunkReceipt]]:
    """As `write_table`, of files with several chunks."""
    values = np.random.default_rng(0).random((V, ROWS_PER_BUCKET, DIM), np.float32).astype(metadata.dtype)
    write_array_metadata(store, metadata)
    receipts = []
    for first in range(0, V, metadata.chunks_per_file):
        pieces = [*values[first : first + metadata.chunks_per_file]]
        receipts += write_chunks(store, metadata, (first, 0, 0), pieces)
    return values, receipts


def open_with_tensorstore(path: str):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    return tensorstore.open(spec, open=True).result(timeout=30)


class TestOracles:
    @pytest.mark.parametrize("separator", ["/", "."])
    def test_other_readers_see_our_values(self, store: Store, separator: str) -> None:
        metadata = table_metadata(separator)
        values, _ = write_table(store, metadata)
        path = store.locate(metadata.path)
        opened = zarr.open(path, mode="r")
        np.testing.assert_array_equal(opened[:], values)  # pyright: ignore[reportIndexIssue, reportArgumentType]
        assert opened.attrs["table"] == "users"
        np.testing.assert_array_equal(open_with_tensorstore(path).read().result(timeout=30), values)

    @pytest.mark.parametrize("per_file", [2, 4])
    def test_other_readers_see_files_of_several_chunks(self, store: Store, per_file: int) -> None:
        metadata = replace(table_metadata(), chunks_per_file=per_file)
        values, receipts = write_files(store, metadata)
        path = store.locate(metadata.path)
        opened = zarr.open(path, mode="r")
        np.testing.assert_array_equal(opened[:], values)  # pyright: ignore[reportIndexIssue, reportArgumentType]
        np.testing.assert_array_equal(opened[2:3], values[2:3])  # pyright: ignore[reportIndexIssue, reportArgumentType]
        np.testing.assert_array_equal(open_with_tensorstore(path).read().result(timeout=30), values)
        assert len(store.list(f"{metadata.path}/c")) == V // per_file
        for bucket in range(V):
            read = read_chunk(store, metadata, (bucket, 0, 0), receipts[bucket])
            np.testing.assert_array_equal(read, values[bucket : bucket + 1])

    @pytest.mark.parametrize("dtype", sorted(DTYPES))
    @pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 1, 3, 2), (0, 4)])
    def test_leaves_of_any_type_and_rank(self, store: Store, dtype: str, shape: tuple[int, ...]) -> None:
        values = (np.random.default_rng(1).random(shape) * 100).astype(DTYPES[dtype])
        back = write_and_read_whole(store, "data/leaf", values)
        assert back.dtype == values.dtype
        assert back.shape == shape
        assert back.tobytes() == values.tobytes()
        path = store.locate("data/leaf")
        stored = values.view(np.uint16) if dtype == "bfloat16" else values
        opened = np.asarray(zarr.open(path, mode="r")[...])  # pyright: ignore[reportIndexIssue, reportArgumentType]
        np.testing.assert_array_equal(opened, stored)
        np.testing.assert_array_equal(open_with_tensorstore(path).read().result(timeout=30), stored)

    @pytest.mark.parametrize("values", [np.array([np.nan, np.inf, -0.0, 1e-45], np.float32), np.array([True, False])])
    def test_every_bit_pattern_survives(self, store: Store, values: np.ndarray) -> None:
        assert write_and_read_whole(store, "data/leaf", values).tobytes() == values.tobytes()


class TestChunks:
    def test_a_chunk_is_the_bytes_and_their_checksum(self, store: Store) -> None:
        metadata = table_metadata()
        values, receipts = write_table(store, metadata)
        raw = Path(store.locate("data/users/rows/c/2/0/0")).read_bytes()
        assert raw[:-4] == values[2].tobytes()
        assert struct.unpack("<I", raw[-4:])[0] == google_crc32c.value(raw[:-4]) == receipts[2].crc32c
        assert receipts[2] == ChunkReceipt(
            name="data/users/rows/c/2/0/0", size_bytes=len(raw), crc32c=receipts[2].crc32c
        )

    def test_a_read_fills_the_callers_array(self, store: Store) -> None:
        values, receipts = write_table(store, table_metadata())
        bucket = np.empty((ROWS_PER_BUCKET, DIM), np.float32)
        assert read_chunk(store, table_metadata(), (1, 0, 0), receipts[1], out=bucket) is bucket
        np.testing.assert_array_equal(bucket, values[1])

    def test_a_strided_array_is_written_by_value(self, store: Store) -> None:
        wide = np.random.default_rng(0).random((ROWS_PER_BUCKET, 2 * DIM), np.float32)
        receipt = write_chunk(store, table_metadata(), (0, 0, 0), wide[:, ::2])
        np.testing.assert_array_equal(read_chunk(store, table_metadata(), (0, 0, 0), receipt)[0], wide[:, ::2])

    def test_bfloat16_is_kept_as_it_is(self, store: Store) -> None:
        metadata = table_metadata(dtype="bfloat16")
        values, receipts = write_table(store, metadata)
        read = read_chunk(store, metadata, (3, 0, 0), receipts[3])[0]
        assert (read.dtype, read.tobytes()) == (ml_dtypes.bfloat16, values[3].tobytes())

    def test_chunks_are_written_once(self, store: Store) -> None:
        write_table(store, table_metadata())
        with pytest.raises(NameTaken):
            write_chunk(store, table_metadata(), (0, 0, 0), np.zeros((ROWS_PER_BUCKET, DIM), np.float32))

    @pytest.mark.parametrize("index", [(4, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 0), ()])
    def test_indices_outside_the_grid_are_refused(self, index: tuple[int, ...]) -> None:
        with pytest.raises(IndexError, match="grid"):
            chunk_name(table_metadata(), index)

    @pytest.mark.parametrize(
        "values",
        [
            np.zeros((ROWS_PER_BUCKET, DIM)),
            np.zeros((DIM, ROWS_PER_BUCKET), np.float32),
            np.zeros(ROWS_PER_BUCKET * DIM, np.float32),
        ],
    )
    def test_an_array_that_is_not_one_chunk_is_refused(self, store: Store, values: np.ndarray) -> None:
        with pytest.raises(ValueError, match="exactly one chunk"):
            write_chunk(store, table_metadata(), (0, 0, 0), values)

    def test_a_buffer_that_cannot_be_filled_is_refused(self, store: Store) -> None:
        _, receipts = write_table(store, table_metadata())
        for out in (np.empty((DIM, ROWS_PER_BUCKET), np.float32).T, np.frombuffer(bytes(60), np.float32).reshape(5, 3)):
            with pytest.raises(ValueError, match="contiguous"):
                read_chunk(store, table_metadata(), (0, 0, 0), receipts[0], out=out)

    @settings(max_examples=examples(40), deadline=None)
    @given(
        values=hnp.arrays(
            st.sampled_from([np.float32, np.int64, np.uint8]), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)
        )
    )
    def test_any_array_comes_back(self, values: np.ndarray) -> None:
        store = Store("memory://chunks/any")
        for name in store.list():
            store.delete(name)
        back = write_and_read_whole(store, "leaf", values)
        assert (back.shape, back.dtype, back.tobytes()) == (values.shape, values.dtype, values.tobytes())


class TestDamage:
    """Every change of a chunk file is found, by its own trailer or by the receipt."""

    @pytest.fixture
    def damaged(self, store: Store):
        _, receipts = write_table(store, table_metadata())
        return store, receipts[1], Path(store.locate(receipts[1].name))

    def test_every_flipped_bit_is_found(self, damaged) -> None:
        store, receipt, path = damaged
        good = path.read_bytes()
        for at in range(len(good)):
            for bit in (0, 3, 7):
                bad = bytearray(good)
                bad[at] ^= 1 << bit
                path.write_bytes(bad)
                with pytest.raises(ChunkDamaged, match="CRC-32C"):
                    read_chunk(store, table_metadata(), (1, 0, 0), receipt)
        path.write_bytes(good)
        read_chunk(store, table_metadata(), (1, 0, 0), receipt)

    def test_every_other_length_is_found(self, damaged) -> None:
        store, receipt, path = damaged
        good = path.read_bytes()
        for bad in [good[:n] for n in range(len(good))] + [good + b"x", b"x" + good, good + good]:
            path.write_bytes(bad)
            with pytest.raises(ChunkDamaged, match=f"{len(bad)} bytes"):
                read_chunk(store, table_metadata(), (1, 0, 0), receipt)

    def test_a_missing_chunk_is_no_fill_value(self, damaged) -> None:
        store, receipt, path = damaged
        path.unlink()
        with pytest.raises(ChunkDamaged, match="no file"):
            read_chunk(store, table_metadata(), (1, 0, 0), receipt)

    def test_a_sound_chunk_from_elsewhere_is_found_by_the_receipt(self, damaged) -> None:
        store, receipt, path = damaged
        path.write_bytes(Path(store.locate("data/users/rows/c/0/0/0")).read_bytes())
        with pytest.raises(ChunkDamaged, match="as written"):
            read_chunk(store, table_metadata(), (1, 0, 0), receipt)

    def test_a_giant_shape_allocates_nothing(self, damaged, monkeypatch: pytest.MonkeyPatch) -> None:
        store, receipt, _ = damaged
        giant = ArrayMetadata(
            path="data/users/rows", shape=(V, 1 << 40, DIM), chunk_shape=(1, 1 << 40, DIM), dtype=DTYPES["float32"]
        )
        with pytest.raises(ChunkDamaged, match=f"{(1 << 40) * DIM * 4 + 4} bytes"):
            read_chunk(store, giant, (1, 0, 0), receipt)


@given(hnp.arrays(np.uint8, st.integers(0, 300)))
def test_the_checksum_is_castagnolis(data: np.ndarray) -> None:
    assert crc32c(data) == crc32c(data.tobytes()) == google_crc32c.value(data.tobytes())


def test_the_checksum_goes_over_pieces() -> None:
    data = np.arange((1 << 22) // 8 + 1000, dtype=np.int64)
    assert crc32c(data) == google_crc32c.value(data.tobytes())
    assert crc32c(b"123456789") == 0xE3069283
    assert math.prod(data.shape) > 0


class TestFilesOfSeveralChunks:
    """Readers check every byte of the chunks that they need. The index is checked for others, by who asks for it."""

    @pytest.fixture
    def metadata(self) -> ArrayMetadata:
        return replace(table_metadata(), chunks_per_file=2)

    def test_any_changed_byte_is_found_by_who_reads_it(self, store: Store, metadata: ArrayMetadata) -> None:
        values, receipts = write_files(store, metadata)
        name, out = receipts[0].name, [np.empty_like(value) for value in values[:2]]
        read_chunks(store, metadata, name, out=out, receipts=receipts[:2])
        np.testing.assert_array_equal(out, values[:2])
        path = Path(store.locate(name))
        good = path.read_bytes()
        index_at = 2 * chunk_bytes(metadata)
        for at in range(len(good)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            if at < index_at:
                with pytest.raises(ChunkDamaged) as found:
                    read_chunks(store, metadata, name, out=out, receipts=receipts[:2])
                assert found.value.at == at // chunk_bytes(metadata)
                with pytest.raises(ChunkDamaged):
                    read_chunk(store, metadata, (at // chunk_bytes(metadata), 0, 0), receipts[0])
            else:
                with pytest.raises(IndexDamaged):
                    check_file_index(store, metadata, name)

    def test_a_damaged_index_stops_no_reader_of_rows(self, store: Store, metadata: ArrayMetadata) -> None:
        """Whoever needs all chunks of a file, or one, gets the same."""
        values, receipts = write_files(store, metadata)
        name, out = receipts[0].name, [np.empty_like(value) for value in values[:2]]
        path = Path(store.locate(name))
        path.write_bytes(path.read_bytes()[: 2 * chunk_bytes(metadata)] + bytes(len(file_index(metadata))))
        read_chunks(store, metadata, name, out=out, receipts=receipts[:2])
        np.testing.assert_array_equal(out, values[:2])
        np.testing.assert_array_equal(read_chunk(store, metadata, (1, 0, 0), receipts[1])[0], values[1])

    def test_the_index_is_made_once_for_all_files(self, metadata: ArrayMetadata) -> None:
        other = replace(metadata, path="data/items/rows")
        assert file_index(metadata) is file_index(other)
        assert file_index(metadata) != file_index(replace(metadata, chunks_per_file=4))

    @pytest.mark.parametrize("length", [0, 10, -1])
    def test_a_torn_or_longer_file_is_refused(self, store: Store, metadata: ArrayMetadata, length: int) -> None:
        _, receipts = write_files(store, metadata)
        path = Path(store.locate(receipts[0].name))
        path.write_bytes(path.read_bytes()[:length] if length <= 0 else path.read_bytes() + bytes(length))
        with pytest.raises(ChunkDamaged):
            read_chunk(store, metadata, (1, 0, 0), receipts[1])
        with pytest.raises(ChunkDamaged):
            check_file_index(store, metadata, receipts[0].name)

    def test_a_file_is_written_whole(self, store: Store, metadata: ArrayMetadata) -> None:
        bucket = np.zeros((ROWS_PER_BUCKET, DIM), np.float32)
        for first, count in ((0, 1), (1, 2), (0, 3)):
            with pytest.raises(ValueError, match="Write a file at once"):
                write_chunks(store, metadata, (first, 0, 0), [bucket] * count)
