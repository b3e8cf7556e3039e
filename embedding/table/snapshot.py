"""`Snapshot`: the values that the rows of a table had at one moment, while the table goes on changing.

Before the first change of a row after the moment, the row is copied into a buffer of fixed size. Other rows are read
where they lie. This serves two purposes: writing a checkpoint while training goes on, and going back to the moment.
Pure arrays: who calls from which thread, and what happens while the buffer is full, is the caller's business
(`workers.checkpoint.background_save`). Which rows changed between two moments is known, too, for checkpoints that write
only those.

Rows are kept one by one and not in blocks, since ids are spread over a table. A step that touches one row in 300
touches every fifth block of 64. A buffer of a tenth of the table was full within that step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.kernels.snapshots import (
    GROUP_ROWS,
    list_downwards,
    put_back,
    read_frozen,
    release_groups,
)
from podembed.embedding.table.kept_rows import KeptRows, Log, line_of
from podembed.embedding.table.undo_log import UndoLog

__all__ = ["ENTRY_BYTES", "Snapshot", "SnapshotRoom", "share_out"]

# Of the book-keeping of a kept row, beside its values.
ENTRY_BYTES = 12
_NO_LINKS = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64), np.empty((0, 1), np.float32))


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
        """As `kept_rows.Room`."""
        return (*self._addresses, self.num_free)

    def put_in_order(self) -> None:
        """While the buffer is empty: the entries are taken in the order of their places from here on. Rows that come in
        together then lie together. In the order in which entries became free, keeping a row took three times as long.
        """
        if not self.num_kept and not self.is_in_order:
            list_downwards(self.free)
            self.is_in_order = True

    @property
    def taken(self) -> float:
        """Share of the buffer; 0 where it cannot become full."""
        return self.num_kept / max(1, self._max_rows) if self._max_rows < self._num_rows else 0.0

    def share_of(self, snapshot: Snapshot) -> float:
        """What of the buffer one of the snapshots has taken; 0 where it cannot become full."""
        return snapshot.num_kept / max(1, self._max_rows) if self._max_rows < self._num_rows else 0.0


class Snapshot:
    """The frozen view of some arrays whose rows change together.

    Mutated: its part of the buffer, and its books; the arrays themselves by `undo` alone.

    Args:
      arrays: float32 `[num_rows, width]` each, C-contiguous: a table's rows and its slots. They are not copied and must
        stay.
      room: for rows that are kept, of arrays of these widths.

    Attributes:
      num_kept: rows of these arrays in the buffer.
    """

    def __init__(self, arrays: Sequence[np.ndarray], *, room: SnapshotRoom) -> None:
        self._arrays = tuple(arrays)
        self._num_rows = len(self._arrays[0])
        self.room = room
        self._changed = np.zeros(-(-self._num_rows // 8), np.uint8)
        self._changed_before = np.zeros_like(self._changed)
        self._heads = np.full(-(-self._num_rows // GROUP_ROWS), -1, np.int32)
        self._addresses = (self._changed.ctypes.data, self._heads.ctypes.data)
        self._log: UndoLog | None = None
        self._released = 0
        self.num_kept = 0

    @property
    def size_bytes(self) -> int:
        """Memory of the books, without the room."""
        return sum(array.nbytes for array in (self._changed, self._changed_before, self._heads))

    @property
    def is_released(self) -> bool:
        """Whether no frozen value is needed any more."""
        return self._released >= self._num_rows

    def freeze(self, *, joins_before: bool = False, log: UndoLog | None = None) -> None:
        """Takes the present values for the frozen ones, and forgets those of an earlier moment, but for which rows
        changed since.

        Args:
          joins_before: `changed` will tell of what changed since the last freeze but one, and so on while this is set:
            since the last freeze without it.
          log: of the same arrays, whose newer moment is this one and stays so until all rows are released. What it
            keeps of it is read there.
        """
        if joins_before:
            np.bitwise_or(self._changed_before, self._changed, out=self._changed_before)
        else:
            self._changed, self._changed_before = self._changed_before, self._changed
        self._addresses = (self._changed.ctypes.data, self._heads.ctypes.data)
        self._forget()
        self._log = log
        if log is not None:
            log.unlink(0, len(self._heads))

    def _forget(self) -> None:
        self._release_groups(0, len(self._heads))
        self._changed.fill(0)
        self._released = 0

    def preserve(self, rows: np.ndarray) -> int:
        """To be called before rows change. Copies those that have not changed since the freeze.

        Args:
          rows: int64 `[n]`, any order, may repeat.

        Returns:
          How many rows, from the first, may be changed now: fewer than n when the buffer is full. Call again with the
          rest after `release`.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        at, number = KeptRows([(None, self)]).keep((0,), line_of(rows))
        return len(rows) if at else number

    def line(self) -> tuple[int, ...]:
        """As `kept_rows.Snapshot`."""
        return (*self._addresses, self._released)

    def links_to(self, log: Log | None) -> bool:
        """As `kept_rows.Snapshot`."""
        return log is not None and log is self._log

    def matrices(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """As `kept_rows.Snapshot`."""
        return list(zip(self._arrays, self.room.buffers, strict=True))

    def took(self, num_rows: int) -> None:
        """As `kept_rows.Snapshot`."""
        self.num_kept += num_rows
        self.room.num_kept += num_rows
        self.room.is_in_order = False

    def read(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """Copies the frozen values of rows `start` to `stop - 1`, which must not have been released.

        Args:
          out: one float32 `[stop - start, width]` an array, C-contiguous.
        """
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
        """Which of the rows `start` to `stop - 1` changed between the last two freezes, as `preserve` heard: int64,
        from 0 at `start`.
        """
        first_byte = start // 8
        bits = np.unpackbits(self._changed_before[first_byte : -(-stop // 8)], bitorder="little")
        return np.flatnonzero(bits[start - 8 * first_byte : stop - 8 * first_byte])

    def release(self, stop: int) -> None:
        """Says that the frozen values of rows below `stop` are not needed any more; makes room for others, by whole
        groups of 512.
        """
        last = len(self._heads) if stop >= self._num_rows else stop // GROUP_ROWS
        self._release_groups(self._released // GROUP_ROWS, last)
        self._released = max(self._released, stop)

    def _release_groups(self, first: int, last: int) -> None:
        room = self.room
        count = release_groups(first, last, self._heads, room.following, room.free, room.num_free)
        if self._log is not None:
            self._log.unlink(first, last)
        self.num_kept -= count
        room.num_kept -= count

    def undo(self) -> int:
        """Gives all rows their frozen values again. The moment stays frozen, and the buffer is empty afterwards. A log
        that it was frozen with goes back by itself.

        Returns:
          How many rows had changed.

        Raises:
          ValueError: rows have been released since the freeze, so not all frozen values are known.
        """
        if self._released:
            raise ValueError(
                f"Found rows up to {self._released} released since the freeze. Expected none, to go back to it. "
                "Restore from a commit."
            )
        num_rows, room = self.num_kept, self.room
        for array, buffer in zip(self._arrays, room.buffers, strict=True):
            put_back(array, self._heads, room.following, room.offsets, buffer)
        self._forget()
        return num_rows


def share_out(*, num_rows: Sequence[int], row_bytes: Sequence[int], budget_bytes: int) -> list[int]:
    """Rows of the buffer for each table: equal bytes for all, but no more than the table has, and at least one row.

    A step touches about as many rows of a small table as of a large one. A share by size would leave small tables
    without room. Snapshots that share a room have the sum of their shares.

    Args:
      num_rows: of each table.
      row_bytes: bytes of one kept row of each, with slots and `ENTRY_BYTES`.
      budget_bytes: for all buffers together.
    """
    shares = [0] * len(num_rows)
    left = budget_bytes
    by_size = sorted(range(len(num_rows)), key=lambda at: num_rows[at] * row_bytes[at])
    for position, at in enumerate(by_size):
        fair_bytes = left // (len(by_size) - position)
        shares[at] = min(num_rows[at], max(1, fair_bytes // row_bytes[at]))
        left = max(0, left - shares[at] * row_bytes[at])
    return shares
