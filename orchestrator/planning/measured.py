"""What the first steps of a run asked of each table: ids, distinct rows, frequent rows, bytes and milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podembed.orchestrator.api.result import MeasuredTable
from podembed.orchestrator.decisions.table_plan import Plan
from podembed.orchestrator.planning.traffic import traffic_of
from podembed.workers.host.spec import HostWindow
from podembed.workers.input.table_profile import joined
from podembed.workers.job.job import JobConfig
from podembed.workers.liveness.progress import Phase

OF_TABLES = frozenset(
    (
        *(Phase.DEDUP, Phase.GROUP, Phase.SPLIT, Phase.GATHER, Phase.PREFETCH_GATHER, Phase.GRADIENT_SUM),
        *(Phase.POOL, Phase.POOL_FOR_OTHERS, Phase.PREFETCH_POOL, Phase.UPDATE),
    )
)
"""Phases in which kernels go over tables. Exchanges are waiting for the most part, which is no table's own."""


def measured_tables(
    job: JobConfig, plan: Plan, hosts: Sequence[HostWindow], *, num_steps: int
) -> tuple[MeasuredTable, ...]:
    """One a table, from a window of so many steps; empty where hosts were not asked.

    The time of a phase is that of all tables together. Each table has a share of it: by the bytes of rows, slots and
    vectors that it touches.
    """
    told = [host.profiles for host in hosts if host.profiles]
    if not told:
        return ()
    profiles = [joined(of_table) for of_table in zip(*told, strict=True)]
    traffic = traffic_of(job, plan, profiles)
    all_bytes = sum(one.touched_bytes for one in traffic)
    spent_s = _mean_s([host.phase_s for host in hosts]) / num_steps
    return tuple(
        MeasuredTable(
            name=one.table.spec.name,
            ids_per_sample=sum(profile.ids_per_sample),
            distinct_share=profile.distinct_share,
            hot_share=profile.hot_share,
            sent_bytes=one.sent_bytes,
            step_s=spent_s * one.touched_bytes / max(all_bytes, 1e-30),
            is_on_devices=one.table.is_on_devices,
        )
        for one, profile in zip(traffic, profiles, strict=True)
    )


def _mean_s(phases: Sequence[Mapping[Phase, float]]) -> float:
    return sum(spent for host in phases for phase, spent in host.items() if phase in OF_TABLES) / len(phases)
