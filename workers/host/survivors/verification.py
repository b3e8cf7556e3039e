"""`RowVerification`: the buckets that a survivor kept are compared with the commit while training goes on.

No survivor is trusted, but training need not wait for that. What a generation does before its first commit is undone
when a bucket differs, as after any fault. A commit and an evaluation wait until all is compared (`finish`). So a
recovery takes as long with large tables as with small ones.

The moment of the commit is frozen as for a save (`workers.checkpoint.frozen_rows`): a row that training changes is kept
first. The threads here copy a bucket, then compute its digest from the copy. They keep to the pace of a save, since
training and the devices that compile need the processors. When training waits for them, they go as fast as they can.

A bucket that differs ends the generation (`RowsDamaged`), once all others have been compared. The next one reads it
from the commit, and compares the others before it trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.files import describe_bucket, has_digest
from podembed.workers.checkpoint.frozen_rows import FrozenRows
from podembed.workers.checkpoint.save_pace import SavePace
from podembed.workers.faults.inject import spoil
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.processors import roam

_LOOK_S = 0.1
_MOST_NAMED = 3


class RowsDamaged(RuntimeError):
    """Rows that a host kept in memory are not those of the commit that training went on from."""


class _Stopped(Exception):
    """The generation is over."""


@dataclass(slots=True, eq=False)
class _Kept:
    """The buckets of one table that are compared. Mutated: how far they are read, by who holds the turn.

    Attributes:
      positions: rising, of the buckets to compare among those held here.
      wrong: bool `[buckets held here]`, which were found to differ.
      num_read: of the positions.
      turn: rows are read in rising order.
    """

    table: Table
    entry: TableFiles
    positions: np.ndarray
    wrong: np.ndarray
    num_read: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)


class RowVerification:
    """Begins at once. Mutated: `wrong`, and by its end the frozen rows, which are let go of.

    The working thread makes it and calls its methods. Its own threads look at frozen rows alone.

    Args:
      rows: in which the moment of the commit is frozen.
      tables: all tables of the job as this host holds them.
      files: files of the commit.
      kept: per table, bool `[buckets held here]`, which of them to compare.
      tracker: tracker of the working thread.
      check: called often, by all threads; raises to end the work.
      threads: threads that compare.
      processors: processors that they may keep busy beside training; None leaves it to `SavePace`.

    Attributes:
      wrong: per table, bool `[buckets held here]`, which of them have another digest; as far as is known.
    """

    def __init__(
        self,
        rows: FrozenRows,
        tables: Sequence[Table],
        files: Sequence[TableFiles],
        kept: Sequence[np.ndarray],
        *,
        tracker: Tracker,
        check: Callable[[], None],
        threads: int = 1,
        processors: float | None = None,
    ) -> None:
        self._rows, self._tracker, self._check = rows, tracker, check
        self.wrong = [np.zeros(len(table.buckets), bool) for table in tables]
        by_name = {entry.name: entry for entry in files}
        self._kept = [
            _Kept(table, by_name[table.spec.name], np.flatnonzero(mask), wrong)
            for table, mask, wrong in zip(tables, kept, self.wrong, strict=True)
            if mask.any()
        ]
        self._waiting = [*self._kept]
        self._not_read = [table for table, mask in zip(tables, kept, strict=True) if not mask.any()]
        self._lock = threading.Lock()
        self._is_stopped = self._is_awaited = False
        self._error: BaseException | None = None
        self._num_compared = 0
        self._begun_bytes = self._ended_bytes = 0
        self._cpu_s: dict[int, float] = {}
        self._pace = SavePace(tracker, processors=processors, longest_grace_s=0.0, is_training=lambda: True)
        self._pace_lock = threading.Lock()
        if tracker.faults is not None and self._kept:
            one = self._kept[0]
            bucket = one.table.bucket(int(one.table.buckets[one.positions[0]]))
            spoil(tracker.faults, "verify.begin", step=tracker.progress().step, arrays=bucket.values())
        self._running = threads
        self._begin(threads)

    # ------------------------------------------------------------------ the working thread

    def raise_if_damaged(self) -> None:
        """Raises what was found, when all is compared; and at once what kept the comparison from going on.

        Raises:
          RowsDamaged: a bucket has another digest.
        """
        error = self._error
        if error is not None:
            raise error

    @property
    def is_over(self) -> bool:
        return not self._running

    def finish(self) -> None:
        """Waits until all is compared. That goes faster now, since training does not need the processors.

        Raises:
          RowsDamaged: a bucket has another digest.
        """
        self._is_awaited = True
        if self._running:
            with self._tracker.phase(Phase.RESTORE):
                self._wait_for_all()
        self.raise_if_damaged()

    def _wait_for_all(self) -> None:
        seen = 0
        while self._running:
            self._check()
            self._wait(_LOOK_S)
            if self._num_compared != seen:
                seen = self._num_compared
                self._tracker.mark()

    def stop(self) -> None:
        """Ends it. No thread looks at a row afterwards. Safe to call twice."""
        self._is_stopped = True
        self._join()
        # Its frames lead to all tables.
        self._error = None

    def _begin(self, count: int) -> None:
        # A process that ends does not wait for them.
        self._threads = [threading.Thread(target=self._work, name="verification", daemon=True) for _ in range(count)]
        begun = 0
        try:
            for thread in self._threads:
                thread.start()
                begun += 1
        except BaseException:
            self._is_stopped = True
            del self._threads[begun:]
            self._leave(count - begun)
            self._join()
            raise

    def _wait(self, seconds: float) -> None:
        """Until all is compared, or for so long."""
        with self._rows.turn:
            if self._running:
                self._rows.turn.wait(seconds)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    # ------------------------------------------------------------------ the threads

    def _work(self) -> None:
        roam()
        try:
            began_s = time.thread_time()
            most_bytes = max((kept.table.spec.bucket_bytes for kept in self._kept), default=0)
            room = np.empty(most_bytes // 4, np.float32)
            while (table := self._next_not_read()) is not None:
                self._rows.skip(table, table.num_rows)
            while (one := self._next()) is not None:
                self._compare(one, room)
                self._cpu_s[threading.get_ident()] = time.thread_time() - began_s
        except _Stopped:
            # What was not compared counts as kept again, and is compared by the next generation.
            pass
        except BaseException as error:
            self._is_stopped = True
            self._error = self._error or error
        finally:
            self._leave(1)

    def _leave(self, count: int) -> None:
        """Notes that so many threads have ended. With the last of them the result is complete."""
        with self._lock:
            is_last = self._running == count
            if is_last and not self._is_stopped and any(mask.any() for mask in self.wrong):
                self._error = self._damage()
            if not is_last:
                self._running -= count
        if is_last:
            # Before anybody hears that it is over: a save may freeze the rows then.
            self._rows.end()
            with self._rows.turn:
                self._running = 0
                self._rows.turn.notify_all()

    def _next_not_read(self) -> Table | None:
        with self._lock:
            return self._not_read.pop() if self._not_read else None

    def _next(self) -> _Kept | None:
        """The table for whose rows training would wait first; None when there is no other."""
        with self._lock:
            return max(self._waiting, key=lambda kept: self._rows.urgency_of(kept.table), default=None)

    def _compare(self, one: _Kept, room: np.ndarray) -> None:
        """Compares the next bucket of a table, if there is one.

        Args:
          room: of the thread, for the copy of a bucket of any table.
        """
        table, num_bytes = one.table, one.table.spec.bucket_bytes
        self._let_go_on(num_bytes)
        copies, at = [], 0
        for width in table.spec.widths.values():
            size = table.spec.layout.rows_per_bucket * width
            copies.append(room[at : at + size].reshape(-1, width))
            at += size
        position = self._read_next(one, copies)
        if position is not None:
            if self._tracker.faults is not None:
                spoil(self._tracker.faults, "verify.bucket", step=self._tracker.progress().step, arrays=copies)
            one.wrong[position] = not has_digest(one.entry, int(table.buckets[position]), copies)
        with self._lock:
            self._ended_bytes += num_bytes
            self._num_compared += 1

    def _read_next(self, one: _Kept, copies: Sequence[np.ndarray]) -> int | None:
        """Reads the next bucket of a table; its position, or None if there is none."""
        table = one.table
        with one.turn:
            if one.num_read == len(one.positions):
                # Another thread read the last one meanwhile.
                return None
            position = int(one.positions[one.num_read])
            first = table.first_row(int(table.buckets[position]))
            # Of buckets between that are not compared.
            self._rows.skip(table, first)
            self._rows.read(table, first, copies)
            one.num_read += 1
            if one.num_read == len(one.positions):
                with self._lock:
                    self._waiting.remove(one)
                self._rows.skip(table, table.num_rows)
            return position

    def _let_go_on(self, num_bytes: int) -> None:
        """Pauses until the next bucket may begin."""
        with self._pace_lock:
            self._pace.keep_to(
                num_bytes,
                is_urgent=self._is_urgent,
                busy_s=lambda: sum(self._cpu_s.values()),
                open_bytes=lambda: self._begun_bytes - self._ended_bytes,
                taken=lambda: self._rows.taken,
            )
            self._begun_bytes += num_bytes

    def _is_urgent(self) -> bool:
        self._check()
        if self._is_stopped:
            raise _Stopped
        return self._is_awaited or self._rows.is_nearly_full

    def _damage(self) -> RowsDamaged:
        found = [
            describe_bucket(one.entry, "rows and slots", int(bucket))
            for one in self._kept
            for bucket in one.table.buckets[one.wrong]
        ]
        named = "; ".join(found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        return RowsDamaged(
            f"Found rows in memory that are not those of the commit: {named}{more}. Expected each bucket that a host "
            "kept to have the digest of the manifest. The run goes back and reads them. If it happens again, have the "
            "memory of this machine tested."
        )
