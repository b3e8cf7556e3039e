"""`best_plan`: of several plans for the tables of a job, the one that is predicted to be fastest. A function of its
arguments alone.

The time is that of the hosts: lookups, updates and messages. What a device takes is left out. It is the same for every
plan, and where it is measured it would make a plan depend on how busy a machine was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podembed.embedding.costs.profile import TableProfile
from podembed.embedding.lookup.placement import Chosen, place_tables
from podembed.orchestrator.decisions.table_plan import Plan, plan
from podembed.orchestrator.prediction.choices import proposals, table_choices
from podembed.orchestrator.prediction.demand import DenseHalf
from podembed.orchestrator.prediction.dense_half import hosts_together
from podembed.orchestrator.prediction.forecast import demands, setting_of
from podembed.orchestrator.prediction.step import predict
from podembed.workers.calibration.record import Calibration
from podembed.workers.input.index import InputIndex
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import host_features_per_table, table_specs

BY_RULE = "by size and features"
FIRST_GAIN = 0.02
"""A new run follows another plan than the rule where it takes so much less."""
_NO_DEVICE = DenseHalf(step_s=0.0, sample_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of a run on some hosts.

    Attributes:
      buckets: of each, as recorded with the run.
      threads: of a host.
    """

    job: JobConfig
    buckets: Sequence[int]
    index: InputIndex | None
    num_hosts: int
    threads: int = 1

    def plan(self, chosen: Sequence[Chosen] | None, *, previous: Mapping[str, Sequence[int]] | None = None) -> Plan:
        """Where they lie if so much is chosen; None is the rule.

        Args:
          previous: table → owner of each bucket before; None for a new run.
        """
        return plan(
            self.job,
            num_hosts=self.num_hosts,
            table_buckets=self.buckets,
            previous=previous,
            index=self.index,
            chosen=chosen,
        )

    def owners(self, chosen: Sequence[Chosen] | None) -> Mapping[str, Sequence[int]]:
        """Of each bucket of each table, in a new run that has this plan."""
        specs = table_specs(self.job, self.buckets)
        placed = place_tables(
            specs, num_features=host_features_per_table(self.job), num_hosts=self.num_hosts, chosen=chosen
        )
        return {spec.name: owners.tolist() for spec, owners in zip(specs, placed, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan, and the seconds that hosts take for a step with it. `chosen` is None for the rule."""

    name: str
    chosen: tuple[Chosen, ...] | None
    plan: Plan
    step_s: float

    @property
    def moved_bytes(self) -> int:
        """Of rows and slots, that change hosts for it."""
        return sum(host.incoming_bytes or 0 for host in self.plan.hosts)


def candidates(
    tables: Tables, calibration: Calibration, profiles: Sequence[TableProfile], current: Sequence[Chosen] | None = None
) -> list[Candidate]:
    """Plans for the tables, the current one first, then the rule and what costs propose.

    Args:
      profiles: one a table.
      current: the plan that is followed now; None is the rule. What moves is counted from where it puts buckets of a
        new run. So it does not depend on which hosts were lost before.
    """
    job, before = tables.job, tables.owners(current)
    setting = setting_of(
        job,
        num_hosts=tables.num_hosts,
        hosts_a_machine=hosts_together(tables.num_hosts, calibration.machine.cpus),
        reads_files=False,
        threads=tables.threads,
    )

    def candidate(name: str, chosen: Sequence[Chosen] | None) -> Candidate:
        found = tables.plan(chosen, previous=before)
        step = predict(demands(job, found, profiles), setting, calibration=calibration, dense=_NO_DEVICE)
        return Candidate(name=name, chosen=None if chosen is None else tuple(chosen), plan=found, step_s=step.step_s)

    first = candidate(BY_RULE if current is None else "as before", current)
    asked = demands(job, first.plan, profiles)
    costs = table_choices(asked, setting, whys=[table.why for table in first.plan.tables], calibration=calibration)
    others = dict(proposals(costs))
    return [
        first,
        *([] if current is None else [candidate(BY_RULE, None)]),
        *(candidate(name, chosen) for name, chosen in others.items()),
    ]


def fastest(found: Sequence[Candidate], *, least_gain: float) -> Candidate:
    """The first of them, unless another one is faster by this share of its time at least."""
    best = min(found, key=lambda one: one.step_s)
    return best if best.step_s <= (1 - least_gain) * found[0].step_s else found[0]
