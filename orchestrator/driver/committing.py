"""`Committing`: the commits of one generation, with what a run makes of them: what goes into each, and who learns of
it.

How a commit comes about beside training is in `background_commit`, how it is published in `publication`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.commit.patience import Patience
from podembed.orchestrator.commit.run_record import TableRecord
from podembed.orchestrator.driver.background_commit import BackgroundCommits
from podembed.orchestrator.driver.publication import RunPublication
from podembed.orchestrator.driver.shared import Shared
from podembed.orchestrator.events.commits import CommitDelayed, Committed, SaveFailed
from podembed.orchestrator.group.worker_group import WorkerGroup
from podembed.orchestrator.run.history_record import HistoryRecord

NOTABLE_WAIT_S = 1.0


class Committing:
    """See the module.

    Args:
      base: the commit that the generation started from.
      placement: table → owner of each bucket, for manifests.

    Attributes:
      commits: what is under way.
    """

    def __init__(
        self,
        shared: Shared,
        group: WorkerGroup,
        lease: Lease,
        base: Manifest | None,
        placement: Mapping[str, Sequence[int]],
    ) -> None:
        self._shared = shared
        self._group = group
        self._lease = lease
        self._placement = placement
        # Of a commit that is written while a trace is on.
        self._end_span: Callable[[], None] = lambda: None
        limits = shared.config.failure_config
        self.commits = BackgroundCommits(
            group,
            generation=lease.generation,
            head=base,
            needs_all=base is not None and _has_grown(base, shared.run.record.tables),
            full_every=shared.config.checkpoint_config.full_every,
            acknowledge=self._acknowledged,
            failed=self._failed,
            emit=shared.emit,
            patience=Patience(max_failed_saves=limits.max_failed_saves, timeout_s=limits.storage_timeout_s),
            clock=shared.clock,
            publisher=shared.publisher(),
            is_stopping=lambda: shared.is_stopping,
        )

    def begin(self, step: int) -> None:
        """Begins a commit of the state after `step` steps, and says so if training had to wait for the one before.

        Raises:
          As `BackgroundCommits.begin`.
        """
        # This wait is for no commit, and is not told as one.
        self._group.prove()
        clock, before = self._shared.clock, self.commits.begun_step
        started_s = clock.monotonic_s()
        trace = self._shared.trace.driver
        with trace.span("work", "begin commit", step=step):
            self.commits.begin(step, self._publication(step))
        self._end_span()
        self._end_span = trace.begin_span("commits", f"commit of step {step}")
        waited_s = clock.monotonic_s() - started_s
        if waited_s >= NOTABLE_WAIT_S:
            self._shared.emit(CommitDelayed(step=step, before_step=before, waited_s=waited_s))

    def conclude(self, step: int) -> None:
        """Waits for a commit of the run's last step, and looks whether it is there.

        Raises:
          RunVanished: it is not; else as `BackgroundCommits.conclude`.
        """
        self.commits.conclude(step, self._publication(step))
        journal = self._shared.journal
        journal.upkeep.require(self._lease, self.commits.head)
        # The evaluation at the end comes after the last commit, and so after its record.
        if journal.metrics_at(step):
            journal.keeper.write(self._record(step))
        journal.tell()

    def _record(self, step: int) -> HistoryRecord:
        journal = self._shared.journal
        return journal.keeper.record(journal.history, generation=self._lease.generation, step=step)

    def _publication(self, step: int) -> RunPublication:
        shared, journal = self._shared, self._shared.journal
        return RunPublication(
            run=shared.run,
            lease=self._lease,
            upkeep=journal.upkeep,
            keeper=journal.keeper,
            record=self._record(step),
            step=step,
            placement=self._placement,
            num_hosts=self._group.num_hosts,
            counters=journal.counters_at(step),
            metrics={**journal.metrics_at(step), **journal.early_stop.metrics},
            read_back=shared.config.checkpoint_config.read_back,
            unix_s=shared.clock.wall_s,
        )

    def _acknowledged(self, manifest: Manifest, seconds: float) -> None:
        shared = self._shared
        self._group.acknowledge(manifest.name)
        shared.saves.done()
        shared.watch.committed(seconds)
        self._end_span()
        shared.emit(
            Committed(name=manifest.name, step=manifest.step, size_bytes=manifest.written_bytes, seconds=seconds)
        )
        shared.journal.tell()

    def _failed(self, save: SaveFailed) -> None:
        shared = self._shared
        self._end_span()
        shared.journal.tell()
        shared.journal.history.failed_saves += 1
        shared.saves.failed(save.step)
        shared.emit(save)


def _has_grown(base: Manifest, tables: Sequence[TableRecord]) -> bool:
    """Whether a table has more rows than in a commit, so that changed rows alone would be no commit."""
    rows = {table.name: table.num_rows for table in tables}
    return any(rows.get(table.name, table.num_rows) != table.num_rows for table in base.tables)
