"""`Planner`: which plan a run follows, and when it changes that plan. The driver asks it before each generation and at
each commit.

A run that was begun with the constants of a machine follows the predicted best plan. Every decision is recorded before
anything of it is trained (`records`). It follows from the run's own records and its data, and from no time that was
measured meanwhile. So a run that was killed and goes on does what it would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from podembed.embedding.costs.profile import TableProfile, difference
from podembed.embedding.lookup.placement import Chosen
from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.decisions.table_plan import Plan, summary
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.plans import NotPlanned, PlanChanges, TableReason, TablesPlanned
from podembed.orchestrator.planning.best import FIRST_GAIN, Candidate, Tables, candidates, fastest
from podembed.orchestrator.planning.records import (
    PLANNING_FILE,
    ChosenRecord,
    PlanningRecord,
    PlanRecord,
    ProfileRecord,
    plan_file,
    plan_steps,
    read_plan,
    read_planning,
    write_plan,
    write_planning,
)
from podembed.orchestrator.prediction.dense_half import default_path
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.calibration.record import CalibrationRefused, read_calibration, this_machine
from podembed.workers.input.profile import profiles_at_hand
from podembed.workers.storage.strict_json import DocumentRefused

LATER_GAIN = 0.15
"""A run that follows a plan changes it for no less."""
NEARLY = 0.1
"""By so much what batches of the same data ask may differ. It is less than `LATER_GAIN`."""
CHANGE_S = 3.0
"""That a change takes beside the moves: processes meet, and compile again."""
MOVED_BYTE_S = 3e-9


Value = TypeVar("Value")


class Planner:
    """See the module. Mutated: the plan that is followed.

    Args:
      emit: told which plan is followed, and why.
    """

    def __init__(self, run: OpenRun, scaling: ScalingConfig, *, emit: Emit) -> None:
        self._run, self._emit = run, emit
        self._threads = scaling.threads_per_host or 1
        self._follows = scaling.plan == "auto"
        self._record: PlanningRecord | None = None
        self._current: PlanRecord | None = None
        self._steps: list[int] = []

    @property
    def is_active(self) -> bool:
        """Whether the run follows plans, and on several hosts."""
        return self._record is not None and self._current is not None

    def recorded(self, *, num_hosts: int, step: int) -> tuple[Chosen, ...] | None:
        """What was chosen for a step on so many hosts; None for the rule, and where nothing was chosen yet."""
        if not self._follows or num_hosts == 1:
            return None
        found = self._plan(num_hosts=num_hosts, step=step)
        return found.chosen if found is not None else None

    @property
    def chosen(self) -> tuple[Chosen, ...] | None:
        """What the generation follows, as `begin` returned it. Asks no storage, which may be away."""
        return None if self._current is None else self._current.chosen

    def tables(self, num_hosts: int) -> Tables:
        """The run's tables on so many hosts."""
        run = self._run
        return Tables(
            job=run.job,
            buckets=run.table_buckets,
            index=run.train_index,
            num_hosts=num_hosts,
            threads=self._record.threads if self._record is not None else self._threads,
        )

    def describe(self, num_hosts: int) -> str:
        """What so many hosts would hold, in one line."""
        return summary(self.tables(num_hosts).plan(None))

    def begin(self, *, num_hosts: int, step: int) -> tuple[Chosen, ...] | None:
        """What is chosen for the tables of a generation that begins at a step; None is the rule. Decides and records it
        where that was not done before; nothing is trained of a run at step 0. For the holder of the lease.

        Raises:
          ConfigurationError: a record is damaged.
        """
        self._current = None
        if not self._follows or num_hosts == 1:
            return None
        self._record = self._planning()
        store, tables = self._run.store, self.tables(num_hosts)
        if self._record is None and store.exists(PLANNING_FILE):
            if self._plan(num_hosts=num_hosts, step=step) is None:
                why = f"{PLANNING_FILE} has constants of another version, and no plan for {num_hosts} hosts is recorded"
                self._emit(NotPlanned(reason=why))
        elif self._record is None and step == 0:
            self._record = self._prepared()
        # A plan that is recorded is followed also where the constants are of another version.
        if self._record is not None and self._plan(num_hosts=num_hosts, step=step) is None:
            found = candidates(tables, self._record.calibration, [one.profile for one in self._record.profiles])
            best = fastest(found, least_gain=FIRST_GAIN)
            write_plan(store, self._recorded(best, other_s=found[0].step_s, step=step, num_hosts=num_hosts))
        # Another driver may have been first.
        current = self._plan(num_hosts=num_hosts, step=step)
        if current is None:
            return None
        self._current, self._steps = current, plan_steps(store, num_hosts=num_hosts)
        self._emit(
            TablesPlanned(
                step=current.step,
                num_hosts=num_hosts,
                why=current.why,
                step_s=current.step_s,
                other_s=current.other_s,
                tables=_reasons(tables.plan(current.chosen)),
            )
        )
        return current.chosen

    def _prepared(self) -> PlanningRecord | None:
        """Records what the run will plan with, where this machine's constants are there. Reads some of its data."""
        run = self._run
        try:
            calibration = read_calibration(default_path(), this_machine())
        except (CalibrationRefused, OSError) as error:
            self._emit(NotPlanned(reason=str(error)))
            return None
        if calibration is None:
            return None
        profiles = profiles_at_hand(run.job, run.train_index, most_s=0.0)
        of_tables = tuple(map(ProfileRecord.of, profiles.tables))
        write_planning(run.store, PlanningRecord(calibration=calibration, threads=self._threads, profiles=of_tables))
        # Another driver may have been first.
        return self._planning()

    def _planning(self) -> PlanningRecord | None:
        """As `read_planning`. Raises ConfigurationError as `_readable`."""
        num_tables = len(self._run.job.tables)

        def read() -> PlanningRecord | None:
            found = read_planning(self._run.store)
            if found is not None and len(found.profiles) != num_tables:
                raise DocumentRefused(PLANNING_FILE, f"profiles of {len(found.profiles)} tables", f"{num_tables}")
            return found

        return _readable(read)

    def _plan(self, *, num_hosts: int, step: int) -> PlanRecord | None:
        """As `read_plan`. Raises ConfigurationError as `_readable`."""
        names = list(self._run.job.table_names)

        def read() -> PlanRecord | None:
            found = read_plan(self._run.store, step=step, num_hosts=num_hosts)
            if found is not None and found.tables and (given := [table.name for table in found.tables]) != names:
                name = plan_file(found.step, num_hosts)
                raise DocumentRefused(name, f"tables {given}", f"{names}, as the job has them")
            return found

        return _readable(read)

    def leaves(self, step: int, profiles: Sequence[TableProfile]) -> str | None:
        """Whether a generation should end at a commit for another plan: why, or None. Records that plan.

        Args:
          step: of the commit.
          profiles: what the batch before the commit asked of each table; empty where hosts did not look.
        """
        current = self._current
        if current is None:
            return None
        num_hosts = current.num_hosts
        # A driver before this one decided so, and was lost before the commit. Nothing is read here: the storage may be
        # away while a run trains.
        due = max(one for one in self._steps if one <= step)
        if due != current.step:
            return f"the plan of step {due} is recorded"
        if not profiles or self._record is None or self._is_as_planned(profiles):
            return None
        found = candidates(self.tables(num_hosts), self._record.calibration, profiles, current.chosen)
        before, best = found[0], fastest(found, least_gain=LATER_GAIN)
        # Of all epochs: where a user cuts the run must not decide what it does before that.
        left_steps = max(0, self._run.total_steps - step)
        cost_s = CHANGE_S + MOVED_BYTE_S * best.moved_bytes
        if best is before or (before.step_s - best.step_s) * left_steps <= cost_s:
            return None
        record = self._recorded(best, other_s=before.step_s, step=step, num_hosts=num_hosts)
        write_plan(self._run.store, record)
        self._emit(
            PlanChanges(
                step=step,
                num_hosts=num_hosts,
                why=record.why,
                step_s=best.step_s,
                other_s=before.step_s,
                moved_bytes=best.moved_bytes,
                cost_s=cost_s,
                left_steps=left_steps,
            )
        )
        return f"another plan: {record.why}"

    def _is_as_planned(self, profiles: Sequence[TableProfile]) -> bool:
        """Whether the data ask nearly what they asked when the plan was made. Then it stays, since all hosts wait while
        another one is looked for. So small a difference would hardly gain what a change must gain.
        """
        current, record = self._current, self._record
        # The first plan on so many hosts is made for the profiles of the record, a later one for those of its commit.
        if current is None or record is None or current.step != self._steps[0]:
            return False
        planned = [one.profile for one in record.profiles]
        dims = [table.dim for table in self._run.job.tables]
        return difference(profiles, planned, dims=dims) <= NEARLY

    def _recorded(self, best: Candidate, *, other_s: float, step: int, num_hosts: int) -> PlanRecord:
        names = self._run.job.table_names
        return PlanRecord(
            step=step,
            num_hosts=num_hosts,
            why=best.name,
            step_s=best.step_s,
            other_s=other_s,
            tables=tuple(
                ChosenRecord(name=name, is_whole=one.is_whole, pools=one.pools, work=one.work, reason=one.reason)
                for name, one in zip(names, best.chosen or (), strict=best.chosen is not None)
            ),
        )


def _reasons(plan: Plan) -> tuple[TableReason, ...]:
    return tuple(
        TableReason(
            table=table.spec.name,
            num_hosts=len(table.hosts),
            is_pooled=table.is_pooled,
            why=table.why,
            is_on_devices=table.is_on_devices,
        )
        for table in plan.tables
    )


def _readable(read: Callable[[], Value]) -> Value:
    """What a record says.

    Raises:
      ConfigurationError: it is damaged. Another plan in its place would end with other bytes.
    """
    try:
        return read()
    except DocumentRefused as error:
        raise ConfigurationError(
            f"Found {error.found} in {error.name}. Expected {error.expected}: it says how tables lie, and so in which "
            "order numbers are added. Restore it from a copy, or go on with ScalingConfig(plan='rule')."
        ) from error


def planned(run: OpenRun, base: Manifest | None, *, num_hosts: int) -> Plan:
    """Where the tables of a run will lie when it goes on from a commit; None for its beginning. Decides nothing: what
    no driver decided yet lies by the rule.
    """
    planner = Planner(run, ScalingConfig(num_hosts=num_hosts), emit=lambda event: None)
    chosen = planner.recorded(num_hosts=num_hosts, step=base.step if base else 0)
    return planner.tables(num_hosts).plan(chosen, previous=base.placement if base else None)
