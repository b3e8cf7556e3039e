"""`FrozenRows`: the rows of a host at one moment, kept for a save while training goes on changing them.

Each row is copied once. Either the saving thread reads it first, or the working thread keeps it before it changes it.
It is kept in the undo log, or in the snapshot where that is full. The saving thread then reads it from there. After a
fault, the moment is that of the commit, and threads that compare rows with it read them in the same way
(`workers.host.survivors.verification`).

Threads: the working thread alone changes rows, and freezes the moment between two steps. The saving thread reads, or
those that compare do. The lock `turn` guards what both sides touch: the books of the snapshots, and rows that neither
has copied. A reader holds it for one piece of a bucket (`PIECE_BYTES`). The working thread holds it while it looks at
the rows that it is about to change. When the snapshot is full, the working thread waits for the readers. They never
wait for the working one once a moment is frozen, so there is no circle. A save that ends, well or not, wakes the
working thread and leaves nothing to wait for. The working thread gives up a save that frees nothing for too long. It
keeps no more rows for it and goes on, and the save fails when it wakes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podembed.embedding.table.stores.store import Keeper, RowSnapshot
from podembed.embedding.table.table import Table, kind_of
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.storage.storage_errors import StorageError

PIECE_BYTES = 256 << 10
NEARLY_FULL = 0.75
# With 0.5 the longest step was twice as long, and the others were as long. `benchmarks/saving.py` shows it.
TAKEN_AFTER_WAIT = 0.75
# A large buffer on slow storage takes minutes to get there, and other hosts wait with deadlines.
MOST_FOR_OTHERS_S = 0.5
_LOOK_S = 0.1


class SaveStalled(StorageError):
    """A save did not go on while training waited for it, and was given up."""


class FrozenRows:
    """See the module.

    Mutated: the snapshots and their buffers; `before_change` of the tables.

    Args:
      tables: all tables of the job as this host holds them.
      buffer_bytes: for rows that change before they are read.
      tracker: tracker of the working thread; the time in which it waits for a save goes to the phase "wait for save".
      stalled_after_s: longest wait for a save that frees nothing; then it is given up.
      raise_if_aborted: called often, by both threads; raises to end the save or the wait.
      tracks_changes: whether changes are noted between saves, too, from the first moment on.
      undo: listener for every change, from the first moment on; None keeps no undo log.

    Attributes:
      turn: the lock, on which the working thread waits for room.
      num_waits: how often the working thread has waited for room so far.
      is_running: whether a moment is frozen and its save, or what else reads it, has not ended.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        buffer_bytes: int,
        tracker: Tracker,
        stalled_after_s: float,
        raise_if_aborted: Callable[[], None],
        tracks_changes: bool,
        undo: Undo | None,
    ) -> None:
        self._tables = tuple(tables)
        self._tracker = tracker
        self._stalled_after_s = stalled_after_s
        self._raise_if_aborted = raise_if_aborted
        self._tracks_changes = tracks_changes
        self._undo = undo
        logs = [None if undo is None else undo.log_of(table) for table in tables]
        self._kept = kind_of(tables).pre_images([table.store for table in tables], logs, buffer_bytes=buffer_bytes)
        self._in_order = self._kept.snapshots
        self._snapshots = {table.spec.name: one for table, one in zip(tables, self._in_order, strict=True)}
        self._keepers = [Keeper(self._keep, number, self._kept.touched) for number in range(len(tables))]
        self.turn: Any = threading.Condition()
        self.num_waits = 0
        self.is_running = False
        self._is_for_save = False
        self._given_up: SaveStalled | None = None
        self._num_pieces = 0

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    @property
    def buffers(self) -> Sequence[np.ndarray]:
        """Snapshot buffers of all tables. Their memory is taken as rows come in."""
        return self._kept.buffers

    @property
    def taken(self) -> float:
        """Share of the fullest buffer. Without the lock: numbers may be a moment old."""
        return self._kept.taken

    @property
    def is_nearly_full(self) -> bool:
        """Whether training would soon wait for room. As `taken`."""
        return self.taken > NEARLY_FULL

    def taken_by(self, table: Table) -> float:
        """Share of its buffer that a table has taken. Without the lock, as `is_nearly_full`."""
        return self._snapshots[table.spec.name].taken

    def urgency_of(self, table: Table) -> tuple[bool, float]:
        """Orders tables by how soon training would wait for room that their rows have. As `taken_by`."""
        return self._snapshots[table.spec.name].all_taken > NEARLY_FULL, self.taken_by(table)

    # ------------------------------------------------------------------ the working thread

    def freeze(self, *, joins_before: bool) -> None:
        """Makes this moment the one that is read.

        Args:
          joins_before: flag of `RowSnapshot.freeze`.
        """
        self._given_up = None
        # All tables under one lock: the saving thread must not see the moment of some of them only.
        with self.turn:
            for table, snapshot, keeper in zip(self._tables, self._in_order, self._keepers, strict=True):
                # Undo took up the same moment just now.
                snapshot.freeze(joins_before=joins_before, reads_log=True)
                table.before_change = keeper
            self.is_running = self._is_for_save = True
            self.turn.notify_all()

    def note_changes(self, *, is_read: bool = False) -> None:
        """Begins to note changes, for `changed` and for undo.

        Args:
          is_read: whether this moment is read, until `end`, although no save writes it. Otherwise none is before the
            next freeze.
        """
        self._given_up = None
        with self.turn:
            for table, snapshot, keeper in zip(self._tables, self._in_order, self._keepers, strict=True):
                if self._tracks_changes or is_read:
                    snapshot.freeze()
                if not is_read:
                    snapshot.release(table.num_rows)
                table.before_change = keeper
            self.is_running = is_read

    def _keep(self, numbers: Sequence[int], touched: Any) -> None:
        """Keeps what undo and a save will need of rows that are about to change; as `PreImages.keep`."""
        logs = self._undo is not None and self._undo.is_keeping()
        # Only this thread begins a save; one that ends meanwhile is seen under the lock.
        if not self._must_freeze(numbers):
            if logs:
                self._kept.keep(numbers, touched, freezes=False)
            return
        at = (0, 0)
        # Under the lock the saving thread neither reads nor releases rows while they are kept. The rows themselves
        # change after this returns.
        with self.turn:
            while at[0] < len(numbers):
                # Looked at again after each wait, in which the save may have ended.
                freezes = self.is_running or self._tracks_changes
                at = self._kept.keep(numbers, touched, at, logs=logs, freezes=freezes)
                if at[0] < len(numbers):
                    self._wait_for_room(self._in_order[numbers[at[0]]])

    def _must_freeze(self, numbers: Sequence[int]) -> bool:
        """Whether the snapshots of some tables must hear of changes. Without the lock, as `taken`."""
        is_read = self.is_running and not all(self._in_order[number].is_released for number in numbers)
        return self._tracks_changes or is_read

    def _wait_for_room(self, full: RowSnapshot) -> None:
        """Waits until the saving thread has copied something, which may have been what is in the way, and some more; or
        gives the save up.

        With only the room that a step needs, the next one would wait again. On many hosts each step would then wait for
        another one of them. So a step that has to wait does it for several, for a while.
        """
        seen, began_s = self._num_pieces, time.monotonic()
        self.num_waits += 1
        with self._tracker.phase(Phase.WAIT_FOR_SAVE):
            while self.is_running and (self._num_pieces == seen or full.all_taken > TAKEN_AFTER_WAIT):
                self._raise_if_aborted()
                waited_s = time.monotonic() - began_s
                if self._num_pieces != seen and waited_s > MOST_FOR_OTHERS_S:
                    return
                # Threads that compare rows wait for no storage, so only an abort ends this.
                if self._num_pieces == seen and self._is_for_save and waited_s > self._stalled_after_s:
                    self._give_up()
                    return
                # With a timeout, since an abort is not notified.
                self.turn.wait(_LOOK_S)

    def _give_up(self) -> None:
        """Keeps nothing for the save any more; it learns of that when it asks for the next piece."""
        self._given_up = SaveStalled(
            f"Found a save that wrote nothing for {self._stalled_after_s:.0f} s, while a buffer for changed rows "
            f"(of {self.size_bytes:,} bytes in all) was full. Expected the storage to take files. Look at the storage; "
            "what was committed before stands."
        )
        self._release_all()

    # ------------------------------------------------------------------ the saving thread

    def await_freeze(self) -> None:
        """The driver asks for the moment and for its files at once, of two threads. The moment may wait for another
        one to be read.
        """
        seen, deadline_s = self._num_pieces, time.monotonic() + self._stalled_after_s
        with self.turn:
            while not (self.is_running and self._is_for_save):
                self._raise_if_aborted()
                if self._num_pieces != seen:
                    seen, deadline_s = self._num_pieces, time.monotonic() + self._stalled_after_s
                if time.monotonic() > deadline_s:
                    raise RuntimeError(
                        "A save was to be written and no moment was frozen. Expected begin_save with it."
                    )
                self.turn.wait(_LOOK_S)

    def end(self) -> None:
        """Ends the frozen moment: nothing is kept any more, and no thread waits."""
        with self.turn:
            self.is_running = self._is_for_save = False
            self._release_all()
            # Only when all rows are released may free entries be sorted.
            self._kept.settle()
            for table in self._tables:
                if not self._tracks_changes and self._undo is None:
                    table.before_change = None
            self.turn.notify_all()

    def read(self, table: Table, first: int, out: Sequence[np.ndarray]) -> None:
        """Copies frozen rows and slots from local row `first` on, and lets go of them.

        Args:
          out: float32 `[length, width]` for each array of the table.

        Raises:
          SaveStalled: training has given the save up.
        """
        snapshot, length = self._snapshots[table.spec.name], len(out[0])
        step = max(1, PIECE_BYTES // table.spec.row_bytes)
        for start in range(0, length, step):
            stop = min(start + step, length)
            self._raise_if_aborted()
            # A piece at a time, so that training gets the lock in between.
            with self.turn:
                self.raise_if_given_up()
                snapshot.read(first + start, first + stop, [values[start:stop] for values in out])
                self._let_go(snapshot, first + stop)

    def skip(self, table: Table, stop: int) -> None:
        """Gives rows below `stop` up without reading them."""
        self._raise_if_aborted()
        with self.turn:
            self.raise_if_given_up()
            self._let_go(self._snapshots[table.spec.name], stop)

    def changed(self, table: Table, start: int, stop: int) -> np.ndarray:
        """Those local rows from `start` to `stop - 1` that changed between the last two freezes, as
        `RowSnapshot.changed`.
        """
        return self._snapshots[table.spec.name].changed(start, stop)

    def raise_if_given_up(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    def _let_go(self, snapshot: RowSnapshot, stop: int) -> None:
        snapshot.release(stop)
        self._num_pieces += 1
        self.turn.notify_all()

    def _release_all(self) -> None:
        for table, snapshot in zip(self._tables, self._in_order, strict=True):
            snapshot.release(table.num_rows)
