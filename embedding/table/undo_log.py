"""`UndoLog`: undo to one or two earlier moments of some arrays whose rows change together.

Before the first change of a row after a moment, the row is written down in a buffer of fixed size. Going back writes
the buffer into the arrays again, newest first. A full buffer stops no update. Rows that change then are *lost*, which
costs a bit each. Undo names them, so that they can be had from elsewhere. While a commit is being written there are two
moments, that of the commit before and its own. Which of them is the commit that one goes back to is known only later.
Pure arrays: what a moment stands for is the caller's business (`workers.checkpoint.undo`), and there is one caller at a
time.

A `Snapshot` keeps values, too, but for a reader beside the changes, which lets go of them row by row. Here they are
kept until the next commit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.kernels.pool import gather
from podembed.embedding.kernels.undo import copy_back, note_rows

__all__ = ["ROW_NUMBER_BYTES", "UndoLog"]

# Of a row in the buffer, beside its values.
ROW_NUMBER_BYTES = 8


class _Moment:
    """What changed since a moment, up to the next one. Mutable.

    Attributes:
      changed, lost: uint8, a bit a row.
      num_entries: of the buffer, taken by rows that changed since.
    """

    def __init__(self, num_rows: int) -> None:
        # Zeros that are never written take no memory.
        self.changed = np.zeros(-(-num_rows // 8), np.uint8)
        self.lost = np.zeros_like(self.changed)
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
        self._first = 0
        self._older, self._newer = _Moment(self._num_rows), _Moment(self._num_rows)
        self._has_newer = False

    @property
    def size_bytes(self) -> int:
        """Memory of a full buffer and its books."""
        books = (self._log, self._older.changed, self._older.lost, self._newer.changed, self._newer.lost)
        return sum(array.nbytes for array in (*self._buffers, *books))

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
        moment = self._newer if self._has_newer else self._older
        count = self.num_kept
        given, num_lost = note_rows(rows, moment.changed, moment.lost, self._log, self._first, count)
        if given:
            self._write_down(count, given)
        moment.num_entries += given
        moment.num_lost += num_lost

    def _write_down(self, start: int, count: int) -> None:
        """Copies the rows of `count` entries into the buffers, from the entry `start` on, counted from the oldest."""
        size = len(self._log)
        begin = (self._first + start) % size
        # The ring goes on at its beginning.
        for part in (slice(begin, min(begin + count, size)), slice(0, max(0, begin + count - size))):
            for array, buffer in zip(self._arrays, self._buffers, strict=True):
                gather(array, self._log[part], buffer[part])

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
