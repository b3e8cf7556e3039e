"""`BackgroundSave`: a host's shard is written as it was at one moment, while training goes on changing it.

Two threads. The working thread owns the rows: it alone changes them, and it freezes the moment, between two steps. The saving thread reads
them, bucket by bucket, into a staging buffer of one bucket, and from there, without any lock, computes checksums and writes files. Each row
is handed over once: either the saving thread copies it first, or the working thread puts it into the pre-image buffer before it changes it,
and the saving thread copies it from there. What both touch is `_turn`'s: the pre-images' book-keeping and the rows that neither has copied.
The saving thread holds it for one piece of a bucket (`PIECE_BYTES`), the working thread while it looks at the rows that it is about to
change; nobody else ever takes it. When the pre-image buffer is full the working thread waits on it for the saving thread, which never waits
for the working one, so there is no circle. A save that ends, well or not, wakes the working thread and leaves nothing to wait for.

For incremental commits the working thread also notes which rows it changes, all the time; what it noted up to a freeze is the saving thread's
until the next one, and so are the digests of the commit before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from embedding.preimages import SEAT_BYTES, Preimages, share_out
from embedding.table import Table
from workers.delta_files import PART_BYTES
from workers.digest import rows_in_bucket
from workers.progress import Tracker
from workers.shards import ShardReceipt, TableFiles, write_shard, write_shard_delta
from workers.storage import Store
from workers.storage_errors import StorageError

MEMORY_SHARE = 0.1
# The pre-images' own part may be this much in any case: a tenth of a small shard would be a buffer of a handful of rows.
MIN_BUFFER_BYTES = 4 << 20
PIECE_BYTES = 256 << 10
_LOOK_S = 0.1


class SaveStalled(StorageError):
    """Training waits for a save that does not go on."""


class BackgroundSave:
    """Saves of one host, one at a time.

    Mutated: the pre-images and the staging buffer; `before_change` of the tables while a save runs; the tracker.

    Args:
      tables: all tables of the job as this host holds them.
      tracker: of the working thread; the time in which it waits for a save goes to the phase "wait for save".
      stalled_after_s: longest wait for a save that frees nothing.
      raise_if_aborted: called often, by both threads; raises to end the save or the wait.
      tracks_changes: whether a save may be a delta; changes are then noted from the first save or from `track` on.
      buffer_bytes: of the pre-images; None takes what `MEMORY_SHARE` of the tables leaves beside the staging buffer, at least `MIN_BUFFER_BYTES`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        tracker: Tracker,
        stalled_after_s: float,
        raise_if_aborted: Callable[[], None],
        tracks_changes: bool = False,
        buffer_bytes: int | None = None,
    ) -> None:
        self._tables = tuple(tables)
        self._tracker = tracker
        self._stalled_after_s = stalled_after_s
        self._raise_if_aborted = raise_if_aborted
        self._tracks_changes = tracks_changes
        self._digests: dict[tuple[str, int], str] = {}
        self._has_parent = False
        self._staging = np.empty(
            max((t.spec.bucket_bytes for t in tables if len(t.buckets)), default=0) // 4, np.float32
        )
        if buffer_bytes is None:
            allowed = int(MEMORY_SHARE * sum(table.size_bytes for table in tables))
            # Two bits for each row, to know which have changed, and what becomes a part of a delta come on top of the buffer.
            books_bytes = sum(table.num_rows for table in tables) // 3
            part_bytes = 2 * (PART_BYTES + self._staging.nbytes) if tracks_changes else 0
            buffer_bytes = max(MIN_BUFFER_BYTES, allowed - self._staging.nbytes - books_bytes - part_bytes)
        shares = share_out(
            num_rows=[table.num_rows for table in tables],
            row_bytes=[table.spec.row_bytes + SEAT_BYTES for table in tables],
            budget_bytes=buffer_bytes,
        )
        self._preimages = {
            table.spec.name: Preimages([table.rows, *table.slots.values()], max_rows=max_rows)
            for table, max_rows in zip(tables, shares, strict=True)
        }
        self._turn = threading.Condition()
        self._is_running = False
        self._num_pieces = 0
        self._compile()

    @property
    def size_bytes(self) -> int:
        """Memory beside the tables: pre-images and staging."""
        return self._staging.nbytes + sum(preimages.size_bytes for preimages in self._preimages.values())

    # ------------------------------------------------------------------ the working thread

    def freeze(self) -> None:
        """Makes this moment the one that the next `write` writes.

        Raises:
          RuntimeError: the save before has not ended.
        """
        if self._is_running:
            raise RuntimeError("A save was begun while another one is running. Expected its receipts first.")
        for table in self._tables:
            self._preimages[table.spec.name].freeze()
            table.before_change = self._guard(table)
        self._is_running = True

    def track(self, tables: Sequence[TableFiles]) -> None:
        """From now on changes are noted, for a delta to the commit that has just been loaded. Otherwise they are from the first save on."""
        if not self._tracks_changes:
            return
        self._digests = {
            (entry.name, bucket): digest for entry in tables for bucket, digest in enumerate(entry.digests)
        }
        self._has_parent = True
        for table in self._tables:
            preimages = self._preimages[table.spec.name]
            preimages.freeze()
            preimages.release(table.num_rows)
            table.before_change = self._guard(table)

    def _guard(self, table: Table) -> Callable[[np.ndarray], None]:
        preimages = self._preimages[table.spec.name]

        def preserve(rows: np.ndarray) -> None:
            done = 0
            with self._turn:
                while self._is_running or self._tracks_changes:
                    done += preimages.preserve(rows[done:])
                    if done == len(rows):
                        return
                    self._wait_for_room()

        return preserve

    def _wait_for_room(self) -> None:
        """Waits until the saving thread has copied something, which may have been what is in the way."""
        seen, deadline_s = self._num_pieces, time.monotonic() + self._stalled_after_s
        with self._tracker.phase("wait for save"):
            while self._is_running and self._num_pieces == seen:
                self._raise_if_aborted()
                if time.monotonic() > deadline_s:
                    raise SaveStalled(
                        f"Found a save that has written nothing for {self._stalled_after_s:.0f} s, while its buffer for changed rows "
                        f"({self.size_bytes:,} bytes) is full. Expected the storage to take files. Look at the storage; the last commit stands."
                    )
                self._turn.wait(_LOOK_S)

    # ------------------------------------------------------------------ the saving thread

    def write(self, store: Store, attempt: str, *, is_first: bool, is_delta: bool = False) -> ShardReceipt:
        """Writes the frozen moment below `data/<attempt>`, or what changed since the one before.

        Args:
          is_first: whether this host also writes the arrays' metadata.

        Raises:
          StorageError: the storage failed, or the attempt has been written already. Training is not held up by what is left.
          RuntimeError: a delta without a commit before it: none was loaded or saved, or the last save failed, or changes are not tracked.
        """
        has_parent, self._has_parent = self._has_parent, False
        tables, mark = sorted(self._tables, key=_urgency), self._tracker.mark_saved
        try:
            if is_delta and not has_parent:
                raise RuntimeError("A delta was asked for without a commit before it. Expected a whole save first.")
            if is_delta:
                receipt = write_shard_delta(store, tables, attempt, view=self, on_chunk=mark)
            else:
                receipt = write_shard(store, tables, attempt, is_first=is_first, values_of=self.values, on_chunk=mark)
        finally:
            self._end()
        self._digests = {(s.table, bucket.bucket): bucket.digest for s in receipt.tables for bucket in s.buckets}
        self._has_parent = self._tracks_changes
        by_name = {shard.table: shard for shard in receipt.tables}
        return replace(receipt, tables=tuple(by_name[table.spec.name] for table in self._tables))

    def _end(self) -> None:
        """Nothing is kept any more, and nobody waits."""
        with self._turn:
            self._is_running = False
            for table in self._tables:
                self._preimages[table.spec.name].release(table.num_rows)
                if not self._tracks_changes:
                    table.before_change = None
            self._turn.notify_all()

    def values(self, table: Table, bucket: int) -> list[np.ndarray]:
        """The frozen rows and slots of one bucket, in the staging buffer."""
        length = table.spec.layout.rows_per_bucket
        first = self._first_row(table, bucket)
        preimages, staged = self._preimages[table.spec.name], self._staged(table)
        step = max(1, PIECE_BYTES // table.spec.row_bytes)
        for start in range(0, length, step):
            stop = min(start + step, length)
            self._raise_if_aborted()
            with self._turn:
                preimages.read(first + start, first + stop, [values[start:stop] for values in staged])
                self._let_go(preimages, first + stop)
        return staged

    def changed(self, table: Table, bucket: int) -> np.ndarray:
        """Positions of the rows of a bucket that changed between the last two freezes, padding left out."""
        layout, first = table.spec.layout, self._first_row(table, bucket)
        in_bucket = rows_in_bucket(num_rows=layout.num_rows, num_buckets=layout.num_buckets, bucket=bucket)
        return self._preimages[table.spec.name].changed(first, first + in_bucket)

    def digest_before(self, table: Table, bucket: int) -> str:
        """The bucket's digest in the commit before."""
        return self._digests[table.spec.name, bucket]

    def skip(self, table: Table, bucket: int) -> None:
        """Lets go of a bucket without reading it."""
        self._raise_if_aborted()
        with self._turn:
            last = self._first_row(table, bucket) + table.spec.layout.rows_per_bucket
            self._let_go(self._preimages[table.spec.name], last)

    def _let_go(self, preimages: Preimages, stop: int) -> None:
        preimages.release(stop)
        self._num_pieces += 1
        self._turn.notify_all()

    def _first_row(self, table: Table, bucket: int) -> int:
        return int(np.searchsorted(table.buckets, bucket)) * table.spec.layout.rows_per_bucket

    def _staged(self, table: Table) -> list[np.ndarray]:
        length, at = table.spec.layout.rows_per_bucket, 0
        arrays = []
        for width in table.spec.widths.values():
            arrays.append(self._staging[at : at + length * width].reshape(length, width))
            at += length * width
        return arrays

    def _compile(self) -> None:
        """Runs the kernels on nothing, so that the first save does not wait for a compiler."""
        for table in self._tables[:1]:
            empty = [np.empty((0, array.shape[1]), np.float32) for array in (table.rows, *table.slots.values())]
            preimages = Preimages(empty, max_rows=0)
            preimages.preserve(np.empty(0, np.int64))
            preimages.read(0, 0, empty)
            preimages.release(0)


def _urgency(table: Table) -> tuple[bool, int]:
    """Which table is written first: what has been written need not be preserved any more, and these fill their buffers soonest."""
    rule = table.spec.optimizer
    return (rule is None or not rule.touches_all_rows, table.size_bytes)
