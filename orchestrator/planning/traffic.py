"""What one step asks of each table, and what a host sends for it. Counted from the plan and from profiles of the data,
before a run for `podembed plan`, and after its first steps.

A table takes one of three ways. A whole one lies on one host, which pools the bags of all hosts. Of a cut one that its
owners pool, each host pools its part of every bag. Of others the distinct rows travel to the hosts that want them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.result import MeasuredTable
from podembed.orchestrator.decisions.table_plan import PlacementPlan, PlannedTable
from podembed.workers.host.spec import HostWindow
from podembed.workers.input.table_profile import TableProfile, joined
from podembed.workers.job.job import JobConfig
from podembed.workers.liveness.progress import Phase

OF_TABLES = frozenset(
    (
        *(Phase.DEDUP, Phase.GROUP, Phase.SPLIT, Phase.GATHER, Phase.PREFETCH_GATHER, Phase.GRADIENT_SUM),
        *(Phase.POOL, Phase.POOL_FOR_OTHERS, Phase.PREFETCH_POOL, Phase.UPDATE),
    )
)
"""Phases in which kernels go over tables. Exchanges are waiting for the most part, which is no table's own."""
_ID_BYTES, _ROW_BYTES, _SPLIT_BYTES, _FLOAT_BYTES = 8, 4, 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTraffic:
    """One table in one step. Hosts do nothing for a table on the devices, so its counts are 0.

    Attributes:
      bags, ids: bags and ids of all its features, in one host's share of a batch.
      host_rows: distinct rows in one host's share.
      all_rows: distinct rows in the whole batch.
      num_hosts: number of hosts of the run.
      wire_bytes: bytes of a float between hosts: 4, or 2 for bfloat16.
    """

    table: PlannedTable
    bags: float = 0.0
    ids: float = 0.0
    host_rows: float = 0.0
    all_rows: float = 0.0
    num_hosts: int
    wire_bytes: int

    @property
    def way(self) -> str:
        """The way in words."""
        if self.table.is_on_devices:
            return "on devices"
        if not self.table.is_pooled:
            return "rows travel"
        return "whole" if self.table.is_whole else "owners pool"

    @property
    def vector_floats(self) -> float:
        """Floats of a host's pooled vectors."""
        return self.bags * self.table.spec.dim

    @property
    def sent_bytes(self) -> float:
        """Bytes that a host sends in the mean: ids, then vectors or rows, and their gradients. Hosts that share a
        machine exchange vectors in its memory; they are counted all the same.
        """
        hosts, dim = self.num_hosts, self.table.spec.dim
        others = 1 - 1 / hosts
        if not self.table.is_pooled:
            return others * self.host_rows * (_ID_BYTES + 2 * self.wire_bytes * dim)
        # A bag of a whole table goes to its owner, and a bag of a cut one to all hosts.
        times = 1 if self.table.is_whole else hosts
        ids = others * (_ROW_BYTES * self.ids + _SPLIT_BYTES * self.bags * times)
        return ids + 2 * self.wire_bytes * others * times * self.vector_floats

    @property
    def touched_bytes(self) -> float:
        """Bytes that a host reads or writes of rows, slots and vectors in the mean: each id's vector in the lookup and
        in the sum of gradients, and each distinct row with its slots in the update.
        """
        spec = self.table.spec
        floats = 2 * self.ids * spec.dim + self.all_rows / self.num_hosts * sum(spec.widths.values())
        return _FLOAT_BYTES * floats


def traffic_of(job: JobConfig, plan: PlacementPlan, profiles: Sequence[TableProfile]) -> list[TableTraffic]:
    """The traffic of all tables, in the job's order, on the hosts of the plan.

    Args:
      profiles: one a table.
    """
    num_hosts = len(plan.hosts)
    samples, wire_bytes = job.batch_size / num_hosts, 2 if job.wire_dtype == "bfloat16" else 4
    found = []
    for table, profile in zip(plan.tables, profiles, strict=True):
        if table.is_on_devices:
            found.append(TableTraffic(table=table, num_hosts=num_hosts, wire_bytes=wire_bytes))
            continue
        found.append(
            TableTraffic(
                table=table,
                bags=samples * table.num_features,
                ids=samples * sum(profile.ids_per_sample),
                host_rows=profile.rows(samples, num_rows=table.spec.num_rows),
                all_rows=profile.rows(job.batch_size, num_rows=table.spec.num_rows),
                num_hosts=num_hosts,
                wire_bytes=wire_bytes,
            )
        )
    return found


def measured_tables(
    job: JobConfig, plan: PlacementPlan, hosts: Sequence[HostWindow], *, num_steps: int
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
