"""`RamPreImages` beside the plain way, whole copies at the moments: several tables with undo logs, snapshots that share
rooms, and logs that snapshots link to.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.kernels.arrays import aligned_zeros
from podembed.embedding.kernels.snapshots import GROUP_ROWS
from podembed.embedding.table.stores.ram_kept import ENTRY_BYTES, RamPreImages, RamSnapshot, RamUndoLog, SnapshotRoom
from podembed.embedding.table.stores.store import Keeper
from tests.long_tests import examples

WIDTHS = ((3, 1), (16,), (3, 1), (32, 32))
NUM_ROWS = (2 * GROUP_ROWS + 7, 40, 5, GROUP_ROWS)


class Kept:
    """Tables with a log and a snapshot each. `frozen` are copies made at the freeze."""

    def __init__(self, *, log_rows: int, room_rows: int) -> None:
        self.arrays = [self._filled(count, widths) for count, widths in zip(NUM_ROWS, WIDTHS, strict=True)]
        self.logs = [RamUndoLog(arrays, max_rows=log_rows) for arrays in self.arrays]
        self.rooms = {
            widths: SnapshotRoom(widths, max_rows=room_rows, num_rows=sum(NUM_ROWS)) for widths in dict.fromkeys(WIDTHS)
        }
        self.snapshots = [
            RamSnapshot(arrays, room=self.rooms[widths], log=log)
            for arrays, widths, log in zip(self.arrays, WIDTHS, self.logs, strict=True)
        ]
        self.kept = RamPreImages(list(zip(self.logs, self.snapshots, strict=True)))
        for log in self.logs:
            log.begin()
        self.frozen = self.copies()

    @staticmethod
    def _filled(count: int, widths: tuple[int, ...]) -> list[np.ndarray]:
        arrays = [aligned_zeros((count, width)) for width in widths]
        for number, array in enumerate(arrays):
            array[...] = 1000 * number + np.arange(array.size).reshape(array.shape)
        return arrays

    def copies(self) -> list[list[np.ndarray]]:
        return [[array.copy() for array in arrays] for arrays in self.arrays]

    def freeze(self, *, is_linked: bool) -> None:
        for log, snapshot in zip(self.logs, self.snapshots, strict=True):
            log.freeze()
            snapshot.freeze(reads_log=is_linked)
        self.frozen = self.copies()

    def change(self, rows: dict[int, np.ndarray]) -> None:
        """Tells of rows, then changes them. Where a room is full, the table that waits for it releases all of its
        rows.
        """
        numbers = [*rows]
        touched = np.array([[rows[number].ctypes.data, len(rows[number])] for number in numbers], np.int64)
        at = self.kept.keep(numbers, touched)
        while at[0] < len(numbers):
            room = self.snapshots[numbers[at[0]]].room
            assert room.num_free == 0
            for number, snapshot in enumerate(self.snapshots):
                if snapshot.room is room:
                    self.read(number, 0, NUM_ROWS[number])
                    snapshot.release(NUM_ROWS[number])
            at = self.kept.keep(numbers, touched, at)
        for number, own in rows.items():
            for array in self.arrays[number]:
                array[own] += 0.5

    def read(self, number: int, start: int, stop: int) -> None:
        """Compares frozen rows with their copies."""
        snapshot = self.snapshots[number]
        if snapshot.is_released:
            return
        start = max(start, self.released(number))
        out = [np.full((stop - start, width), np.nan, np.float32) for width in WIDTHS[number]]
        snapshot.read(start, stop, out)
        for found, expected in zip(out, self.frozen[number], strict=True):
            np.testing.assert_array_equal(found, expected[start:stop])

    def released(self, number: int) -> int:
        return self.snapshots[number].line()[-1]


def some_rows(data: st.DataObject) -> dict[int, np.ndarray]:
    numbers = data.draw(st.lists(st.integers(0, len(WIDTHS) - 1), unique=True, min_size=1), "tables")
    lists = {number: st.lists(st.integers(0, NUM_ROWS[number] - 1), max_size=30) for number in numbers}
    return {number: np.array(data.draw(rows, f"rows of {number}"), np.int64) for number, rows in lists.items()}


@settings(max_examples=examples(200), deadline=None)
@given(
    data=st.data(),
    log_rows=st.sampled_from([0, 3, 20, 2 * max(NUM_ROWS)]),
    room_rows=st.sampled_from([1, 10, 200]),
    is_linked=st.booleans(),
)
def test_reading_and_undo_find_what_was_there(
    data: st.DataObject, log_rows: int, room_rows: int, is_linked: bool
) -> None:
    """Through two saves: logs and rooms of any size, rows that repeat, reading up to any row meanwhile."""
    kept = Kept(log_rows=log_rows, room_rows=room_rows)
    older = kept.copies()
    for _ in range(2):
        kept.change(some_rows(data))
        kept.freeze(is_linked=is_linked)
        for _ in range(data.draw(st.integers(0, 4), "changes")):
            kept.change(some_rows(data))
            for number in range(len(WIDTHS)):
                stop = data.draw(st.integers(0, NUM_ROWS[number]), "read up to")
                if stop > kept.released(number):
                    kept.read(number, 0, stop)
                    kept.snapshots[number].release(stop)
        ends_here = data.draw(st.booleans(), "goes back")
        to_newer = data.draw(st.booleans(), "to the newer moment")
        for number, (log, snapshot) in enumerate(zip(kept.logs, kept.snapshots, strict=True)):
            snapshot.release(NUM_ROWS[number])
            assert snapshot.num_kept == 0
            if ends_here:
                lost = log.undo(to_newer=to_newer)
                known = np.setdiff1d(np.arange(NUM_ROWS[number]), lost)
                for array, expected in zip(
                    kept.arrays[number], (kept.frozen if to_newer else older)[number], strict=True
                ):
                    np.testing.assert_array_equal(array[known], expected[known])
            else:
                log.advance()
        assert all(room.num_free == room_rows for room in kept.rooms.values())
        if ends_here:
            return
        older = kept.frozen


def test_a_row_is_copied_once_for_both() -> None:
    kept = Kept(log_rows=100, room_rows=100)
    kept.freeze(is_linked=True)
    kept.change({0: np.array([5, 6, 5, 700]), 3: np.array([1])})
    assert [log.num_kept for log in kept.logs] == [3, 0, 0, 1]
    assert all(room.num_kept == 0 for room in kept.rooms.values())
    for number, count in enumerate(NUM_ROWS):
        kept.read(number, 0, count)


def test_rows_that_the_log_has_no_room_for_are_in_the_snapshots_room() -> None:
    kept = Kept(log_rows=2, room_rows=100)
    kept.freeze(is_linked=True)
    kept.change({0: np.arange(10, 20)})
    assert kept.logs[0].num_kept == 2
    assert kept.snapshots[0].num_kept == 8
    kept.read(0, 0, NUM_ROWS[0])


def test_what_is_only_undone_takes_no_room() -> None:
    kept = Kept(log_rows=100, room_rows=1)
    rows = np.arange(30)
    line = np.array([[rows.ctypes.data, len(rows)]], np.int64)
    assert kept.kept.keep([1], line, freezes=False)[0] == 1
    assert kept.logs[1].num_kept == 30
    assert kept.snapshots[1].num_kept == 0


def test_a_keeper_takes_rows_of_any_kind() -> None:
    told: list[tuple[tuple[int, ...], int]] = []
    keeper = Keeper(lambda numbers, touched: told.append((tuple(numbers), int(touched[0, 1]))), 7, RamPreImages.touched)
    keeper(np.arange(20, dtype=np.int64)[::2])
    assert told == [((7,), 10)]


def test_tables_of_one_width_fill_what_both_have() -> None:
    """Six rows of one of them in a buffer for twelve; where all fits, nothing can become full."""
    arrays = [[aligned_zeros((40, 4))], [aligned_zeros((20, 4))]]
    for num_rows, taken in ((12, 0.5), (60, 0.0)):
        kept = RamPreImages.of(arrays, [None, None], buffer_bytes=num_rows * (16 + ENTRY_BYTES))
        for snapshot in kept.snapshots:
            snapshot.freeze()
        kept.keep([0], RamPreImages.touched(np.arange(6)))
        assert kept.taken == taken
