"""`BackgroundSave`: a host's shard is written as it was at one moment, while training goes on changing it.

There are two threads, and those of `workers.checkpoint.file_threads`. The working thread owns the rows: it alone
changes them, and it freezes the moment, between two steps. The saving thread reads them, bucket by bucket, into one of
a few staging buffers, and passes that to a file thread. Without any lock, the file thread computes checksums, writes
files and gives the buffer back. Each row is copied once. Either the saving thread copies it first, or the working
thread puts it into the snapshot before it changes it. The saving thread then copies it from there. The lock `_turn`
guards what both touch: the pre-images' book-keeping and the rows that neither has copied. The saving thread holds it
for one piece of a bucket (`PIECE_BYTES`). The working thread holds it while it looks at the rows that it is about to
change. No other thread takes it. When the snapshot is full, the working thread waits for the saving thread. The saving
thread never waits for the working one once a moment is frozen, so there is no circle. A save that ends, well or not,
wakes the working thread and leaves nothing to wait for. The working thread gives up a save that frees nothing for too
long. It keeps no more rows for it and goes on, and the save fails when it wakes.

For incremental commits the working thread also notes which rows it changes, all the time. What it noted up to a freeze
is the saving thread's until the next one, and so are the digests of the commit before. Whether a save became a commit
is known only at the next freeze. If not, what had changed before it counts as changed still, and the digests of the
last commit stand.

The undo log for the last commit (`workers.checkpoint.undo`) hears of changes here, too, but is the working thread's
alone and needs no lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from podembed.embedding.table.snapshot import ENTRY_BYTES, Snapshot, share_out
from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.deltas import PART_BYTES
from podembed.workers.checkpoint.file_threads import NUM_THREADS, FileThreads
from podembed.workers.checkpoint.save_pace import SavePace
from podembed.workers.checkpoint.shard import RowsSpoilt, ShardReceipt, TableFiles, write_shard, write_shard_delta
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.storage.errors import StorageError
from podembed.workers.storage.store import Store

MEMORY_SHARE = 0.1
# The snapshots' own part may be this much in any case. A tenth of a small shard would be a buffer of a handful of
# rows.
MIN_BUFFER_BYTES = 4 << 20
# Of that memory, what staging buffers may take so that several buckets are written at a time.
STAGING_SHARE = 0.25
PIECE_BYTES = 256 << 10
_LOOK_S = 0.1


class SaveStalled(StorageError):
    """A save did not go on while training waited for it, and was given up."""


class BackgroundSave:
    """Saves of one host, one at a time.

    Mutated: the pre-images and the staging buffers; `before_change` of the tables while a save runs; the tracker.

    Args:
      tables: all tables of the job as this host holds them.
      tracker: of the working thread; the time in which it waits for a save goes to the phase "wait for save".
      stalled_after_s: longest wait for a save that frees nothing; then it is given up.
      raise_if_aborted: called often, by both threads; raises to end the save or the wait.
      tracks_changes: whether a save may be a delta; changes are then noted from the first save or from `track` on.
      undo: told every change, from the first save or from `track` on; None keeps no undo log.
      buckets_per_file: of each table, as in `write_shard`.
      processors: that a save may keep busy beside training; None leaves it to `SavePace`.
      buffer_bytes: of the pre-images; None takes what `MEMORY_SHARE` of the tables leaves beside the staging buffer, at
        least `MIN_BUFFER_BYTES`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        tracker: Tracker,
        stalled_after_s: float,
        raise_if_aborted: Callable[[], None],
        tracks_changes: bool = False,
        undo: Undo | None = None,
        buckets_per_file: Mapping[str, int] = MappingProxyType({}),
        processors: float | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        self._tables = tuple(tables)
        self._tracker = tracker
        self._stalled_after_s = stalled_after_s
        self._raise_if_aborted = raise_if_aborted
        self._tracks_changes = tracks_changes
        self._undo = undo
        self._buckets_per_file = buckets_per_file
        self._digests: dict[tuple[str, int], str] = {}
        # Of the last save, if it was written; and whether there was one since the commit that `_digests` are of.
        self._written: dict[tuple[str, int], str] | None = None
        self._has_begun = False
        self._has_parent = False
        allowed = int(MEMORY_SHARE * sum(table.size_bytes for table in tables))
        held = [table.spec for table in tables if len(table.buckets)]
        file_bytes = max((spec.bucket_bytes * buckets_per_file.get(spec.name, 1) for spec in held), default=0)
        num_staged = min(NUM_THREADS + 1, max(1, int(STAGING_SHARE * allowed) // max(1, file_bytes)))
        # Written once, so that the first save need not wait for the kernel's pages.
        self._staging = [np.full(file_bytes // 4, 0, np.float32) for _ in range(num_staged)]
        if buffer_bytes is None:
            # On top come two bits a row, to know which have changed, and what becomes a part of a delta.
            books_bytes = sum(table.num_rows for table in tables) // 3
            bucket_bytes = max((spec.bucket_bytes for spec in held), default=0)
            part_bytes = 2 * (PART_BYTES + bucket_bytes) if tracks_changes else 0
            buffer_bytes = max(MIN_BUFFER_BYTES, allowed - num_staged * file_bytes - books_bytes - part_bytes)
        shares = share_out(
            num_rows=[table.num_rows for table in tables],
            row_bytes=[table.spec.row_bytes + ENTRY_BYTES for table in tables],
            budget_bytes=buffer_bytes,
        )
        self._snapshots = {
            table.spec.name: table.store.freeze(max_rows=max_rows)
            for table, max_rows in zip(tables, shares, strict=True)
        }
        self._turn = threading.Condition()
        self._is_running = False
        self._given_up: SaveStalled | None = None
        self._num_pieces = 0
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._threads: FileThreads | None = None
        self._pace = SavePace(tracker, processors=processors)
        self._own_cpu_s = 0.0
        self._compile()

    @property
    def size_bytes(self) -> int:
        """Memory beside the tables: pre-images and staging."""
        staging_bytes = sum(staging.nbytes for staging in self._staging)
        return staging_bytes + sum(snapshot.size_bytes for snapshot in self._snapshots.values())

    @property
    def paused_s(self) -> float:
        """For how long saves have paused so far, to leave the processors to training."""
        return self._pace.paused_s

    # ------------------------------------------------------------------ the working thread

    def freeze(self, attempt: str = "", *, before_failed: bool = False) -> None:
        """Makes this moment the one that the next `write` writes, as the commit `attempt`.

        Args:
          before_failed: the save before, if there was one, did not become a commit, although this host may have written
            its part.

        Raises:
          RuntimeError: the save before has not ended.
        """
        if self._is_running:
            raise RuntimeError("A save was begun while another one is running. Expected its receipts first.")
        if self._undo is not None and attempt:
            self._undo.freeze(attempt, before_failed=before_failed)
        self._freeze(joins=before_failed and self._has_begun, before_failed=before_failed)
        with self._turn:
            self._is_running = True
            self._turn.notify_all()

    def _freeze(self, *, joins: bool, before_failed: bool) -> None:
        if self._has_begun and not before_failed:
            self._has_parent = self._tracks_changes and self._written is not None
            self._digests = self._written or {}
        self._written, self._has_begun, self._given_up = None, True, None
        for table in self._tables:
            self._snapshots[table.spec.name].freeze(joins_before=joins)
            table.before_change = self._guard(table)

    def track(self, tables: Sequence[TableFiles], commit: str = "") -> None:
        """From now on changes are noted, for a delta to the commit that has just been loaded. If the commit is named,
        they are noted for undo, too.

        Otherwise they are from the first save on.
        """
        if self._undo is not None and commit:
            self._undo.begin(commit)
            for table in self._tables:
                table.before_change = self._guard(table)
        if not self._tracks_changes:
            return
        self._digests = {
            (entry.name, bucket): digest for entry in tables for bucket, digest in enumerate(entry.digests)
        }
        self._has_parent, self._has_begun = True, False
        for table in self._tables:
            snapshot = self._snapshots[table.spec.name]
            snapshot.freeze()
            snapshot.release(table.num_rows)
            table.before_change = self._guard(table)

    def _guard(self, table: Table) -> Callable[[np.ndarray], None]:
        snapshot = self._snapshots[table.spec.name]

        write_down = None if self._undo is None else self._undo.preserve_of(table)

        def preserve(rows: np.ndarray) -> None:
            if write_down is not None:
                write_down(rows)
            # Only this thread begins a save; one that ends meanwhile is seen under the lock.
            if not self._is_running and not self._tracks_changes:
                return
            done = 0
            with self._turn:
                while self._is_running or self._tracks_changes:
                    done += snapshot.preserve(rows[done:])
                    if done == len(rows):
                        return
                    self._wait_for_room()

        return preserve

    def _wait_for_room(self) -> None:
        """Waits until the saving thread has copied something, which may have been what is in the way; or gives the save
        up.
        """
        seen, deadline_s = self._num_pieces, time.monotonic() + self._stalled_after_s
        with self._tracker.phase(Phase.WAIT_FOR_SAVE):
            while self._is_running and self._num_pieces == seen:
                self._raise_if_aborted()
                if time.monotonic() > deadline_s:
                    self._give_up()
                    return
                self._turn.wait(_LOOK_S)

    def _give_up(self) -> None:
        """Keeps nothing for the save any more; it learns of that when it asks for the next bucket."""
        self._given_up = SaveStalled(
            f"Found a save that wrote nothing for {self._stalled_after_s:.0f} s, while its buffer for changed rows "
            f"({self.size_bytes:,} bytes) was full. Expected the storage to take files. Look at the storage; the last "
            "commit stands."
        )
        for table in self._tables:
            self._snapshots[table.spec.name].release(table.num_rows)

    # ------------------------------------------------------------------ the saving thread

    def write(self, store: Store, attempt: str, *, is_first: bool, is_delta: bool = False) -> ShardReceipt:
        """Writes the frozen moment below `data/<attempt>`, or what changed since the one before.

        Args:
          is_first: whether this host also writes the arrays' metadata.

        Returns:
          The receipt; if rows hold no numbers any more, one that names some of them and nothing else.

        Raises:
          StorageError: the storage failed, or the attempt has been written already. Training is not held up by what is
            left.
          SaveStalled: training gave it up.
          RuntimeError: a delta without a commit before it: none was loaded or saved, or changes are not tracked.
        """
        self._tracker.point("save.write")
        self._await_freeze()
        self._own_cpu_s = time.thread_time()
        self._pace.begin()
        tables, mark = sorted(self._tables, key=_urgency), self._tracker.mark_saved
        self._free = queue.SimpleQueue()
        for staging in self._staging:
            self._free.put(staging)
        try:
            if is_delta and not self._has_parent:
                raise RuntimeError("A delta was requested without a commit before it. Expected a whole save first.")
            with FileThreads(store, check=self._raise_if_aborted) as threads:
                self._threads = threads
                write_whole = partial(write_shard, is_first=is_first, buckets_per_file=self._buckets_per_file)
                write = write_shard_delta if is_delta else write_whole
                receipt = write(store, tables, attempt, view=self, threads=threads, on_chunk=mark)
        except RowsSpoilt as found:
            return ShardReceipt(tables=(), is_delta=is_delta, spoilt=found.spoilt)
        finally:
            self._end()
        self._written = receipt.digests
        by_name = {shard.table: shard for shard in receipt.tables}
        self._tracker.point("save.receipt")
        return replace(receipt, tables=tuple(by_name[table.spec.name] for table in self._tables))

    def _await_freeze(self) -> None:
        """The driver asks for the moment and for its files at once, of two threads."""
        deadline_s = time.monotonic() + self._stalled_after_s
        with self._turn:
            while not self._is_running:
                self._raise_if_aborted()
                if time.monotonic() > deadline_s:
                    raise RuntimeError(
                        "A save was to be written and no moment was frozen. Expected begin_save with it."
                    )
                self._turn.wait(_LOOK_S)

    def _end(self) -> None:
        """Nothing is kept any more, and no thread waits."""
        self._threads = None
        with self._turn:
            self._is_running = False
            for table in self._tables:
                self._snapshots[table.spec.name].release(table.num_rows)
                if not self._tracks_changes and self._undo is None:
                    table.before_change = None
            self._turn.notify_all()

    def values(self, table: Table, bucket: int, count: int = 1) -> list[np.ndarray]:
        """The frozen rows and slots of buckets in a row, in a staging buffer that is theirs until `done`."""
        length, num_bytes = count * table.spec.layout.rows_per_bucket, count * table.spec.bucket_bytes
        first = table.first_row(bucket, count)
        self._pace.keep_to(num_bytes, busy_s=self._busy_s, open_bytes=self._open_bytes, is_urgent=self._is_urgent)
        snapshot, staged = self._snapshots[table.spec.name], self._staged(table, self._take_staging(), length)
        step = max(1, PIECE_BYTES // table.spec.row_bytes)
        for start in range(0, length, step):
            stop = min(start + step, length)
            self._raise_if_aborted()
            with self._turn:
                self._raise_if_given_up()
                snapshot.read(first + start, first + stop, [values[start:stop] for values in staged])
                self._let_go(snapshot, first + stop)
        return staged

    def _busy_s(self) -> float:
        others_s = self._threads.cpu_s if self._threads is not None else 0.0
        return time.thread_time() - self._own_cpu_s + others_s

    def _open_bytes(self) -> int:
        """Of staging buffers that are in use."""
        return (len(self._staging) - self._free.qsize()) * self._staging[0].nbytes

    def _is_urgent(self) -> bool:
        """Whether training would soon wait for room in the buffer. Without the lock: numbers may be a moment old."""
        self._raise_if_aborted()
        self._raise_if_given_up()
        if self._threads is not None:
            self._threads.raise_if_failed()
        return any(snapshot.is_half_full for snapshot in self._snapshots.values())

    def done(self, values: Sequence[np.ndarray]) -> None:
        """Takes a staging buffer back. From the file threads."""
        self._free.put(values[0].base)  # pyright: ignore[reportArgumentType]

    def _take_staging(self) -> np.ndarray:
        while True:
            try:
                return self._free.get(timeout=_LOOK_S)
            except queue.Empty:
                self._raise_if_aborted()
                if self._threads is not None:
                    self._threads.raise_if_failed()

    def _raise_if_given_up(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    def changed(self, table: Table, bucket: int) -> np.ndarray:
        """Positions of the rows of a bucket that changed between the last two freezes, padding left out."""
        first = table.first_row(bucket)
        return self._snapshots[table.spec.name].changed(first, first + table.spec.layout.num_rows_of(bucket))

    def digest_before(self, table: Table, bucket: int) -> str:
        """The bucket's digest in the commit before."""
        return self._digests[table.spec.name, bucket]

    def skip(self, table: Table, bucket: int) -> None:
        """Lets go of a bucket without reading it."""
        self._raise_if_aborted()
        with self._turn:
            self._raise_if_given_up()
            last = table.first_row(bucket) + table.spec.layout.rows_per_bucket
            self._let_go(self._snapshots[table.spec.name], last)

    def _let_go(self, snapshot: Snapshot, stop: int) -> None:
        snapshot.release(stop)
        self._num_pieces += 1
        self._turn.notify_all()

    def _staged(self, table: Table, staging: np.ndarray, length: int) -> list[np.ndarray]:
        at, arrays = 0, []
        for width in table.spec.widths.values():
            arrays.append(staging[at : at + length * width].reshape(length, width))
            at += length * width
        return arrays

    def _compile(self) -> None:
        """Runs the kernels on nothing, so that the first save does not wait for a compiler."""
        for table in self._tables[:1]:
            empty = [np.empty((0, width), np.float32) for width in table.spec.widths.values()]
            snapshot = Snapshot(empty, max_rows=0)
            snapshot.preserve(np.empty(0, np.int64))
            snapshot.read(0, 0, empty)
            snapshot.release(0)


def _urgency(table: Table) -> tuple[bool, int]:
    """Which table is written first: what has been written need not be preserved any more, and these fill their buffers
    soonest.
    """
    rule = table.spec.optimizer
    return (rule is None or not rule.touches_all_rows, table.size_bytes)
