"""What a job's tables need on so many hosts, and how they would lie there: `podembed plan`. Starts nothing and reads no
rows.

The placement is the driver's own, so what is printed is what a run would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.lookup.placement import Way, place_tables, ways
from podembed.embedding.lookup.pooling_choice import CutWay, why_not_pooled
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.api.text import columns, format_bytes, printable
from podembed.workers.input.index import InputIndex
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import cut_ways, features_per_table, table_specs, why_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """One table.

    Attributes:
      hosts: who owns buckets of it, rising.
      why: it lies so, and whether bags are pooled at its owners or rows travel.
      is_pooled: its owners pool the bags of its features; otherwise rows travel.
    """

    spec: TableSpec
    way: Way
    num_features: int
    hosts: tuple[int, ...]
    why: str
    is_pooled: bool

    @property
    def is_whole(self) -> bool:
        return len(self.hosts) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHost:
    """One host.

    Attributes:
      shard_bytes: rows and slots that it holds.
      num_pooled: features that are pooled here alone, for all hosts.
      incoming_bytes: rows and slots that it must read, since it did not hold them before; None for a new run.
    """

    shard_bytes: int
    num_pooled: int
    incoming_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Tables in the job's order, hosts by number."""

    tables: tuple[PlannedTable, ...]
    hosts: tuple[PlannedHost, ...]


def plan(
    job: JobConfig,
    *,
    num_hosts: int,
    table_buckets: Sequence[int | None] | None = None,
    previous: Mapping[str, Sequence[int]] | None = None,
    index: InputIndex | None = None,
) -> Plan:
    """Places a job's tables as the driver would.

    Args:
      table_buckets: as recorded with a run, in the job's order; None chooses by size, as for a new run.
      previous: per table the owner of each bucket before, as in a manifest; None for a new run.
      index: of the files for training, which may say how long lists are; None where they were not looked at.
    """
    specs = table_specs(job, table_buckets or (None,) * len(job.tables))
    before = None if previous is None else [np.asarray(previous[spec.name], np.int32) for spec in specs]
    counts = features_per_table(job)
    owners = place_tables(specs, num_features=counts, num_hosts=num_hosts, previous=before)
    found = ways(specs, num_features=counts, num_hosts=num_hosts)
    cut = cut_ways(job, specs, bag_lengths(job, index), num_hosts=num_hosts)
    tables = tuple(
        _table(spec, way, count, placed, why=why, cut=if_cut)
        for spec, way, count, placed, why, if_cut in zip(specs, found, counts, owners, why_rows(job), cut, strict=True)
    )
    return Plan(tables=tables, hosts=tuple(_host(host, tables, owners, before) for host in range(num_hosts)))


def _table(
    spec: TableSpec, way: Way, num_features: int, owners: np.ndarray, *, why: str | None, cut: CutWay
) -> PlannedTable:
    """`why`: rows must travel for the features' sake. `cut`: how it is looked up if it is cut."""
    hosts = tuple(int(host) for host in np.unique(owners))
    why = why or why_not_pooled(spec)
    is_whole = len(hosts) == 1
    reason = "there is one host" if is_whole and not way.is_whole else way.reason
    if not is_whole:
        # What keeps a table from being pooled may be why it is cut, too.
        shown = reason if why and reason == why else f"{reason}; {cut.reason}"
        return PlannedTable(
            spec=spec, way=way, num_features=num_features, hosts=hosts, why=shown, is_pooled=cut.is_pooled
        )
    return PlannedTable(
        spec=spec,
        way=way,
        num_features=num_features,
        hosts=hosts,
        why=f"{reason}; {why}, so rows travel" if why else reason,
        is_pooled=not why,
    )


def _host(
    host: int, tables: Sequence[PlannedTable], owners: Sequence[np.ndarray], before: Sequence[np.ndarray] | None
) -> PlannedHost:
    def held(placed: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [owner == host for owner in placed]

    def size(masks: Sequence[np.ndarray]) -> int:
        return sum(int(mask.sum()) * table.spec.bucket_bytes for mask, table in zip(masks, tables, strict=True))

    now = held(owners)
    incoming = None
    if before is not None:
        incoming = size([mask & ~was for mask, was in zip(now, held(before), strict=True)])
    pooled = sum(table.num_features for table in tables if table.is_pooled and table.hosts == (host,))
    return PlannedHost(shard_bytes=size(now), num_pooled=pooled, incoming_bytes=incoming)


def summary(found: Plan) -> str:
    """One line: how many tables lie which way, what a host holds, and what another host held before."""
    whole = sum(table.is_whole for table in found.tables)
    sizes = [host.shard_bytes for host in found.hosts]
    cut = len(found.tables) - whole
    parts = [f"{whole} whole at one host"] * bool(whole) + [f"{cut} cut over the hosts"] * bool(cut)
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    held = least if least == most else f"{least} to {most}"
    moving = sum(host.incoming_bytes or 0 for host in found.hosts)
    moves = f", {format_bytes(moving)} change hosts" if moving else ""
    return f"tables: {', '.join(parts)}; a host holds {held} of rows and slots{moves}"


def render(found: Plan) -> str:
    """Text for `podembed plan`."""
    lines = [("table", "rows", "dim", "optimizer", "size", "buckets", "features", "on", "why")]
    lines += [_line(tables, len(found.hosts)) for tables in _alike(found.tables)]
    hosts = [("host", "holds", "pools features", "reads")]
    for number, host in enumerate(found.hosts):
        incoming = "-" if host.incoming_bytes is None else format_bytes(host.incoming_bytes)
        hosts.append((str(number), format_bytes(host.shard_bytes), str(host.num_pooled), incoming))
    return printable(f"{columns(lines)}\n\n{columns(hosts)}\n\n{summary(found)}")


def _alike(tables: Sequence[PlannedTable]) -> list[list[PlannedTable]]:
    """Tables that differ in nothing but their names and hosts, together, in the order of the first of each kind."""
    groups: dict[tuple[object, ...], list[PlannedTable]] = {}
    for table in tables:
        spec = table.spec
        rule = (type(spec.optimizer), *spec.widths.items())
        kind = (spec.num_rows, spec.dim, rule, spec.layout.num_buckets, table.num_features, table.way, table.why)
        # A cut table lies on all hosts; whole ones may lie anywhere.
        groups.setdefault((*kind, () if table.is_whole else table.hosts), []).append(table)
    return [*groups.values()]


def _line(tables: Sequence[PlannedTable], num_hosts: int) -> tuple[str, ...]:
    table = tables[0]
    spec = table.spec
    rule = type(spec.optimizer).__name__ if spec.optimizer else "none"
    name, each = spec.name, ""
    if len(tables) > 1:
        name, each = f"{len(tables)} tables: {spec.name} ... {tables[-1].spec.name}", " each"
    return (
        name,
        f"{spec.num_rows:,}",
        str(spec.dim),
        rule,
        f"{format_bytes(table.way.size_bytes)}{each}",
        str(spec.layout.num_buckets),
        str(table.num_features),
        _where(tables, num_hosts),
        table.why,
    )


def _where(tables: Sequence[PlannedTable], num_hosts: int) -> str:
    hosts = sorted({host for table in tables for host in table.hosts})
    if not tables[0].is_whole:
        return "all hosts" if len(hosts) == num_hosts else f"{len(hosts)} of {num_hosts} hosts"
    if len(tables) == 1:
        return f"host {hosts[0]}"
    counts = [sum(table.hosts == (host,) for table in tables) for host in hosts]
    least, most = min(counts), max(counts)
    share = f"{least}" if least == most else f"{least} to {most}"
    return f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts, {share} on each"
