"""`BackgroundSave`: a host's shard is written as it was at one moment, while training goes on changing it.

There are two threads, and those of `workers.checkpoint.file_threads`. The working thread owns the rows: it freezes the
moment, between two steps. The saving thread copies them, bucket by bucket, into one of a few staging buffers, and
passes that to a file thread. Without any lock, the file thread computes checksums, writes files and gives the buffer
back. What the two threads share is in `workers.checkpoint.frozen_rows`.

For incremental commits the working thread also notes which rows it changes, all the time. What it noted up to a freeze
is the saving thread's until the next one, and so are the digests of the commit before. Whether a save became a commit
is known only at the next freeze. If not, what had changed before it counts as changed still, and the digests of the
last commit stand.

The undo log for the last commit (`workers.checkpoint.undo`) hears of changes here, too, but is the working thread's
alone and needs no lock.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.deltas import PART_BYTES
from podembed.workers.checkpoint.file_threads import NUM_THREADS, FileThreads
from podembed.workers.checkpoint.frozen_rows import FrozenRows, SaveStalled
from podembed.workers.checkpoint.save_pace import FILE_AS_BYTES, SavePace
from podembed.workers.checkpoint.shard import ShardReceipt, write_shard, write_shard_delta
from podembed.workers.checkpoint.spoilt_rows import RowsSpoilt
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.liveness.progress import Tracker
from podembed.workers.storage.store import Store

__all__ = ["MEMORY_SHARE", "MIN_BUFFER_BYTES", "BackgroundSave", "SaveStalled", "save_bytes"]

MEMORY_SHARE = 0.1
# The snapshots' own part may be this much in any case. A tenth of a small shard would be a buffer of a handful of
# rows.
MIN_BUFFER_BYTES = 4 << 20
# Of that memory, what staging buffers may take so that several buckets are written at a time.
STAGING_SHARE = 0.25
_LOOK_S = 0.1


def save_bytes(size_bytes: int) -> int:
    """Bytes that the saves of a host take beside tables of so many bytes."""
    return max(MIN_BUFFER_BYTES, int(MEMORY_SHARE * size_bytes)) if size_bytes else 0


class BackgroundSave:
    """Saves of one host, one at a time.

    Mutated: `rows` and the staging buffers; `before_change` of the tables while a save runs; the tracker.

    Args:
      tables: all tables of the job as this host holds them.
      tracker: tracker of the working thread; the time in which it waits for a save goes to the phase "wait for save".
      stalled_after_s: longest wait for a save that frees nothing; then it is given up.
      raise_if_aborted: function that both threads call often; raises to end the save or the wait.
      tracks_changes: whether a save may be a delta; changes are then noted from the first save or from `track` on.
      undo: listener for every change, from the first save or from `track` on; None keeps no undo log.
      buckets_per_file: number of each table, as in `write_shard`.
      processors: number of processors that a save may keep busy beside training; None leaves it to `SavePace`.
      buffer_bytes: memory for rows that change before they are written; None takes what `MEMORY_SHARE` of the tables
        leaves beside the staging buffers, at least `MIN_BUFFER_BYTES`.

    Attributes:
      rows: rows of the frozen moment.
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
        self._raise_if_aborted = raise_if_aborted
        self._tracks_changes = tracks_changes
        self._undo = undo
        self._buckets_per_file = buckets_per_file
        self._digests: dict[tuple[str, int], str] = {}
        # Digests of the last save, if it was written; and whether there was a save since the commit of `_digests`.
        self._written: dict[tuple[str, int], str] | None = None
        self._has_begun = False
        self._has_parent = False
        allowed = int(MEMORY_SHARE * sum(table.size_bytes for table in tables))
        self._staging = _Staging(tables, buckets_per_file=buckets_per_file, budget_bytes=int(STAGING_SHARE * allowed))
        if buffer_bytes is None:
            # Change bitmaps (2 bits a row) and delta rows are extra.
            books_bytes = sum(table.num_rows for table in tables) // 3
            bucket_bytes = max((table.spec.bucket_bytes for table in tables if len(table.buckets)), default=0)
            part_bytes = 2 * (PART_BYTES + bucket_bytes) if tracks_changes else 0
            buffer_bytes = max(MIN_BUFFER_BYTES, allowed - self._staging.size_bytes - books_bytes - part_bytes)
        self.rows = FrozenRows(
            tables,
            buffer_bytes=buffer_bytes,
            tracker=tracker,
            stalled_after_s=stalled_after_s,
            raise_if_aborted=raise_if_aborted,
            tracks_changes=tracks_changes,
            undo=undo,
        )
        self._threads: FileThreads | None = None
        self._pace = SavePace(tracker, processors=processors)
        self._is_delta, self._writes_metadata, self._seen_waits = False, False, 0
        self._own_cpu_s = 0.0
        self._at_a_time = NUM_THREADS

    @property
    def size_bytes(self) -> int:
        """Memory beside the tables: rows kept for a save, and staging."""
        return self._staging.size_bytes + self.rows.size_bytes

    @property
    def paused_s(self) -> float:
        """Seconds for which saves have paused so far, to leave the processors to training."""
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
        if self.rows.is_running:
            raise RuntimeError(
                "A save was begun while another one is running, or rows are compared. Expected the end of that first."
            )
        if self._undo is not None and attempt:
            self._undo.freeze(attempt, before_failed=before_failed)
        # Now it is known whether the save before became a commit. If not, its changes count again.
        joins_before = before_failed and self._has_begun
        if self._has_begun and not before_failed:
            self._has_parent = self._tracks_changes and self._written is not None
            self._digests = self._written or {}
        self._written, self._has_begun = None, True
        self._seen_waits = self.rows.num_waits
        # Last: from here on the saving thread may read.
        self.rows.freeze(joins_before=joins_before)

    def track(self, tables: Sequence[TableFiles], commit: str = "", *, is_read: bool = False) -> None:
        """Begins to note changes, for a delta to the commit that has just been loaded. If the commit is named, they are
        noted for undo, too. Without this call changes are noted from the first save on.

        Args:
          is_read: flag of `FrozenRows.note_changes`.
        """
        keeps_undo = self._undo is not None and bool(commit)
        if self._undo is not None and commit:
            self._undo.begin(commit)
        if self._tracks_changes:
            held = {table.spec.name: table.buckets.tolist() for table in self._tables}
            # Only this host's buckets: a large table has many times as many.
            self._digests = {
                (entry.name, bucket): entry.digests[bucket] for entry in tables for bucket in held.get(entry.name, ())
            }
            self._has_parent, self._has_begun = True, False
        if keeps_undo or self._tracks_changes or is_read:
            self.rows.note_changes(is_read=is_read)

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
        self.rows.await_freeze()
        try:
            self._own_cpu_s = time.thread_time()
            # How much a delta will hand over is not known.
            self._pace.begin(None if is_delta else self._total_bytes(), kind="delta" if is_delta else "whole")
            self._is_delta, self._writes_metadata = is_delta, is_first
            # Files of a disk keep processors busy, and several threads together would stop a step. Requests to other
            # storage mostly wait. Those of a mounted folder may, too, which the pace finds out.
            is_limited = store.is_local and self._pace.processors < NUM_THREADS
            self._at_a_time = math.ceil(self._pace.processors) if is_limited else NUM_THREADS
            tables, mark = self._in_turn(), self._tracker.mark_saved
            self._staging.begin()
            if is_delta and not self._has_parent:
                raise RuntimeError("A delta was requested without a commit before it. Expected a whole save first.")
            with (
                self._tracker.trace.span("save", f"write {attempt}"),
                FileThreads(
                    store,
                    check=self._raise_if_aborted,
                    is_urgent=lambda: self.rows.is_nearly_full,
                    rest=self._rest,
                    trace=self._tracker.trace,
                ) as threads,
            ):
                self._threads = threads
                write_whole = partial(write_shard, is_first=is_first, buckets_per_file=self._buckets_per_file)
                write = write_shard_delta if is_delta else write_whole
                receipt = write(store, tables, attempt, view=self, threads=threads, on_chunk=mark)
        except RowsSpoilt as found:
            return ShardReceipt(tables=(), is_delta=is_delta, spoilt=found.spoilt)
        finally:
            # Also after an error: training must not keep rows, or wait, for a save that has ended.
            self._threads = None
            self.rows.end()
        self._written = receipt.digests
        by_name = {shard.table: shard for shard in receipt.tables}
        self._tracker.point("save.receipt")
        return replace(receipt, tables=tuple(by_name[table.spec.name] for table in self._tables))

    def _in_turn(self) -> Iterator[Table]:
        """All tables, each time the one that takes most of its buffer: what has been written need not be preserved any
        more. The step that is let pass shows which tables change most.
        """
        waiting = sorted(self._tables, key=_urgency)
        self._pace.let_a_step_pass(is_urgent=self._is_urgent)
        while waiting:
            table = max(waiting, key=self.rows.taken_by)
            waiting.remove(table)
            yield table

    def values(self, table: Table, bucket: int, count: int = 1) -> list[np.ndarray]:
        """The frozen rows and slots of buckets in a row, in a staging buffer that is theirs until `done`."""
        length, num_bytes = count * table.spec.layout.rows_per_bucket, count * table.spec.bucket_bytes
        first = table.first_row(bucket, count)
        if self.rows.num_waits != self._seen_waits:
            self._seen_waits = self.rows.num_waits
            self._pace.was_waited_for()
        self._pace.keep_to(
            num_bytes,
            num_files=self._num_files(table, bucket),
            busy_s=self._busy_s,
            open_bytes=self._open_bytes,
            is_crowded=lambda: self._staging.num_open >= self._at_a_time,
            taken=lambda: self.rows.taken,
            is_urgent=self._is_urgent,
        )
        staged = self._staging.take(table, length, check=self._raise_if_over)
        self.rows.read(table, first, staged)
        return staged

    def _num_files(self, table: Table, bucket: int) -> int:
        """Number of files that are made for a piece of a table; its first piece counts the table's metadata, too."""
        if self._is_delta:
            return 0
        num_arrays, is_described = len(table.spec.widths), self._writes_metadata and bucket == table.buckets[0]
        return num_arrays * (2 if is_described else 1)

    def _open_bytes(self) -> int:
        """Most bytes of pieces under way, as the pace counts them."""
        num_arrays = 0 if self._is_delta else max(len(table.spec.widths) for table in self._tables)
        return self._staging.open_bytes + self._staging.num_open * num_arrays * FILE_AS_BYTES

    def _total_bytes(self) -> int:
        """Bytes of a whole save, as the pace counts them."""
        files = (-(-len(t.buckets) // self._per_file(t)) * len(t.spec.widths) for t in self._tables)
        return sum(table.size_bytes for table in self._tables) + FILE_AS_BYTES * sum(files)

    def _per_file(self, table: Table) -> int:
        return self._buckets_per_file.get(table.spec.name, 1)

    def _busy_s(self) -> float:
        others_s = self._threads.cpu_s if self._threads is not None else 0.0
        return time.thread_time() - self._own_cpu_s + others_s

    def _rest(self, num_bytes: int) -> None:
        """May pause within a file. Called by the file threads."""
        if not self.rows.is_nearly_full:
            self._pace.rest(num_bytes, taken=self.rows.taken)

    def _is_urgent(self) -> bool:
        """Whether training would soon wait for room in the buffer."""
        self._raise_if_over()
        return self.rows.is_nearly_full

    def _raise_if_over(self) -> None:
        """Raises what ends the save early."""
        self._raise_if_aborted()
        self.rows.raise_if_given_up()
        if self._threads is not None:
            self._threads.raise_if_failed()

    def done(self, values: Sequence[np.ndarray]) -> None:
        """Takes a staging buffer back. From the file threads."""
        self._staging.give_back(values)

    def changed(self, table: Table, bucket: int) -> np.ndarray:
        """Positions of the rows of a bucket that changed between the last two freezes, padding left out."""
        first = table.first_row(bucket)
        return self.rows.changed(table, first, first + table.spec.layout.num_rows_of(bucket))

    def digest_before(self, table: Table, bucket: int) -> str:
        """The bucket's digest in the commit before."""
        return self._digests[table.spec.name, bucket]

    def skip(self, table: Table, bucket: int) -> None:
        """Gives a bucket up without reading it."""
        self.rows.skip(table, table.first_row(bucket) + table.spec.layout.rows_per_bucket)


class _Staging:
    """A few buffers, each with room for the buckets of one file, that a save fills and passes on. What is written no
    longer changes then, whatever training does. The saving thread takes buffers. A file thread gives each back when its
    file is written. Mutated: which of them are free.

    Args:
      tables: all tables of the job as this host holds them.
      buckets_per_file: number of each table; 1 where it is missing.
      budget_bytes: for all buffers. There is one in any case, and more help only while all file threads are busy.
    """

    def __init__(self, tables: Sequence[Table], *, buckets_per_file: Mapping[str, int], budget_bytes: int) -> None:
        held = [table.spec for table in tables if len(table.buckets)]
        self._file_bytes = max((spec.bucket_bytes * buckets_per_file.get(spec.name, 1) for spec in held), default=0)
        count = min(NUM_THREADS + 1, max(1, budget_bytes // max(1, self._file_bytes)))
        # Written once, so that the first save need not wait for the kernel's pages.
        self._buffers = [np.full(self._file_bytes // 4, 0, np.float32) for _ in range(count)]
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    @property
    def size_bytes(self) -> int:
        return len(self._buffers) * self._file_bytes

    @property
    def num_open(self) -> int:
        """Buffers that are in use."""
        return len(self._buffers) - self._free.qsize()

    @property
    def open_bytes(self) -> int:
        """Bytes of buffers that are in use."""
        return self.num_open * self._file_bytes

    def begin(self) -> None:
        """All buffers are free. No thread of an earlier save may be at work."""
        # A new queue, since a save that was given up may have left buffers out of the old one.
        self._free = queue.SimpleQueue()
        for buffer in self._buffers:
            self._free.put(buffer)

    def take(self, table: Table, length: int, *, check: Callable[[], None]) -> list[np.ndarray]:
        """Waits for a buffer. Returns room in it for `length` rows: float32 `[length, width]` for each array.

        Args:
          check: called often; raises to end the wait.
        """
        while True:
            try:
                buffer = self._free.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                check()
        at, arrays = 0, []
        for width in table.spec.widths.values():
            arrays.append(buffer[at : at + length * width].reshape(length, width))
            at += length * width
        return arrays

    def give_back(self, arrays: Sequence[np.ndarray]) -> None:
        """Frees the buffer that `take` gave. From any thread."""
        self._free.put(arrays[0].base)  # pyright: ignore[reportArgumentType]


def _urgency(table: Table) -> tuple[bool, int]:
    """The order in which tables are written where none takes more of its buffer than another."""
    rule = table.spec.optimizer
    return (rule is None or not rule.touches_all_rows, table.size_bytes)
