"""What one step asks of each table, and what a host sends for it. Counted from the plan and from profiles of the data.

A table takes one of three ways. A whole one lies on one host, which pools the bags of all hosts. Of a cut one that its
owners pool, each host pools its part of every bag. Of others the distinct rows travel to the hosts that want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podembed.orchestrator.decisions.table_plan import Plan, PlannedTable
from podembed.workers.input.table_profile import TableProfile
from podembed.workers.job.job import JobConfig

_ID_BYTES, _ROW_BYTES, _SPLIT_BYTES, _FLOAT_BYTES = 8, 4, 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTraffic:
    """One table in one step. Hosts do nothing for a table on the devices, so its counts are 0.

    Attributes:
      bags, ids: of all its features, in one host's share of a batch.
      host_rows: distinct rows in one host's share.
      all_rows: distinct rows in the whole batch.
      num_hosts: of the run.
      wire_bytes: of a float between hosts: 4, or 2 for bfloat16.
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
        """In words."""
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


def traffic_of(job: JobConfig, plan: Plan, profiles: Sequence[TableProfile]) -> list[TableTraffic]:
    """Of all tables, in the job's order, on the hosts of the plan.

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


def sent_bytes(traffic: Sequence[TableTraffic]) -> float:
    """Bytes that a host sends in a step in the mean, for all tables."""
    return sum(table.sent_bytes for table in traffic)
