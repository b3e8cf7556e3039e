"""What the first steps of a run asked of each table: ids, distinct rows, frequent rows, bytes and milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podembed.embedding.costs.profile import TableProfile, joined
from podembed.embedding.costs.work import TableTraffic
from podembed.orchestrator.api.result import MeasuredTable
from podembed.orchestrator.decisions.table_plan import Plan
from podembed.orchestrator.prediction.demand import Setting, traffic_of
from podembed.orchestrator.prediction.forecast import demands
from podembed.orchestrator.prediction.parts import sent_bytes
from podembed.workers.host.spec import HostWindow
from podembed.workers.job.job import JobConfig
from podembed.workers.liveness.progress import Phase

OF_TABLES = frozenset(
    (
        *(Phase.DEDUP, Phase.GROUP, Phase.SPLIT, Phase.GATHER, Phase.PREFETCH_GATHER, Phase.GRADIENT_SUM),
        *(Phase.POOL, Phase.POOL_FOR_OTHERS, Phase.PREFETCH_POOL, Phase.UPDATE),
    )
)
"""Phases in which kernels go over tables. Exchanges are waiting for the most part, which is no table's own."""


def profiles_of_hosts(hosts: Sequence[HostWindow]) -> list[TableProfile]:
    """Per table, what the hosts say together; empty where none of them was asked."""
    told = [host.profiles for host in hosts if host.profiles]
    return [joined(of_table) for of_table in zip(*told, strict=True)] if told else []


def measured_tables(
    job: JobConfig, plan: Plan, hosts: Sequence[HostWindow], setting: Setting, *, num_steps: int
) -> tuple[MeasuredTable, ...]:
    """One a table, from a window of so many steps; empty where hosts were not asked.

    The time of a phase is that of all tables together. Each table has a share of it: by the floats of rows, slots and
    vectors that it touches.
    """
    profiles = profiles_of_hosts(hosts)
    if not profiles:
        return ()
    traffic = traffic_of(demands(job, plan, profiles), setting)
    floats = [_floats(table, setting.num_hosts) for table in traffic]
    spent_s = _mean_s([host.phase_s for host in hosts]) / num_steps
    return tuple(
        MeasuredTable(
            name=table.spec.name,
            ids_per_sample=sum(profile.ids_per_sample),
            distinct_share=profile.distinct_share,
            hot_share=profile.hot_share,
            sent_bytes=sent_bytes([asked], setting) if setting.num_hosts > 1 else 0.0,
            step_s=spent_s * own / max(sum(floats), 1e-30),
            is_on_devices=table.is_on_devices,
        )
        for table, profile, asked, own in zip(plan.tables, profiles, traffic, floats, strict=True)
    )


def _mean_s(phases: Sequence[Mapping[Phase, float]]) -> float:
    return sum(spent for host in phases for phase, spent in host.items() if phase in OF_TABLES) / len(phases)


def _floats(table: TableTraffic, num_hosts: int) -> float:
    """That a step reads or writes of a table in the mean of all hosts."""
    return 2 * table.ids * table.dim + table.all_rows / num_hosts * (table.dim + table.slot_floats)
