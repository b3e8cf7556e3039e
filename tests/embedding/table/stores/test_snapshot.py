"""`RamSnapshot` beside the plain way, a whole copy at the freeze: reading, releasing, and a full buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.config import TableConfig
from podembed.embedding.kernels.arrays import aligned_zeros
from podembed.embedding.kernels.snapshots import GROUP_ROWS
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    Lion,
    Momentum,
    Optimizer,
    RowWiseAdagrad,
)
from podembed.embedding.table.stores.ram_kept import RamSnapshot, SnapshotRoom, share_out
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from tests.embedding.table.stores.preserving import preserve
from tests.long_tests import examples

NUM_ROWS = 2 * GROUP_ROWS + 7


def filled(num_rows: int = NUM_ROWS, widths: tuple[int, ...] = (3, 1)) -> list[np.ndarray]:
    arrays = [aligned_zeros((num_rows, width)) for width in widths]
    for number, array in enumerate(arrays):
        array[...] = 1000 * number + np.arange(array.size).reshape(array.shape)
    return arrays


def room_of(arrays: list[np.ndarray], *, max_rows: int, num_rows: int | None = None) -> SnapshotRoom:
    widths = [array.shape[1] for array in arrays]
    return SnapshotRoom(widths, max_rows=max_rows, num_rows=len(arrays[0]) if num_rows is None else num_rows)


def snapshot_of(arrays: list[np.ndarray], *, max_rows: int) -> RamSnapshot:
    """With a room of its own."""
    return RamSnapshot(arrays, room=room_of(arrays, max_rows=max_rows))


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def frozen(snapshot: RamSnapshot, arrays: list[np.ndarray], start: int, stop: int) -> list[np.ndarray]:
    out = [np.full((stop - start, array.shape[1]), np.nan, np.float32) for array in arrays]
    snapshot.read(start, stop, out)
    return out


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), num_rows=st.sampled_from([1, 8, GROUP_ROWS, NUM_ROWS]), max_rows=st.integers(1, 20))
def test_what_is_read_is_a_copy_made_at_the_freeze(data: st.DataObject, num_rows: int, max_rows: int) -> None:
    """Changes, pieces read in rising order and released, in any order; a change waits where the buffer is full."""
    arrays = filled(num_rows)
    snapshot = snapshot_of(arrays, max_rows=max_rows)
    for _ in range(data.draw(st.integers(1, 3), "saves")):
        snapshot.freeze()
        copy = [array.copy() for array in arrays]
        done = 0
        while done < num_rows:
            wanted = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=8), "rows"), np.int64)
            allowed = preserve(snapshot, wanted)
            for array in arrays:
                array[wanted[:allowed]] += 0.5
            assert snapshot.num_kept <= max_rows
            if allowed < len(wanted):
                assert snapshot.num_kept == max_rows
            stop = min(num_rows, done + data.draw(st.integers(1, 400), "piece"))
            assert_equal(frozen(snapshot, arrays, done, stop), [array[done:stop] for array in copy])
            snapshot.release(stop)
            done = stop
        assert snapshot.num_kept == 0
        assert preserve(snapshot, np.arange(num_rows)) == num_rows, "nothing is kept of rows that were released"


def test_a_row_is_copied_once_and_only_if_it_changes() -> None:
    arrays = filled()
    snapshot = snapshot_of(arrays, max_rows=6)
    snapshot.freeze()
    assert preserve(snapshot, rows_of(1, 2, 700, 1)) == 4
    assert snapshot.num_kept == 3
    arrays[0][1] = -1
    preserve(snapshot, rows_of(1))
    arrays[0][1] = -2
    assert frozen(snapshot, arrays, 1, 2)[0].tolist() == [[3, 4, 5]]
    assert snapshot.num_kept == 3


def test_a_full_buffer_stops_at_the_first_row_without_room() -> None:
    arrays = filled()
    snapshot = snapshot_of(arrays, max_rows=1)
    snapshot.freeze()
    assert preserve(snapshot, rows_of(3, 3, 64, 3)) == 2
    assert preserve(snapshot, rows_of(64)) == 0
    snapshot.release(4)
    assert preserve(snapshot, rows_of(3, 2, 64)) == 2, "row 3 is free to change, but its group keeps its entry"
    snapshot.release(GROUP_ROWS)
    assert preserve(snapshot, rows_of(64, 0, GROUP_ROWS)) == 3


def test_rows_that_were_released_cannot_be_read_any_more() -> None:
    snapshot = snapshot_of(filled(), max_rows=1)
    snapshot.freeze()
    snapshot.release(64)
    with pytest.raises(ValueError, match="rising order"):
        snapshot.read(63, 100, filled(37))
    snapshot.read(64, 100, filled(36))


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), max_rows=st.integers(1, 30))
def test_snapshots_that_share_a_room_never_mix_their_rows(data: st.DataObject, max_rows: int) -> None:
    """Three tables are read one after the other, in any order, while rows of all of them change."""
    tables = [filled(num_rows) for num_rows in (5, GROUP_ROWS + 3, NUM_ROWS)]
    for number, arrays in enumerate(tables):
        arrays[0] += 10_000 * number
    room = room_of(tables[0], max_rows=max_rows, num_rows=sum(len(arrays[0]) for arrays in tables))
    snapshots = [RamSnapshot(arrays, room=room) for arrays in tables]
    for _ in range(2):
        for snapshot in snapshots:
            snapshot.freeze()
        copies = [[array.copy() for array in arrays] for arrays in tables]
        for number in data.draw(st.permutations(range(3)), "order"):
            for other, arrays in enumerate(tables):
                rows = st.lists(st.integers(0, len(arrays[0]) - 1), max_size=6)
                wanted = np.array(data.draw(rows, f"rows of {other}"), np.int64)
                allowed = preserve(snapshots[other], wanted)
                for array in arrays:
                    array[wanted[:allowed]] += 0.5
                assert allowed == len(wanted) or room.num_kept == max_rows
            assert room.num_kept == sum(snapshot.num_kept for snapshot in snapshots) <= max_rows
            size = len(tables[number][0])
            assert_equal(frozen(snapshots[number], tables[number], 0, size), copies[number])
            snapshots[number].release(size)
        assert room.num_kept == 0


def test_one_table_may_take_the_room_that_another_does_not_need() -> None:
    busy, calm = filled(), filled()
    room = room_of(busy, max_rows=10, num_rows=2 * NUM_ROWS)
    snapshots = [RamSnapshot(arrays, room=room) for arrays in (busy, calm)]
    for snapshot in snapshots:
        snapshot.freeze()
    assert preserve(snapshots[0], np.arange(7)) == 7
    assert snapshots[1].all_taken == 0.7
    assert preserve(snapshots[1], rows_of(9)) == 1
    assert snapshots[0].all_taken == 0.8
    assert [snapshot.taken for snapshot in snapshots] == [0.7, 0.1]
    assert preserve(snapshots[0], np.arange(7, 11)) == 2
    assert preserve(snapshots[1], rows_of(1)) == 0
    snapshots[0].release(NUM_ROWS)
    assert preserve(snapshots[1], np.arange(10, 19)) == 9


def test_a_room_for_all_rows_never_becomes_full() -> None:
    arrays = filled(8)
    room = room_of(arrays, max_rows=8)
    snapshot = RamSnapshot(arrays, room=room)
    snapshot.freeze()
    assert preserve(snapshot, np.arange(8)) == 8
    assert snapshot.all_taken == 0
    assert snapshot.taken == 0


def test_an_empty_room_is_filled_from_its_first_place_on() -> None:
    """Rows that come in together lie together then, whatever order the ones before them left in."""
    arrays = filled(64)
    room = room_of(arrays, max_rows=32, num_rows=128)
    snapshot = RamSnapshot(arrays, room=room)
    for seed in range(3):
        snapshot.freeze()
        wanted = np.random.default_rng(seed).permutation(64)[:20]
        assert preserve(snapshot, wanted) == 20
        snapshot.release(64)
        room.put_in_order()
        snapshot.freeze()
        preserve(snapshot, np.arange(5))
        for buffer, array in zip(room.buffers, arrays, strict=True):
            np.testing.assert_array_equal(buffer[:5], array[:5])
        taken = room.free.copy()
        room.put_in_order()
        np.testing.assert_array_equal(room.free, taken, "entries in use would be given away")
        snapshot.release(64)


OPTIMIZERS = [
    SGD(0.1),
    Momentum(0.1),
    Adagrad(0.1),
    RowWiseAdagrad(0.1),
    AdagradMomentum(0.1, 0.9),
    Adam(0.1),
    Lion(0.1),
    FTRL(0.1),
]


def trained_table(optimizer: Optimizer, *, num_rows: int = 1000) -> Table:
    config = TableConfig(num_rows, 8, optimizer=optimizer, name="t")
    table = Table(TableSpec.of(config, seed=1, num_buckets=4), np.arange(4))
    table.initialize()
    return table


def arrays_of(table: Table) -> list[np.ndarray]:
    return [table.rows, *table.slots.values()]


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, Adam(0.1, lazy_adam=False)], ids=lambda o: type(o).__name__)
def test_what_a_save_reads_beside_training_is_exact_for_every_optimizer(optimizer: Optimizer) -> None:
    """Random updates after random freezes; bytes, not values, are compared."""
    rng = np.random.default_rng(3)
    table = trained_table(optimizer)
    snapshot = snapshot_of(arrays_of(table), max_rows=table.num_rows)

    def keep(rows: np.ndarray) -> None:
        assert preserve(snapshot, rows) == len(rows)

    table.before_change = keep
    for _ in range(3):
        snapshot.freeze()
        before = [array.tobytes() for array in arrays_of(table)]
        for _ in range(4):
            rows = rng.integers(0, table.num_rows, 30)
            table.update(rows, rng.standard_normal((30, 8), np.float32), 0.1)
        assert [array.tobytes() for array in arrays_of(table)] != before
        out = frozen(snapshot, arrays_of(table), 0, table.num_rows)
        assert [array.tobytes() for array in out] == before


def test_under_size_pressure_it_is_exact_since_a_change_that_found_no_room_was_not_made() -> None:
    table = trained_table(Adagrad(0.1))
    snapshot = snapshot_of(arrays_of(table), max_rows=20)

    def keep(rows: np.ndarray) -> None:
        if preserve(snapshot, rows) < len(rows):
            raise BufferError

    table.before_change = keep
    snapshot.freeze()
    before = [array.tobytes() for array in arrays_of(table)]
    refused = 0
    for row in range(0, 1000, 40):
        try:
            table.update(rows_of(row, 999 - row), np.ones((2, 8), np.float32), 0.1)
        except BufferError:
            refused += 1
    assert 0 < refused < 25
    assert snapshot.num_kept == 20
    assert [array.tobytes() for array in frozen(snapshot, arrays_of(table), 0, table.num_rows)] == before


def test_an_empty_table_has_nothing_to_keep() -> None:
    arrays = filled(0)
    snapshot = snapshot_of(arrays, max_rows=0)
    snapshot.freeze()
    assert preserve(snapshot, rows_of()) == 0
    snapshot.read(0, 0, arrays)
    snapshot.release(0)
    assert snapshot.is_released


def test_the_buffer_is_shared_out_by_equal_bytes_as_far_as_tables_can_use_them() -> None:
    large, small, wide, empty = filled(1000, (2,)), filled(2, (1, 1)), filled(1000, (7,)), filled(0, (2,))
    assert share_out([large, small, wide], budget_bytes=4040) == [100, 2, 50]
    assert share_out([large, small], budget_bytes=0) == [1, 1]
    assert share_out([large, small], budget_bytes=10**6) == [1000, 2]
    assert share_out([large, small], budget_bytes=10**6, entries_per_row=2) == [2000, 4]
    assert share_out([empty, large], budget_bytes=100) == [0, 5]
    assert share_out([], budget_bytes=50) == []
