"""`Shard`: the rows and slots of one host in one generation: how they come from a commit, go into the next one, and go
back to one after a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.background_save import BackgroundSave
from podembed.workers.checkpoint.shard import TableFiles
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.faults.updates import arm_updates
from podembed.workers.host.restore import fill_shard
from podembed.workers.host.spec import HostSpec
from podembed.workers.host.surviving_shard import Filled, HeldRows
from podembed.workers.job.tables import table_specs
from podembed.workers.liveness.progress import Tracker
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class Survivor:
    """What outlives a generation: its tables, and which of their buckets hold the rows of the last commit."""

    tables: list[Table]
    held: HeldRows

    def recut(self, spec: HostSpec) -> Survivor:
        """The same for the placement of another generation. Empties `tables` on the way, so that no table stays in
        memory longer than it takes to copy it.
        """
        specs = table_specs(spec.resolve_job(), spec.table_buckets)
        tables = self.held.recut(self.tables, specs, spec.placement, host=spec.host, undo_share=spec.undo_share)
        return Survivor(tables, self.held)


class Shard:
    """The tables of a host, with their undo log and their saves. Mutated: all of it.

    Attributes:
      tables: all tables of the job, as this host holds them.
      undo: None where the driver wants none.
      save: of the whole shard; one at a time.
      held: which buckets hold the rows of a commit, as far as a survivor knows.
    """

    def __init__(
        self,
        spec: HostSpec,
        tables: Sequence[Table],
        *,
        held: HeldRows | None,
        tracker: Tracker,
        check: Callable[[], None],
        new_save: Callable[..., BackgroundSave] = BackgroundSave,
    ) -> None:
        """
        Args:
          held: what a survivor knows of the tables; None for new ones.
          check: called often by both threads of a save; raises to end it.
        """
        self._spec, self._tracker, self._check = spec, tracker, check
        self.tables = tables
        self.held = HeldRows.none_of(tables) if held is None else held
        self.undo = Undo(tables, share=spec.undo_share) if spec.undo_share else None
        self.save = new_save(
            tables,
            tracker=tracker,
            # Peers wait for this host meanwhile, for twice as long.
            stalled_after_s=spec.step_timeout_s / 2,
            raise_if_aborted=check,
            tracks_changes=spec.tracks_changes,
            undo=self.undo,
        )
        arm_updates(tables, tracker.faults, lambda: tracker.progress().step)

    @property
    def size_bytes(self) -> int:
        return sum(table.size_bytes for table in self.tables)

    def restore(
        self,
        files: Sequence[TableFiles] | None,
        *,
        mesh: Mesh,
        store: Store,
        neighbours: AbstractSet[int] = frozenset(),
    ) -> Filled:
        """As `HostWorker.restore`."""
        filled = fill_shard(
            self.held,
            self.tables,
            files,
            spec=self._spec,
            mesh=mesh,
            store=store,
            tracker=self._tracker,
            check=self._check,
            neighbours=neighbours,
        )
        # From here on the undo log knows.
        self.held = HeldRows.none_of(self.tables)
        if files is not None:
            self.save.track(files, self._spec.base or "")
        return filled

    def go_back_to(self, commit: str) -> None:
        """Gives the rows the values that they had at a commit, as far as the undo log reaches; `held` says how far."""
        known = self.undo.back_to(commit) if self.undo is not None else None
        if known is not None:
            self.held = HeldRows(commit, known)
        elif self.held.commit != commit:
            # What is known is of another commit: a survivor of a fault within a restore keeps what it had verified.
            self.held = HeldRows.none_of(self.tables)

    def release(self) -> Survivor:
        """What outlives the generation, and leads to nothing else of it."""
        for table in self.tables:
            # It leads to all tables, so that none could go before the last one is cut anew.
            table.before_change = None
        return Survivor([*self.tables], self.held)
