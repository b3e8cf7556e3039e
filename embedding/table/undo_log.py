"""`UndoLog`: undo to one or two earlier moments of some arrays whose rows change together.

Before the first change of a row after a moment, the row is written down in a buffer of fixed size. Going back writes
the buffer into the arrays again, newest first. A full buffer stops no update. Rows that change then are *lost*, which
costs a bit each. Undo names them, so that they can be had from elsewhere. While a commit is being written there are two
moments, that of the commit before and its own. Which of them is the commit that one goes back to is known only later.
Pure arrays: what a moment stands for is the caller's business (`workers.checkpoint.undo`), and there is one caller at a
time.

A `Snapshot` keeps values, too, but for a reader beside the changes, which lets go of them row by row. Here they are
kept until the next commit. One of the same moment as the newer one here finds them here (`links`), and keeps only those
for which this buffer has no room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.kernels.kept_rows import copy_back
from podembed.embedding.kernels.snapshots import GROUP_ROWS
from podembed.embedding.table.kept_rows import KeptRows, line_of

__all__ = ["ROW_NUMBER_BYTES", "UndoLog"]

# Of a row in the buffer, beside its values.
ROW_NUMBER_BYTES = 12


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


class UndoLog:
    """The undo log of one table's arrays.

    Mutated: the buffer and its books; the arrays themselves by `undo` alone.

    Args:
      arrays: float32 `[num_rows, width]` each, C-contiguous: a table's rows and its slots. They are not copied and must
        stay.
      max_rows: of the buffer, for both moments together.
    """

    def __init__(self, arrays: Sequence[np.ndarray], *, max_rows: int) -> None:
        self._arrays = tuple(arrays)
        self._num_rows = len(self._arrays[0])
        # Taken page by page, as rows come in.
        self._buffers = tuple(aligned_empty((max_rows, array.shape[1])) for array in self._arrays)
        self._log = np.empty(max_rows, np.int64)
        # Chains of entries, one a group of rows, for a snapshot that links here.
        self._heads = np.full(-(-self._num_rows // GROUP_ROWS), -1, np.int32)
        self._following = np.empty(max_rows, np.int32)
        self._addresses = (self._log.ctypes.data, self._heads.ctypes.data, self._following.ctypes.data)
        self._first = 0
        self._older, self._newer = _Moment(self._num_rows), _Moment(self._num_rows)
        self._has_newer = False

    @property
    def size_bytes(self) -> int:
        """Memory of a full buffer and its books."""
        marks = (self._older.changed, self._older.lost, self._newer.changed, self._newer.lost)
        return sum(array.nbytes for array in (*self._buffers, *marks, self._log, self._heads, self._following))

    @property
    def buffers(self) -> tuple[np.ndarray, ...]:
        """The largest part of that memory, which is taken page by page unless `populate` does it before."""
        return self._buffers

    @property
    def num_kept(self) -> int:
        """Rows in the buffer; one that changed after both moments counts twice."""
        return self._older.num_entries + self._newer.num_entries

    def begin(self) -> None:
        """Forgets everything: the present values are the older moment, and there is no newer one."""
        self._older.clear()
        self._newer.clear()
        self._first, self._has_newer = 0, False

    def freeze(self) -> None:
        """Makes the present values the newer moment. One that was there before is none any more: what changed since it
        counts as since the older.
        """
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
        """Lets go of the older moment; the newer one takes its place."""
        if not self._has_newer:
            raise ValueError("Found no newer moment to advance to. Expected freeze before. Call freeze at each commit.")
        if len(self._log):
            self._first = (self._first + self._older.num_entries) % len(self._log)
        self._older.clear()
        self._older, self._newer = self._newer, self._older
        self._has_newer = False

    def preserve(self, rows: np.ndarray) -> None:
        """To be called before rows change (int64 `[n]`, any order, may repeat). Never refuses."""
        rows = np.ascontiguousarray(rows, np.int64)
        KeptRows([(self, None)]).keep((0,), line_of(rows))

    def line(self) -> tuple[int, ...]:
        """As `kept_rows.Log`."""
        moment = self._newer if self._has_newer else self._older
        log, heads, following = self._addresses
        return (*moment.addresses, log, len(self._log), self._first, self.num_kept, heads, following)

    def matrices(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """As `kept_rows.Log`."""
        return list(zip(self._arrays, self._buffers, strict=True))

    def took(self, num_logged: int, num_lost: int) -> None:
        """As `kept_rows.Log`."""
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
        """Gives all rows the values that they had at a moment, but for those that are lost. Only `begin` may follow.

        Returns:
          Lost rows, int64, rising: their values are those of some later time.
        """
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
        return np.flatnonzero(np.unpackbits(bits, count=self._num_rows, bitorder="little"))
