"""What a host that survived a fault still has of a commit, and how the rest of its shard is restored.

A survivor's tables are cut anew for the placement of the new generation, table by table. Buckets that stay are copied
or stay where they are. Others are let go, each giving its memory back when it is copied. Buckets that go to other hosts
are kept for them (`moves`), as far as that takes no more memory than there was. What is not here comes from the host
that had it, or from the commit's files, and its digest is compared with the manifest's. Buckets that stayed are
compared while training goes on (`verification`). Only where that found wrong rows, or where they may be why the job
failed, they are compared first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.file_threads import FileThreads
from podembed.workers.checkpoint.files import has_digest
from podembed.workers.checkpoint.shard import check_table, read_shard
from podembed.workers.checkpoint.undo import log_bytes
from podembed.workers.host.survivors.moves import ROUND_BYTES, BucketExchange, Moved, Place
from podembed.workers.liveness.memory import let_go
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The way in which a host's shard came to hold the rows of a commit.

    Attributes:
      buckets_kept: that were here, and that nothing shows to be wrong.
      buckets_to_compare: of these, whose digests are compared while training goes on.
      buckets_wrong: that were thought to be here and had another digest; read, and worth an alarm.
      buckets_moved, bytes_moved: that other hosts sent and that had the commit's digest.
      buckets_refused: that other hosts offered, and that did not come or had another digest; read, and worth an alarm.
      buckets_read, bytes_read: from storage.
      undo_s, move_s, read_s: seconds; `undo_s` is that of the undo in memory. Where buckets are compared first,
        `read_s` has that, too.
    """

    buckets_kept: int = 0
    buckets_to_compare: int = 0
    buckets_wrong: int = 0
    buckets_read: int = 0
    bytes_read: int = 0
    buckets_moved: int = 0
    bytes_moved: int = 0
    buckets_refused: int = 0
    undo_s: float = 0.0
    move_s: float = 0.0
    read_s: float = 0.0


@dataclass(slots=True, eq=False)
class SurvivingShard:
    """The buckets of a host that hold the rows of a commit. Mutated as buckets are restored, so that a fault on the way
    costs none of them twice.

    Attributes:
      commit: its name; empty for none.
      known: per table, bool `[buckets held here]`.
      num_wrong: buckets that were found to be others than the commit's, and so are not known.
      leaving: buckets of the commit that other hosts own: rows and slots of each.
      moved: what other hosts sent.
    """

    commit: str
    known: list[np.ndarray]
    num_wrong: int = 0
    leaving: dict[Place, list[np.ndarray]] = field(default_factory=dict)
    moved: Moved = field(default_factory=Moved)

    @staticmethod
    def none_of(tables: Sequence[Table]) -> SurvivingShard:
        """A survivor of whose buckets nothing is known."""
        return SurvivingShard("", [np.zeros(len(table.buckets), bool) for table in tables])

    def forget(self, wrong: Sequence[np.ndarray]) -> None:
        """Some buckets are others than the commit's: per table, bool `[buckets held here]`."""
        for known, mask in zip(self.known, wrong, strict=True):
            self.num_wrong += int(np.count_nonzero(mask))
            known &= ~mask

    def recut(
        self,
        tables: list[Table],
        specs: Sequence[TableSpec],
        placement: Sequence[np.ndarray],
        *,
        host: int,
        undo_share: float = 0.0,
    ) -> list[Table]:
        """The tables for another placement, with the rows of the buckets that stay. Those that leave are kept for their
        owners.

        Args:
          tables: emptied on the way, so that no table stays in memory longer than it takes to copy it.
          specs: specs of the same tables.
          placement: per table, int32 `[num_buckets]`, the owner of each bucket.
          host: this host's number in it.
          undo_share: as in `Undo`, whose logs are empty meanwhile: what leaves may take their room beside what becomes
            free.
        """
        self.moved = Moved()
        found: list[Table] = []
        kept_bytes = sum(map(_num_bytes, self.leaving.values()))
        before = sum(table.size_bytes for table in tables) + kept_bytes
        owned = [int(np.count_nonzero(owners == host)) for owners in placement]
        after = sum(count * spec.bucket_bytes for count, spec in zip(owned, specs, strict=True))
        room = max(0, before - after) + log_bytes(after, share=undo_share) - kept_bytes
        for at, (spec, owners) in enumerate(zip(specs, placement, strict=True)):
            old, buckets = tables.pop(0), np.flatnonzero(owners == host)
            old.before_change = None
            if np.array_equal(old.buckets, buckets):
                found.append(old)
                continue
            new = Table(spec, buckets)
            here = {int(bucket): [*old.bucket(int(bucket)).values()] for bucket in old.buckets[self.known[at]]}
            here |= {
                bucket: self.leaving.pop((at, bucket)) for bucket in map(int, buckets) if (at, bucket) in self.leaving
            }
            # What is copied is given back at once, so that the memory does not hold a table twice.
            for bucket in map(int, buckets):
                for array, values in zip(new.bucket(bucket).values(), here.get(bucket, ()), strict=False):
                    array[...] = values
                let_go(here.get(bucket, ()))
            for bucket in sorted(here.keys() - {*map(int, buckets)}):
                if (room := room - spec.bucket_bytes) >= 0:
                    # A copy, since a view would hold the whole table.
                    self.leaving[at, bucket] = [values.copy() for values in here[bucket]]
                    let_go(here[bucket])
            self.known[at] = np.array([int(bucket) in here for bucket in buckets], bool)
            found.append(new)
        return found

    def move(
        self,
        mesh: Mesh,
        store: Store,
        tables: Sequence[Table],
        files: Sequence[TableFiles],
        *,
        placement: Sequence[np.ndarray],
        timeout_s: float,
        on_round: Callable[[], None],
        beside: AbstractSet[int] = frozenset(),
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        """Sends other hosts what they own, and takes from them what this one owns; all hosts of the mesh call it
        together, before `restore`.

        Args:
          files: files of the commit.
          timeout_s: for each round.
          on_round: called before each round.
          beside: ranks to which nothing is sent, since they read the files as fast.
          round_bytes: what may come to this host in one, if it is more than one bucket.

        Raises:
          CheckpointMismatch: as `read_shard`.
          MeshError: a host is gone or silent.
        """
        by_name = {entry.name: entry for entry in files}
        found = [by_name.get(table.spec.name) for table in tables]
        for table, entry in zip(tables, found, strict=True):
            if entry is None:
                # `restore` says so, on all hosts.
                return
            check_table(table.spec, entry)
        exchange = BucketExchange(
            mesh=mesh,
            tables=tables,
            files=[entry for entry in found if entry is not None],
            placement=placement,
            known=self.known,
            leaving=self.leaving,
            store=store,
            timeout_s=timeout_s,
            on_round=on_round,
            beside=beside,
            round_bytes=round_bytes,
        )
        self.moved = exchange.run()

    def restore(
        self,
        store: Store,
        tables: Sequence[Table],
        files: Sequence[TableFiles],
        *,
        on_chunk: Callable[[], None],
        compares_first: bool = False,
        threads: int = 1,
    ) -> tuple[Restored, list[np.ndarray]]:
        """Reads what is not here.

        Args:
          files: files of the commit; what is known must be known of that one.
          on_chunk: called after each file that was read, and each bucket that was compared.
          compares_first: whether what was kept is compared now, and read where it is wrong. After a wrong bucket it is
            in any case.
          threads: threads that compare.

        Returns:
          What was done, and per table, bool `[buckets held here]`, which buckets are still to be compared
          with the commit.

        Raises:
          CheckpointMismatch, ChunkDamaged, StorageError: as `read_shard`.
        """
        started = time.monotonic()
        moved: list[list[int]] = [[] for _ in tables]
        for at, bucket in self.moved.places:
            moved[at].append(bucket)
        kept = [
            known & ~np.isin(table.buckets, came) for table, known, came in zip(tables, self.known, moved, strict=True)
        ]
        if compares_first or self.num_wrong:
            self.forget(_wrong(store, tables, files, kept, on_chunk=on_chunk, threads=threads))
            num_kept = sum(int((known & mask).sum()) for known, mask in zip(self.known, kept, strict=True))
            kept = [np.zeros_like(mask) for mask in kept]
        else:
            num_kept = sum(int(mask.sum()) for mask in kept)
        wanted = [table.buckets[~known].tolist() for table, known in zip(tables, self.known, strict=True)]
        num_bytes = read_shard(store, tables, files, on_chunk=on_chunk, wanted=wanted)
        for known in self.known:
            known[:] = True
        num_wrong, self.num_wrong = self.num_wrong, 0
        restored = Restored(
            buckets_kept=num_kept,
            buckets_to_compare=sum(int(mask.sum()) for mask in kept),
            buckets_wrong=num_wrong,
            buckets_read=sum(map(len, wanted)),
            bytes_read=num_bytes,
            buckets_moved=len(self.moved.places),
            bytes_moved=self.moved.size_bytes,
            buckets_refused=self.moved.num_refused,
            move_s=self.moved.seconds,
            read_s=time.monotonic() - started,
        )
        return restored, kept


def _wrong(
    store: Store,
    tables: Sequence[Table],
    files: Sequence[TableFiles],
    kept: Sequence[np.ndarray],
    *,
    on_chunk: Callable[[], None],
    threads: int,
) -> list[np.ndarray]:
    """Per table, bool `[buckets held here]`, which of the kept buckets have another digest than the commit's."""
    by_name = {entry.name: entry for entry in files}
    found = [np.zeros_like(mask) for mask in kept]
    with FileThreads(store, num_threads=threads) as workers:
        for table, mask, wrong in zip(tables, kept, found, strict=True):
            if not mask.any() or (entry := by_name.get(table.spec.name)) is None:
                # `read_shard` refuses a commit of other tables.
                continue
            check_table(table.spec, entry)
            for position in map(int, np.flatnonzero(mask)):
                workers.submit(partial(_compare, table, entry, wrong, position))
                on_chunk()
        workers.finish()
    return found


def _compare(table: Table, entry: TableFiles, wrong: np.ndarray, position: int) -> None:
    bucket = int(table.buckets[position])
    wrong[position] = not has_digest(entry, bucket, list(table.bucket(bucket).values()))


def _num_bytes(arrays: Sequence[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)
