"""`RecordedPlans`: which plan of `plans/` a run follows. The driver asks before each generation and at each commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podembed.embedding.lookup.placement import Chosen
from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.decisions.table_plan import PlacementPlan, plan, summary
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.progress import NotPlanned, TableReason, TablesPlanned
from podembed.orchestrator.planning.recorded_plans import PlanRecord, plan_file, plan_names, plan_steps, read_plan
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.storage.strict_json import DocumentRefused


class RecordedPlans:
    """See the module. Mutated: the plan that is followed.

    Args:
      emit: callback that is told which plan is followed, and why.
    """

    def __init__(self, run: OpenRun, scaling: ScalingConfig, *, emit: Emit) -> None:
        self._run, self._emit = run, emit
        self._follows = scaling.plan == "auto"
        self._parts_per_host = scaling.devices.sample_multiple
        self._current: PlanRecord | None = None
        self._steps: list[int] = []

    @property
    def chosen(self) -> tuple[Chosen, ...] | None:
        """What the generation follows, as `begin` returned it. Asks no storage, which may be away."""
        return None if self._current is None else self._current.chosen

    def tables(
        self,
        num_hosts: int,
        chosen: Sequence[Chosen] | None = None,
        *,
        previous: Mapping[str, Sequence[int]] | None = None,
    ) -> PlacementPlan:
        """The places of the run's tables on so many hosts. `chosen` and `previous` as of `plan`."""
        run = self._run
        return plan(
            run.job,
            num_hosts=num_hosts,
            table_buckets=run.table_buckets,
            previous=previous,
            index=run.train_index,
            chosen=chosen,
            parts_per_host=self._parts_per_host,
        )

    def describe(self, num_hosts: int) -> str:
        """What so many hosts would hold, in one line."""
        return summary(self.tables(num_hosts))

    def begin(self, *, num_hosts: int, step: int) -> tuple[Chosen, ...] | None:
        """What is chosen for the tables of a generation that begins at a step; None is the rule.

        Raises:
          ConfigurationError: a record is damaged.
        """
        current = self._current = self.at(num_hosts=num_hosts, step=step)
        if current is None:
            if self._follows and num_hosts > 1 and plan_names(self._run.store):
                self._emit(NotPlanned(reason=f"no plan is recorded for {num_hosts} hosts at step {step}"))
            return None
        self._steps = plan_steps(self._run.store, num_hosts=num_hosts)
        self._emit(
            TablesPlanned(
                step=current.step,
                num_hosts=num_hosts,
                why=current.why,
                step_s=current.step_s,
                other_s=current.other_s,
                tables=_reasons(self.tables(num_hosts, current.chosen)),
            )
        )
        return current.chosen

    def leaves(self, step: int) -> str | None:
        """Whether a generation should end at a commit, since another plan is recorded from there on: why, or None. Asks
        no storage, which may be away.
        """
        current = self._current
        due = None if current is None else max(one for one in self._steps if one <= step)
        if current is None or due == current.step:
            return None
        return f"the plan of step {due} is recorded"

    def at(self, *, num_hosts: int, step: int) -> PlanRecord | None:
        """The plan for a step on so many hosts; None for the rule.

        Raises:
          ConfigurationError: it is damaged. Another plan in its place would end with other bytes.
        """
        if not self._follows or num_hosts == 1:
            return None
        names = list(self._run.job.table_names)
        try:
            found = read_plan(self._run.store, step=step, num_hosts=num_hosts)
            if found is not None and found.tables and (given := [table.name for table in found.tables]) != names:
                name = plan_file(found.step, num_hosts)
                raise DocumentRefused(name, f"tables {given}", f"{names}, as the job has them")
        except DocumentRefused as error:
            raise ConfigurationError(
                f"Found {error.found} in {error.name}. Expected {error.expected}: it says how tables lie, and so in "
                "which order numbers are added. Restore it from a copy, or go on with ScalingConfig(plan='rule')."
            ) from error
        return found


def _reasons(found: PlacementPlan) -> tuple[TableReason, ...]:
    return tuple(
        TableReason(
            table=table.spec.name,
            num_hosts=len(table.hosts),
            is_pooled=table.is_pooled,
            why=table.why,
            is_on_devices=table.is_on_devices,
        )
        for table in found.tables
    )


def planned(run: OpenRun, base: Manifest | None, *, num_hosts: int, parts_per_host: int = 1) -> PlacementPlan:
    """The places of a run's tables when it goes on from a commit; None for its beginning.

    Args:
      parts_per_host: devices of a host that work on samples of their own.
    """
    scaling = ScalingConfig(num_hosts=num_hosts, devices_per_host=parts_per_host)
    plans = RecordedPlans(run, scaling, emit=lambda event: None)
    record = plans.at(num_hosts=num_hosts, step=base.step if base else 0)
    return plans.tables(
        num_hosts, record.chosen if record is not None else None, previous=base.placement if base else None
    )
