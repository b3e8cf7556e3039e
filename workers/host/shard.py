"""`Shard`: the rows and slots of one host in one generation.

A restore brings them from a commit, a save takes them into the next one, and undo takes them back after a fault.
`workers.host.survivors` knows which rows are here after a fault, compares them, and brings others from host to host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.background_save import BackgroundSave
from podembed.workers.checkpoint.checkpoint_files import TableFiles, buckets_per_file
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.faults.updates import arm_updates
from podembed.workers.host.spec import HostSpec
from podembed.workers.host.survivors.surviving_shard import Restored, SurvivingShard
from podembed.workers.host.survivors.verification import RowVerification
from podembed.workers.job.tables import table_specs
from podembed.workers.liveness.memory import Populating, let_go
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class Survivor:
    """The part of a host that outlives a generation: its tables, and which buckets hold rows of the last commit."""

    tables: list[Table]
    surviving: SurvivingShard

    def recut(self, spec: HostSpec) -> Survivor:
        """The same for the placement of another generation. Empties `tables` on the way, so that no table stays in
        memory longer than it takes to copy it.
        """
        specs = table_specs(spec.resolve_job(), spec.table_buckets)
        tables = self.surviving.recut(self.tables, specs, spec.placement, host=spec.host, undo_share=spec.undo_share)
        return Survivor(tables, self.surviving)


class Shard:
    """The tables of a host, with their undo log and their saves. Mutated: all of it.

    Attributes:
      tables: all tables of the job, as this host holds them.
      undo: None where the driver wants none.
      save: save of the whole shard; one at a time.
      surviving: which buckets hold the rows of a commit, as far as a survivor knows.
    """

    def __init__(
        self,
        spec: HostSpec,
        tables: Sequence[Table],
        *,
        surviving: SurvivingShard | None,
        tracker: Tracker,
        check: Callable[[], None],
        new_save: Callable[..., BackgroundSave] = BackgroundSave,
        new_verification: Callable[..., RowVerification] = RowVerification,
    ) -> None:
        """
        Args:
          surviving: what a survivor knows of the tables; None for new ones.
          check: called often by both threads of a save; raises to end it.
        """
        self._spec, self._tracker, self._check = spec, tracker, check
        self.tables = tables
        self.surviving = SurvivingShard.none_of(tables) if surviving is None else surviving
        self.undo = Undo(tables, share=spec.undo_share) if spec.undo_share else None
        self.save = new_save(
            tables,
            tracker=tracker,
            # Peers wait for this host meanwhile, for twice as long.
            stalled_after_s=spec.step_timeout_s / 2,
            raise_if_aborted=check,
            tracks_changes=spec.tracks_changes,
            undo=self.undo,
            buckets_per_file=buckets_per_file(
                [table.spec for table in tables], spec.placement, num_hosts=spec.num_hosts
            ),
        )
        self._new_verification = new_verification
        self._verification: RowVerification | None = None
        self._populating: Populating | None = None
        arm_updates(tables, tracker.faults, lambda: tracker.progress().step)

    @property
    def size_bytes(self) -> int:
        return sum(table.size_bytes for table in self.tables)

    def _let_go_of_buffers(self) -> None:
        """Gives back what saves and undo took, of which the next generation takes as much."""
        self.close()
        # A save that still ends somewhere keeps its buffers until it has.
        if not self.save.rows.is_running:
            let_go(self._buffers)

    @property
    def _buffers(self) -> list[np.ndarray]:
        return [*self.save.rows.buffers, *(self.undo.buffers if self.undo is not None else ())]

    def restore(
        self,
        files: Sequence[TableFiles] | None,
        *,
        mesh: Mesh,
        store: Store,
        on_same_machine: AbstractSet[int] = frozenset(),
    ) -> Restored:
        """As `HostWorker.restore`."""
        restored, kept = restore_shard(
            self.surviving,
            self.tables,
            files,
            spec=self._spec,
            mesh=mesh,
            store=store,
            tracker=self._tracker,
            check=self._check,
            on_same_machine=on_same_machine,
        )
        # From here on the undo log knows.
        self.surviving = SurvivingShard.none_of(self.tables)
        if files is not None:
            is_compared = any(mask.any() for mask in kept)
            self.save.track(files, self._spec.base or "", is_read=is_compared)
            if is_compared:
                self._verification = self._new_verification(
                    self.save.rows,
                    self.tables,
                    files,
                    kept,
                    tracker=self._tracker,
                    check=self._check,
                    threads=self._spec.threads,
                )
        return restored

    def raise_if_damaged(self) -> None:
        """As `RowVerification.raise_if_damaged`. From any thread."""
        verification = self._verification
        if verification is not None:
            verification.raise_if_damaged()

    def finish_verification(self) -> None:
        """Waits until all rows are known to be those that training went on from. To be called before anything is made
        of them that outlives the generation.

        Raises:
          RowsDamaged: they are not.
        """
        if self._verification is not None:
            self._verification.finish()

    def take_memory(self) -> None:
        """Takes what saves and undo will need, beside what follows. Otherwise the first steps of a save would wait for
        the kernel's pages.
        """
        self._populating = Populating(self._buffers)

    def close(self) -> None:
        """Ends what is done beside. Safe to call twice."""
        if self._verification is not None:
            self._verification.stop()
        if self._populating is not None:
            self._populating.close()

    def go_back_to(self, commit: str) -> None:
        """Resets rows to their values at a commit, as far as the undo log reaches; `surviving` says how far."""
        if self._verification is not None:
            # Its threads look at rows that change now.
            self._verification.stop()
        known = self.undo.back_to(commit) if self.undo is not None else None
        if known is not None:
            self.surviving = SurvivingShard(commit, known)
            if self._verification is not None:
                self.surviving.forget(self._verification.wrong)
        elif self.surviving.commit != commit:
            # What is known is of another commit: a survivor of a fault within a restore keeps what it had.
            self.surviving = SurvivingShard.none_of(self.tables)

    def release(self) -> Survivor:
        """Returns the part that outlives the generation. It leads to nothing else of it."""
        for table in self.tables:
            # It leads to all tables, so that none could go before the last one is cut anew.
            table.before_change = None
        self._let_go_of_buffers()
        return Survivor([*self.tables], self.surviving)


def restore_shard(
    surviving: SurvivingShard,
    tables: Sequence[Table],
    files: Sequence[TableFiles] | None,
    *,
    spec: HostSpec,
    mesh: Mesh,
    store: Store,
    tracker: Tracker,
    check: Callable[[], None],
    on_same_machine: AbstractSet[int] = frozenset(),
) -> tuple[Restored, list[np.ndarray]]:
    """Restores the tables; all hosts of the mesh call it together.

    Buckets move first, since all hosts are there when the mesh is joined. Then each host reads what is still missing.

    Args:
      surviving: what is here of the commit. Mutated, as the tables are.
      files: files of the commit; None for first values.
      check: called between buckets; what it raises ends the work.
      on_same_machine: ranks whose memory this host maps. They are sent nothing if the store is a local folder, whose
        files the machine has in memory: that is faster than a socket (`benchmarks/moves.py`).

    Returns:
      As `SurvivingShard.restore`.

    Raises:
      CheckpointMismatch, ChunkDamaged, StorageError: as `read_shard`.
      MeshError: a host is gone or silent.
    """

    def go_on() -> None:
        tracker.mark()
        check()

    def on_round() -> None:
        go_on()
        tracker.point("move.round")

    if files is None:
        for table in tables:
            table.initialize(on_part=go_on)
            table.index.rebuild()
        return Restored(), []
    if spec.num_hosts > 1:
        with tracker.phase(Phase.BUCKET_EXCHANGE):
            surviving.move(
                mesh,
                store,
                tables,
                files,
                placement=spec.placement,
                timeout_s=spec.step_timeout_s,
                on_round=on_round,
                beside=on_same_machine if store.is_local else frozenset(),
            )
    restored, kept = surviving.restore(
        store, tables, files, on_chunk=go_on, compares_first=spec.compares_first, threads=spec.threads
    )
    for table in tables:
        table.index.rebuild()
    return replace(restored, undo_s=tracker.phase_s.get(Phase.UNDO, 0.0)), kept
