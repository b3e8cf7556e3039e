"""`Journal`: what a driver writes down of its run beside the commits: history, malformed rows, what became of files."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.policy_checks import early_stop_of
from podembed.orchestrator.api.result import HostsChange, MeasuredTable, Result
from podembed.orchestrator.api.vocabulary_totals import VocabularyTotals
from podembed.orchestrator.driver.upkeep import Upkeep
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.progress import ColumnUnknown, RowsPutAside
from podembed.orchestrator.run.dead_letters import DeadLetters
from podembed.orchestrator.run.finished import OWES_EVALUATION
from podembed.orchestrator.run.history import History
from podembed.orchestrator.run.history_record import HistoryKeeper
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.data.bad_rows import BadRow
from podembed.workers.data.unknown_values import UnknownColumn


class UnknownColumns:
    """Columns of which no host found a value in its vocabulary. Mutated: what was found and told."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, str], set[int]] = {}
        self._told: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Forgets what the hosts of the last generation found; all hosts begin anew."""
        self._hosts.clear()

    def take(self, hosts: Sequence[Sequence[UnknownColumn]]) -> list[UnknownColumn]:
        """Takes what each host found. Gives columns that all hosts have found by now, each once."""
        told: list[UnknownColumn] = []
        for host, columns in enumerate(hosts):
            for one in columns:
                key = (one.column, one.vocabulary)
                found = self._hosts.setdefault(key, set())
                found.add(host)
                if len(found) == len(hosts) and key not in self._told:
                    self._told.add(key)
                    told.append(one)
        return told


class Journal:
    """See the module. Mutated: all of its parts, as the run goes on.

    Args:
      emit: callback that takes what happens.

    Attributes:
      history: what this driver saw; without what was done after the commit that a generation starts from.
      tables: what the first window asked of them.
      early_stop: follows the evaluations, for a job with `EarlyStopping`.
      vocabularies: what became of keys that come and go.
      owed_step: None, or the step whose evaluation a signal cut off. A commit of that step says so, and whoever goes on
        from there makes it first.
      keeper, upkeep: used by the publishing thread, too; what they have to say is said by `tell`.
    """

    def __init__(
        self,
        run: OpenRun,
        config: CheckpointConfig,
        *,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self.history = History()
        self.tables: tuple[MeasuredTable, ...] = ()
        self.early_stop = early_stop_of(run.job, config)
        self.vocabularies = VocabularyTotals(run.job.table_names)
        self.owed_step: int | None = None
        self.keeper = HistoryKeeper(run.store, emit=emit)
        self.upkeep = Upkeep(run.store, run.record, config, unix_s=clock.wall_s)
        self._run = run
        self._generation = 0
        self._emit = emit
        # Read when the first malformed row comes: most runs have none.
        self._letters: DeadLetters | None = None
        self._unknown = UnknownColumns()

    def begin(self, step: int, *, generation: int) -> None:
        """A generation starts from `step`."""
        self._generation = generation
        self._unknown.begin()
        self.history.cut(step)
        self.keeper.begin(step)

    def metrics_at(self, step: int) -> dict[str, float]:
        """Metrics of an evaluation of exactly this state; empty without one."""
        last = self.history.evaluations[-1:]
        return last[0].comparable if last and last[0].step == step else {}

    def counters_at(self, step: int) -> dict[str, int]:
        """Further counters of a commit of this step."""
        owed = {OWES_EVALUATION: 1} if self.owed_step == step else {}
        return self.early_stop.counters | self.vocabularies.counters | owed

    def tell(self) -> None:
        """Reports what the publishing thread noted."""
        self.keeper.tell()
        for event in self.upkeep.take():
            self._emit(event)

    def tell_unknown(self, hosts: Sequence[Sequence[UnknownColumn]]) -> None:
        """Reports, once per column, that no host found a value of it in its vocabulary.

        Args:
          hosts: of each, the columns of which it found none for the first time.
        """
        for column in self._unknown.take(hosts):
            self._emit(ColumnUnknown(found=column))

    def put_aside(self, rows: Sequence[BadRow]) -> None:
        """Writes malformed rows that hosts left out to the run's folder.

        Raises:
          JobFailed: there are more than the job tolerates.
        """
        if not rows:
            return
        if self._letters is None:
            self._letters = DeadLetters(self._run.store, max_bad_rows=self._run.job.data.max_bad_rows)
        letters = self._letters
        if letters.add(rows, generation=self._generation):
            self._emit(RowsPutAside(num_rows=letters.num_rows, location=letters.location))
        letters.require_good_rows(self._run.train_index)

    def result(
        self,
        *,
        step: int,
        total_steps: int,
        commit: str | None,
        stopped_by: str | None,
        changes: Sequence[HostsChange],
    ) -> Result:
        """The result of the run, as far as this driver knows it.

        Args:
          step: step that the run ended at.
          commit: the newest one.
          stopped_by: who asked the run to end, if somebody did; it may have been done by then.
        """
        history, is_done = self.history, step == total_steps and self.owed_step != step
        return Result(
            path=self._run.url,
            step=step,
            total_steps=total_steps,
            num_samples=history.num_samples,
            trained_s=history.trained_s,
            samples_per_s=history.num_samples / history.trained_s if history.trained_s > 0 else 0.0,
            median_samples_per_s=history.median_samples_per_s,
            num_windows=len(history.windows),
            losses=dict(history.losses),
            evaluations=tuple(history.evaluations),
            recoveries=tuple(history.recoveries),
            phase_s=dict(history.phase_s),
            phase_cpu_s=dict(history.phase_cpu_s),
            commit=commit,
            stopped_by=None if is_done or self.early_stop.is_due else stopped_by,
            stopped_early=self.early_stop.reason,
            staleness=self._run.job.staleness,
            changes=tuple(changes),
            failed_saves=history.failed_saves,
            tables=self.tables,
        )
