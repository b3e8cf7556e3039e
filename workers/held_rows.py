"""What a host that survived a fault still has of a commit, and how the rest of its shard is filled.

A survivor's tables are cut anew for the placement of the new generation: buckets that stay are copied or stay where they are, others are let go,
table by table, so that beside the tables at most one is there twice. Which buckets hold the rows of the commit is believed only after their
digests were compared with the manifest's; what differs, or was never here, is read from the commit's files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from embedding.table import Table
from embedding.table_spec import TableSpec
from workers.checkpoint_files import check_digest
from workers.chunks import ChunkDamaged
from workers.shards import TableFiles, check_table, read_shard
from workers.storage import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """How a host's shard came to hold the rows of a commit.

    Attributes:
      buckets_kept: that were here and had the commit's digest.
      buckets_wrong: that were thought to be here and had another one; read, and worth an alarm.
      buckets_read, bytes_read: from storage.
      undo_s, verify_s, read_s: seconds; `undo_s` is that of the way back in memory.
    """

    buckets_kept: int = 0
    buckets_wrong: int = 0
    buckets_read: int = 0
    bytes_read: int = 0
    undo_s: float = 0.0
    verify_s: float = 0.0
    read_s: float = 0.0


@dataclass(slots=True, eq=False)
class HeldRows:
    """The buckets of a host that hold the rows of a commit. Mutated as buckets are filled, so that a fault on the way costs none of them twice.

    Attributes:
      commit: its name; empty for none.
      known: per table, bool `[buckets held here]`.
    """

    commit: str
    known: list[np.ndarray]

    @staticmethod
    def none_of(tables: Sequence[Table]) -> HeldRows:
        """Nothing is known of any bucket."""
        return HeldRows("", [np.zeros(len(table.buckets), bool) for table in tables])

    def recut(
        self, tables: list[Table], specs: Sequence[TableSpec], placement: Sequence[np.ndarray], *, host: int
    ) -> list[Table]:
        """The tables for another placement, with the rows of the buckets that stay.

        Args:
          tables: emptied on the way, so that no table stays in memory longer than it takes to copy it.
          specs: of the same tables.
          placement: per table, int32 `[num_buckets]`, the owner of each bucket.
          host: this host's number in it.
        """
        found: list[Table] = []
        for at, (spec, owners) in enumerate(zip(specs, placement, strict=True)):
            old, buckets = tables.pop(0), np.flatnonzero(owners == host)
            old.before_change = None
            if np.array_equal(old.buckets, buckets):
                found.append(old)
                continue
            new = Table(spec, buckets)
            known_before = dict(zip(old.buckets.tolist(), self.known[at].tolist(), strict=True))
            for bucket in map(int, buckets):
                if known_before.get(bucket):
                    for array, values in zip(new.bucket(bucket).values(), old.bucket(bucket).values(), strict=True):
                        array[...] = values
            self.known[at] = np.array([known_before.get(int(bucket), False) for bucket in buckets], bool)
            found.append(new)
        return found

    def fill(
        self, store: Store, tables: Sequence[Table], files: Sequence[TableFiles], *, on_chunk: Callable[[], None]
    ) -> Filled:
        """Verifies what is here and reads the rest.

        Args:
          files: of the commit; what is known must be known of that one.
          on_chunk: called after each bucket that was verified and each file that was read.

        Raises:
          CheckpointMismatch, ChunkDamaged, StorageError: as `read_shard`.
        """
        started = time.monotonic()
        by_name = {entry.name: entry for entry in files}
        num_wrong = 0
        for table, known in zip(tables, self.known, strict=True):
            entry = by_name.get(table.spec.name)
            if entry is None or not known.any():
                continue
            check_table(table.spec, entry)
            for position in np.flatnonzero(known):
                known[position] = is_right = _is_right(entry, table, int(table.buckets[position]))
                num_wrong += not is_right
                on_chunk()
        verified = time.monotonic()
        num_kept = sum(int(known.sum()) for known in self.known)
        wanted = [table.buckets[~known].tolist() for table, known in zip(tables, self.known, strict=True)]
        num_bytes = read_shard(store, tables, files, on_chunk=on_chunk, wanted=wanted)
        for known in self.known:
            known[:] = True
        return Filled(
            buckets_kept=num_kept,
            buckets_wrong=num_wrong,
            buckets_read=sum(map(len, wanted)),
            bytes_read=num_bytes,
            verify_s=verified - started,
            read_s=time.monotonic() - verified,
        )


def _is_right(entry: TableFiles, table: Table, bucket: int) -> bool:
    try:
        check_digest(entry, bucket, list(table.bucket(bucket).values()))
    except ChunkDamaged:
        return False
    return True
