"""What stores in memory keep of rows that are about to change: for undo, and for a save while training goes on.

`RamUndoLog` goes back to one or two earlier moments of some arrays whose rows change together. Before the first change
of a row after a moment, the row is written down in a buffer of fixed size. Going back writes the buffer into the arrays
again, newest first. A full buffer stops no update. Rows that change then are *lost*, which costs a bit each. Undo names
them, so that they can be had from elsewhere. While a commit is being written there are two moments, that of the commit
before and its own. Which of them is the commit that one goes back to is known only later.

`RamSnapshot` keeps the values of one moment for a reader beside the changes, which lets go of them row by row. What the
log keeps of the same moment is read there (`links`), so the snapshot keeps only those rows for which the log has no
room. Other rows are read where they lie. Which rows changed between two moments is known, too, for checkpoints that
write only those. Rows are kept one by one and not in blocks, since ids are spread over a table. A step that touches one
row in 300 touches every fifth block of 64. A buffer of a tenth of the table was full within that step.

`RamPreImages` tells the logs and snapshots of many tables together. Told one by one, they took longer than the update
itself where tables are small. Here one kernel finds what has to be kept of all tables, and one for each width copies
it.

Pure arrays: what a moment stands for, who calls from which thread, and what happens while a buffer is full, is the
caller's business (`workers.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from podembed.embedding.kernels.arrays import aligned_empty, can_stream, matrix_of
from podembed.embedding.kernels.kept_rows import (
    BEGIN,
    COPY_COLUMNS,
    LOG_COLUMNS,
    NUM_COPIED,
    NUM_FREE,
    NUM_LOGGED,
    NUM_ROOMED,
    SNAPSHOT_COLUMNS,
    claim_rows,
    copy_back,
    copy_rows,
)
from podembed.embedding.kernels.snapshots import (
    GROUP_ROWS,
    list_downwards,
    read_frozen,
    release_groups,
)

# Of a row in a buffer, beside its values: in that of an undo log as in that of snapshots.
ENTRY_BYTES = 12
# Entries have numbers of 32 bits.
MOST_ENTRIES = 2**31 - 2
Matrices: TypeAlias = Sequence[tuple[np.ndarray, np.ndarray]]
_NO_LOG, _NO_SNAPSHOT = (0,) * LOG_COLUMNS, (0,) * (SNAPSHOT_COLUMNS - 2)
_NO_LINKS = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64), np.empty((0, 1), np.float32))


class _Moment:
    """What changed since a moment, up to the next one. Mutable.

    Attributes:
      changed, lost: uint8, a bit a row.
      addresses: of the two.
      num_entries: of the buffer, taken by rows that changed since.
    """

    def __init__(self, num_rows: int) -> None:
        # Zeros that are never written take no memory.
        self.changed = np.zeros(-(-num_rows // 8), np.uint8)
        self.lost = np.zeros_like(self.changed)
        self.addresses = (self.changed.ctypes.data, self.lost.ctypes.data)
        self.num_entries = 0
        self.num_lost = 0

    def clear(self) -> None:
        self.changed.fill(0)
        if self.num_lost:
            self.lost.fill(0)
        self.num_entries = self.num_lost = 0


class RamUndoLog:
    """As `UndoLog`, of one table's arrays.

    Mutated: the buffer and its books; the arrays themselves by `undo` alone.

    Args:
      arrays: float32 `[num_rows, width]` each, C-contiguous: a table's rows and its slots. They are not copied and must
        stay.
      max_rows: of the buffer, for both moments together.
    """

    def __init__(self, arrays: Sequence[np.ndarray], *, max_rows: int) -> None:
        self._arrays = tuple(arrays)
        self.num_rows = len(self._arrays[0])
        # Taken page by page, as rows come in.
        self._buffers = tuple(aligned_empty((max_rows, array.shape[1])) for array in self._arrays)
        self._log = np.empty(max_rows, np.int64)
        # Chains of entries, one a group of rows, for a snapshot that links here.
        self._heads = np.full(-(-self.num_rows // GROUP_ROWS), -1, np.int32)
        self._following = np.empty(max_rows, np.int32)
        self._addresses = (self._log.ctypes.data, self._heads.ctypes.data, self._following.ctypes.data)
        self._first = 0
        self._older, self._newer = _Moment(self.num_rows), _Moment(self.num_rows)
        self._has_newer = False

    @property
    def size_bytes(self) -> int:
        marks = (self._older.changed, self._older.lost, self._newer.changed, self._newer.lost)
        return sum(array.nbytes for array in (*self._buffers, *marks, self._log, self._heads, self._following))

    @property
    def buffers(self) -> tuple[np.ndarray, ...]:
        return self._buffers

    @property
    def num_kept(self) -> int:
        """Rows in the buffer; one that changed after both moments counts twice."""
        return self._older.num_entries + self._newer.num_entries

    def begin(self) -> None:
        """As `UndoLog.begin`."""
        self._older.clear()
        self._newer.clear()
        self._first, self._has_newer = 0, False

    def freeze(self) -> None:
        """As `UndoLog.freeze`."""
        if self._has_newer:
            self._join()
        self._has_newer = True

    def _join(self) -> None:
        older, newer = self._older, self._newer
        # A row that was unchanged between the moments has one value at both; entries stay where they are, since the
        # oldest one wins.
        if newer.num_lost:
            older.lost |= newer.lost & ~older.changed
            older.num_lost += newer.num_lost
        older.changed |= newer.changed
        older.num_entries += newer.num_entries
        newer.clear()

    def advance(self) -> None:
        """As `UndoLog.advance`."""
        if not self._has_newer:
            raise ValueError("Found no newer moment to advance to. Expected freeze before. Call freeze at each commit.")
        if len(self._log):
            self._first = (self._first + self._older.num_entries) % len(self._log)
        self._older.clear()
        self._older, self._newer = self._newer, self._older
        self._has_newer = False

    def line(self) -> tuple[int, ...]:
        """Its columns, as `kernels.kept_rows` has them."""
        moment = self._newer if self._has_newer else self._older
        log, heads, following = self._addresses
        return (*moment.addresses, log, len(self._log), self._first, self.num_kept, heads, following)

    def matrices(self) -> Matrices:
        """Arrays of the table, and the buffer for each."""
        return list(zip(self._arrays, self._buffers, strict=True))

    def took(self, num_logged: int, num_lost: int) -> None:
        """So many rows were written to it, or lost."""
        moment = self._newer if self._has_newer else self._older
        moment.num_entries += num_logged
        moment.num_lost += num_lost

    @property
    def links(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Of each array, what `kernels.snapshots.read_frozen` takes."""
        return [(self._heads, self._following, self._log, buffer) for buffer in self._buffers]

    def unlink(self, first: int, last: int) -> None:
        """Forgets the links of groups `first` to `last - 1`. What they lead to stays, for undo."""
        self._heads[first:last] = -1

    def undo(self, *, to_newer: bool = False) -> np.ndarray:
        """As `UndoLog.undo`."""
        start = self._older.num_entries if to_newer else 0
        if self.num_kept > start:
            copy_back(self._arrays, self._log, self._first, start, self.num_kept, self._buffers)
        older, newer = self._older, self._newer
        if to_newer:
            return self._positions(newer.lost if newer.num_lost else None)
        lost = older.lost if older.num_lost else None
        if newer.num_lost:
            late = newer.lost & ~older.changed
            lost = late if lost is None else lost | late
        return self._positions(lost)

    def _positions(self, bits: np.ndarray | None) -> np.ndarray:
        if bits is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(np.unpackbits(bits, count=self.num_rows, bitorder="little"))


class SnapshotRoom:
    """The buffer of some snapshots whose arrays have the same widths. They share it, since a few tables change in most
    rows and others hardly change at all.

    Mutated: by the snapshots, which entries are free.

    Args:
      widths: of the arrays.
      max_rows: of the buffer; see `share_out`.
      num_rows: of all tables together.

    Attributes:
      buffers: float32 `[max_rows, width]`, one an array; taken page by page unless `populate` does it before.
      following, offsets, free: books of the entries, as `kernels.snapshots` has them.
      num_kept: rows in the buffer; all other entries are free.
      is_in_order: whether no entry was taken since they were put in order.
    """

    def __init__(self, widths: Sequence[int], *, max_rows: int, num_rows: int) -> None:
        self._max_rows, self._num_rows = max_rows, num_rows
        self.buffers = tuple(aligned_empty((max_rows, width)) for width in widths)
        self.following = np.empty(max_rows, np.int32)
        self.offsets = np.empty(max_rows, np.int32)
        self.free = np.empty(max_rows, np.int32)
        self._addresses = tuple(array.ctypes.data for array in (self.following, self.offsets, self.free))
        self.num_kept = 0
        self.is_in_order = False
        self.put_in_order()

    @property
    def size_bytes(self) -> int:
        """Memory of the buffer and its books."""
        return sum(array.nbytes for array in (*self.buffers, self.following, self.offsets, self.free))

    @property
    def num_free(self) -> int:
        return self._max_rows - self.num_kept

    def line(self) -> tuple[int, ...]:
        """Its columns, as `kernels.kept_rows` has them."""
        return (*self._addresses, self.num_free)

    def put_in_order(self) -> None:
        """While the buffer is empty: the entries are taken in the order of their places from here on. Rows that come in
        together then lie together. In the order in which entries became free, keeping a row took three times as long.
        """
        if not self.num_kept and not self.is_in_order:
            list_downwards(self.free)
            self.is_in_order = True

    def share_of(self, num_kept: int) -> float:
        """What so many rows are of the buffer; 0 where it cannot become full."""
        return num_kept / max(1, self._max_rows) if self._max_rows < self._num_rows else 0.0


class RamSnapshot:
    """As `RowSnapshot`, of one table's arrays.

    Mutated: its part of the buffer, and its books.

    Args:
      arrays: float32 `[num_rows, width]` each, C-contiguous: a table's rows and its slots. They are not copied and must
        stay.
      room: for rows that are kept, of arrays of these widths.
      log: the undo log of the same arrays. Where it knows the frozen moment, what it keeps of that is read there.

    Attributes:
      num_kept: rows of these arrays in the buffer.
    """

    def __init__(self, arrays: Sequence[np.ndarray], *, room: SnapshotRoom, log: RamUndoLog | None = None) -> None:
        self._arrays = tuple(arrays)
        self.num_rows = len(self._arrays[0])
        self.room = room
        self._changed = np.zeros(-(-self.num_rows // 8), np.uint8)
        self._changed_before = np.zeros_like(self._changed)
        self._heads = np.full(-(-self.num_rows // GROUP_ROWS), -1, np.int32)
        self._addresses = (self._changed.ctypes.data, self._heads.ctypes.data)
        self._undo_log = log
        self._log: RamUndoLog | None = None
        self._released = 0
        self.num_kept = 0

    @property
    def size_bytes(self) -> int:
        """Memory of the books, without the room."""
        return sum(array.nbytes for array in (self._changed, self._changed_before, self._heads))

    @property
    def is_released(self) -> bool:
        return self._released >= self.num_rows

    @property
    def taken(self) -> float:
        return self.room.share_of(self.num_kept)

    @property
    def all_taken(self) -> float:
        return self.room.share_of(self.room.num_kept)

    def freeze(self, *, joins_before: bool = False, reads_log: bool = False) -> None:
        """As `RowSnapshot.freeze`."""
        if joins_before:
            np.bitwise_or(self._changed_before, self._changed, out=self._changed_before)
        else:
            self._changed, self._changed_before = self._changed_before, self._changed
        self._addresses = (self._changed.ctypes.data, self._heads.ctypes.data)
        self._forget()
        self._log = self._undo_log if reads_log else None
        if self._log is not None:
            self._log.unlink(0, len(self._heads))

    def _forget(self) -> None:
        self._release_groups(0, len(self._heads))
        self._changed.fill(0)
        self._released = 0

    def line(self) -> tuple[int, ...]:
        """Address of its marks and of its heads, and how many rows are released."""
        return (*self._addresses, self._released)

    def links_to(self, log: RamUndoLog | None) -> bool:
        """Whether it finds in the log what that keeps from now on."""
        return log is not None and log is self._log

    def matrices(self) -> Matrices:
        """Arrays of the table, and the buffer for each."""
        return list(zip(self._arrays, self.room.buffers, strict=True))

    def took(self, num_rows: int) -> None:
        """So many rows were copied to its room."""
        self.num_kept += num_rows
        self.room.num_kept += num_rows
        self.room.is_in_order = False

    def read(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """As `RowSnapshot.read`."""
        if start < self._released:
            raise ValueError(
                f"Found row {start} requested after rows up to {self._released} were released. Expected to read rows "
                "in rising order."
            )
        room = self.room
        links = [_NO_LINKS] * len(self._arrays) if self._log is None else self._log.links
        for array, buffer, linked, values in zip(self._arrays, room.buffers, links, out, strict=True):
            read_frozen(array, self._heads, room.following, room.offsets, buffer, linked, start, stop, values)

    def changed(self, start: int, stop: int) -> np.ndarray:
        """As `RowSnapshot.changed`."""
        first_byte = start // 8
        bits = np.unpackbits(self._changed_before[first_byte : -(-stop // 8)], bitorder="little")
        return np.flatnonzero(bits[start - 8 * first_byte : stop - 8 * first_byte])

    def release(self, stop: int) -> None:
        """As `RowSnapshot.release`; makes room for others, by whole groups of 512."""
        last = len(self._heads) if stop >= self.num_rows else stop // GROUP_ROWS
        self._release_groups(self._released // GROUP_ROWS, last)
        self._released = max(self._released, stop)

    def _release_groups(self, first: int, last: int) -> None:
        room = self.room
        count = release_groups(first, last, self._heads, room.following, room.free, room.num_free)
        if self._log is not None:
            self._log.unlink(first, last)
        self.num_kept -= count
        room.num_kept -= count


class RamPreImages:
    """As `PreImages`, of arrays in memory.

    Mutated: what of the tables is kept where; the tables themselves are not.

    Args:
      kept: the undo log and the snapshot of each table; either may be None.
    """

    def __init__(self, kept: Sequence[tuple[RamUndoLog | None, RamSnapshot | None]]) -> None:
        self._kept = tuple(kept)
        self.snapshots = tuple(snapshot for _, snapshot in kept if snapshot is not None)
        rooms = list(dict.fromkeys(snapshot.room for snapshot in self.snapshots))
        self._rooms = rooms
        numbers = {id(room): number for number, room in enumerate(rooms)}
        self._room_of = [0 if snapshot is None else numbers[id(snapshot.room)] for _, snapshot in kept]
        self._num_rows = [max(0 if one is None else one.num_rows for one in pair) for pair in kept]
        self._of_logs = _Copies([() if log is None else log.matrices() for log, _ in kept])
        self._of_rooms = _Copies([() if snapshot is None else snapshot.matrices() for _, snapshot in kept])
        self._rows = [np.empty(0, np.int64)] * 2
        self._entries = [np.empty(0, np.int32)] * 2

    @staticmethod
    def of(
        tables: Sequence[Sequence[np.ndarray]], logs: Sequence[RamUndoLog | None], *, buffer_bytes: int
    ) -> RamPreImages:
        """With a snapshot of each table, given as its arrays. Those of tables with the same widths share a room."""
        shares = share_out(tables, budget_bytes=buffer_bytes)
        sizes: dict[tuple[int, ...], tuple[int, int]] = {}
        for arrays, share in zip(tables, shares, strict=True):
            max_rows, num_rows = sizes.get(_widths(arrays), (0, 0))
            sizes[_widths(arrays)] = max_rows + share, num_rows + len(arrays[0])
        rooms = {
            widths: SnapshotRoom(widths, max_rows=min(max_rows, MOST_ENTRIES), num_rows=num_rows)
            for widths, (max_rows, num_rows) in sizes.items()
        }
        _compile([*rooms])
        return RamPreImages(
            [
                (log, RamSnapshot(arrays, room=rooms[_widths(arrays)], log=log))
                for arrays, log in zip(tables, logs, strict=True)
            ]
        )

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in (*self._rooms, *self.snapshots))

    @property
    def buffers(self) -> list[np.ndarray]:
        return [buffer for room in self._rooms for buffer in room.buffers]

    @property
    def taken(self) -> float:
        return max((room.share_of(room.num_kept) for room in self._rooms), default=0.0)

    def settle(self) -> None:
        """As `PreImages.settle`."""
        for room in self._rooms:
            room.put_in_order()

    @staticmethod
    def touched(rows: np.ndarray) -> np.ndarray:
        """As `PreImages.touched`: int64 `[1, 2]`, the address of the rows and how many they are."""
        return np.array([[rows.ctypes.data, len(rows)]], np.int64)

    def keep(
        self,
        numbers: Sequence[int],
        touched: np.ndarray,
        begin: tuple[int, int] = (0, 0),
        *,
        logs: bool = True,
        freezes: bool = True,
    ) -> tuple[int, int]:
        """As `PreImages.keep`.

        Args:
          touched: int64 `[t, 2]`, a line of `touched` for each of `numbers`.
        """
        tables = np.array([self._line(number, logs=logs, freezes=freezes) for number in numbers], np.int64)
        rooms = np.array([room.line() for room in self._rooms] or [(0,) * (NUM_FREE + 1)], np.int64)
        touched = np.ascontiguousarray(touched, np.int64)
        came = np.zeros((len(numbers), 3), np.int64)
        counts = touched[:, 1].copy()
        counts[: begin[0]] = 0
        self._make_scratch(int(counts.sum()))
        at, number = claim_rows(
            tables, rooms, touched, *begin, came, self._rows[0], self._entries[0], self._rows[1], self._entries[1]
        )
        begins = np.cumsum(counts) - counts
        self._of_logs.run(numbers, begins, came[:, NUM_LOGGED], self._rows[0], self._entries[0])
        self._of_rooms.run(numbers, begins, came[:, NUM_ROOMED], self._rows[1], self._entries[1])
        # Only what has been copied counts.
        self._take(numbers, came.tolist())
        return int(at), int(number)

    def _line(self, number: int, *, logs: bool, freezes: bool) -> tuple[int, ...]:
        log, snapshot = self._kept[number]
        if not logs:
            log = None
        of_log = _NO_LOG if log is None else log.line()
        if snapshot is None or not freezes:
            return (*of_log, *_NO_SNAPSHOT, 0, 0, self._num_rows[number])
        return (*of_log, *snapshot.line(), self._room_of[number], snapshot.links_to(log), self._num_rows[number])

    def _make_scratch(self, num_rows: int) -> None:
        if len(self._rows[0]) < num_rows:
            self._rows = [np.empty(num_rows, np.int64) for _ in range(2)]
            self._entries = [np.empty(num_rows, np.int32) for _ in range(2)]

    def _take(self, numbers: Sequence[int], came: Sequence[Sequence[int]]) -> None:
        for number, (num_logged, num_lost, num_roomed) in zip(numbers, came, strict=True):
            log, snapshot = self._kept[number]
            if log is not None and (num_logged or num_lost):
                log.took(num_logged, num_lost)
            if snapshot is not None and num_roomed:
                snapshot.took(num_roomed)


class _Copies:
    """All copies from tables to buffers, by their width.

    Args:
      matrices: of each table.
    """

    def __init__(self, matrices: Sequence[Matrices]) -> None:
        self._num_tables = len(matrices)
        of_width: dict[int, tuple[list[int], list[tuple[int, ...]]]] = {}
        for number, of_table in enumerate(matrices):
            for array, buffer in of_table:
                dim = array.shape[1]
                tables, lines = of_width.setdefault(dim, ([], []))
                tables.append(number)
                lines.append((*matrix_of(array), *matrix_of(buffer), can_stream(buffer, dim), 0, 0))
        self._of_width = {
            dim: (np.array(tables), np.array(lines, np.int64).reshape(-1, COPY_COLUMNS))
            for dim, (tables, lines) in of_width.items()
        }

    def run(
        self, numbers: Sequence[int], begins: np.ndarray, counts: np.ndarray, rows: np.ndarray, entries: np.ndarray
    ) -> None:
        """Copies the listed rows of some tables.

        Args:
          begins, counts: int64 `[t]`, which of the listed rows are those of each of `numbers`.
        """
        if not counts.any():
            return
        places = np.zeros((2, self._num_tables), np.int64)
        places[:, list(numbers)] = begins, counts
        for dim, (tables, lines) in self._of_width.items():
            some = places[1, tables] > 0
            copies = lines[some]
            copies[:, BEGIN], copies[:, NUM_COPIED] = places[:, tables[some]]
            copy_rows(dim, copies, rows, entries)


def undo_logs(tables: Sequence[Sequence[np.ndarray]], *, budget_bytes: int) -> list[RamUndoLog]:
    """As `StoreKind.undo_logs`, of tables given as their arrays."""
    # A row that changes after both moments takes two entries.
    shares = share_out(tables, budget_bytes=budget_bytes, entries_per_row=2)
    return [
        RamUndoLog(arrays, max_rows=min(max_rows, MOST_ENTRIES))
        for arrays, max_rows in zip(tables, shares, strict=True)
    ]


def share_out(tables: Sequence[Sequence[np.ndarray]], *, budget_bytes: int, entries_per_row: int = 1) -> list[int]:
    """Entries for each table: equal bytes for all, but no more than its rows can take, and at least one.

    A step touches about as many rows of a small table as of a large one. A share by size would leave small tables
    without room. Snapshots that share a room have the sum of their shares.

    Args:
      tables: the arrays of each.
      budget_bytes: for all buffers together.
    """
    most = [entries_per_row * len(arrays[0]) for arrays in tables]
    row_bytes = [4 * sum(_widths(arrays)) + ENTRY_BYTES for arrays in tables]
    shares = [0] * len(tables)
    left = budget_bytes
    by_size = sorted(range(len(tables)), key=lambda at: most[at] * row_bytes[at])
    for position, at in enumerate(by_size):
        fair_bytes = left // (len(by_size) - position)
        shares[at] = min(most[at], max(1, fair_bytes // row_bytes[at]))
        left = max(0, left - shares[at] * row_bytes[at])
    return shares


def _widths(arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
    return tuple(array.shape[1] for array in arrays)


def _compile(widths_of_tables: Sequence[tuple[int, ...]]) -> None:
    """Runs the kernels on nothing, so that the first save does not wait for a compiler."""
    for widths in widths_of_tables:
        arrays = [np.zeros((1, width), np.float32) for width in widths]
        log = RamUndoLog(arrays, max_rows=1)
        snapshot = RamSnapshot(arrays, room=SnapshotRoom(widths, max_rows=1, num_rows=1), log=log)
        snapshot.freeze(reads_log=True)
        rows = np.zeros(1, np.int64)
        RamPreImages([(None, snapshot)]).keep((0,), RamPreImages.touched(rows))
        RamPreImages([(log, None)]).keep((0,), RamPreImages.touched(rows))
        snapshot.read(0, 1, [array.copy() for array in arrays])
        snapshot.release(1)
        log.undo()
