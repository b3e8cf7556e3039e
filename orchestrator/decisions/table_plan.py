"""What a job's tables need on so many hosts, and how they would lie there: `podembed plan`. Starts nothing and reads no
rows.

The placement is the driver's own, so what is said is what a run would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.lookup.placement import Chosen, PlacementWay, place_tables, ways
from podembed.embedding.lookup.pooling_choice import CutWay, why_not_pooled
from podembed.embedding.shards import ShardLayout, sharded_arrays
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.api.text import format_bytes, plural
from podembed.workers.input.index import InputIndex
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import room_level, rows_of_room
from podembed.workers.job.tables import (
    choose_buckets,
    cut_ways,
    feature_bindings,
    features_per_table,
    host_features_per_table,
    table_specs,
    why_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """One table.

    Attributes:
      hosts: who owns buckets of it, rising.
      why: it lies so, and whether bags are pooled at its owners or rows travel.
      is_pooled: its owners pool the bags of its features; otherwise rows travel.
      is_on_devices: devices look up in it, and each holds all of it or a part. Its owners keep what was committed.
      num_parts: parts over all hosts, if each device holds one.
    """

    spec: TableSpec
    way: PlacementWay
    num_features: int
    hosts: tuple[int, ...]
    why: str
    is_pooled: bool
    is_on_devices: bool = False
    num_parts: int = 1

    @property
    def device_bytes(self) -> int:
        """Rows and slots of it that each device holds, and a byte a row that says whether it changed."""
        row_bytes = self.spec.row_bytes + (self.spec.optimizer is not None)
        if self.spec.is_sharded:
            return ShardLayout(table=self.spec.layout, num_parts=self.num_parts).rows_per_part * row_bytes
        return self.spec.num_rows * row_bytes if self.is_on_devices else 0

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
class PlannedMessages:
    """What two devices send each other in a step about sharded tables of one width and rule, if all ids differ. A list
    whose length neither the declaration nor the files say counts as one id.

    Attributes:
      tables: names of these tables.
      room: rows that a message has room for.
      sent_bytes: what a device sends to all others: ids, rows and gradients.
    """

    tables: tuple[str, ...]
    room: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Tables in the job's order, hosts by number."""

    tables: tuple[PlannedTable, ...]
    hosts: tuple[PlannedHost, ...]
    messages: tuple[PlannedMessages, ...] = ()


def plan(
    job: JobConfig,
    *,
    num_hosts: int,
    table_buckets: Sequence[int | None] | None = None,
    previous: Mapping[str, Sequence[int]] | None = None,
    index: InputIndex | None = None,
    chosen: Sequence[Chosen] | None = None,
    parts_per_host: int = 1,
) -> PlacementPlan:
    """Places a job's tables as the driver would.

    Args:
      table_buckets: table buckets as recorded with a run, in the job's order; None chooses them as for a new run.
      previous: per table the owner of each bucket before, as in a manifest; None for a new run.
      index: index of the files for training, which may say how long lists are; None where they were not looked at.
      chosen: one a table, as it would lie if costs decided; None is what the driver does.
      parts_per_host: devices of a host that work on samples of their own.
    """
    specs = table_specs(job, table_buckets or choose_buckets(job))
    before = None if previous is None else [np.asarray(previous[spec.name], np.int32) for spec in specs]
    counts = host_features_per_table(job)
    owners = place_tables(specs, num_features=counts, num_hosts=num_hosts, previous=before, chosen=chosen)
    found = ways(specs, num_features=counts, num_hosts=num_hosts, chosen=chosen)
    lengths = bag_lengths(job, index)
    cut = cut_ways(job, specs, lengths, num_hosts=num_hosts, chosen=chosen)
    tables = tuple(
        _table(spec, way, count, placed, why=why, cut=if_cut, config=config, num_parts=num_hosts * parts_per_host)
        for config, spec, way, count, placed, why, if_cut in zip(
            job.tables, specs, found, features_per_table(job), owners, why_rows(job), cut, strict=True
        )
    )
    return PlacementPlan(
        tables=tables,
        hosts=_hosts(tables, owners, before, num_hosts=num_hosts),
        messages=_messages(job, specs, lengths, num_parts=num_hosts * parts_per_host),
    )


def _messages(
    job: JobConfig, specs: Sequence[TableSpec], lengths: Sequence[float | None], *, num_parts: int
) -> tuple[PlannedMessages, ...]:
    if num_parts == 1:
        return ()
    by_name = {spec.name: spec for spec in specs}
    num_ids = dict.fromkeys(by_name, 0.0)
    for feature, length in zip(feature_bindings(job), lengths, strict=True):
        # Where nothing is known of lists, one id a sample.
        num_ids[specs[feature.table].name] += (length or 1.0) * job.batch_size / num_parts
    found = []
    for array in sharded_arrays(specs, num_parts):
        dim = by_name[array.name].dim
        room = rows_of_room(
            room_level(
                sum(
                    layout.largest_share * min(num_ids[name], layout.table.num_rows)
                    for name, layout in array.tables.items()
                )
            )
        )
        is_trained = by_name[array.name].optimizer is not None
        # An id with the request and one with the gradients; a row back, and its gradient.
        sent_bytes = 4 * (num_parts - 1) * room * (1 + dim) * (1 + is_trained)
        found.append(PlannedMessages(tables=tuple(array.tables), room=room, sent_bytes=sent_bytes))
    return tuple(found)


def _table(
    spec: TableSpec,
    way: PlacementWay,
    num_features: int,
    owners: np.ndarray,
    *,
    why: str | None,
    cut: CutWay,
    config: TableConfig,
    num_parts: int,
) -> PlannedTable:
    """`why`: rows must travel for the features' sake. `cut`: how it is looked up if it is cut."""
    hosts = tuple(int(host) for host in np.unique(owners))
    chosen = f"{config.place_reason}; " if config.place_reason else ""
    if config.is_on_devices:
        chosen = chosen or f"place='{config.place}'; "
        holds = f"at most {_share(spec, num_parts)} of it" if config.is_sharded else "all of it"
        return PlannedTable(
            spec=spec,
            way=way,
            num_features=num_features,
            hosts=hosts,
            why=f"{chosen}each holds {holds}, hosts keep what was committed",
            is_pooled=False,
            is_on_devices=True,
            num_parts=num_parts,
        )
    why = why or why_not_pooled(spec)
    is_whole = len(hosts) == 1
    reason = chosen + ("there is one host" if is_whole and not way.is_whole else way.reason)
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


def _share(spec: TableSpec, num_parts: int) -> str:
    layout = ShardLayout(table=spec.layout, num_parts=num_parts)
    return f"{round(layout.largest_share * spec.layout.num_buckets)} of {plural(spec.layout.num_buckets, 'bucket')}"


def _hosts(
    tables: Sequence[PlannedTable],
    owners: Sequence[np.ndarray],
    before: Sequence[np.ndarray] | None,
    *,
    num_hosts: int,
) -> tuple[PlannedHost, ...]:
    """The rows that each host holds, pools and reads. Goes over the tables once, however many hosts there are."""
    held, incoming = np.zeros(num_hosts, np.int64), np.zeros(num_hosts, np.int64)
    num_pooled = np.zeros(num_hosts, np.int64)
    for at, (table, owned) in enumerate(zip(tables, owners, strict=True)):
        held += table.spec.bucket_bytes * np.bincount(owned, minlength=num_hosts)
        if before is not None:
            new = owned[owned != before[at]]
            incoming += table.spec.bucket_bytes * np.bincount(new, minlength=num_hosts)
        if table.is_pooled and table.is_whole:
            num_pooled[table.hosts[0]] += table.num_features
    return tuple(
        PlannedHost(shard_bytes=size, num_pooled=pooled, incoming_bytes=None if before is None else new)
        for size, pooled, new in zip(held.tolist(), num_pooled.tolist(), incoming.tolist(), strict=True)
    )


def summary(found: PlacementPlan) -> str:
    """One line: how many tables lie which way, what a host holds, and what another host held before."""
    on_hosts = [table for table in found.tables if not table.is_on_devices]
    whole = sum(table.is_whole for table in on_hosts)
    sizes = [host.shard_bytes for host in found.hosts]
    cut, away = len(on_hosts) - whole, len(found.tables) - len(on_hosts)
    parts = [f"{whole} whole at one host"] * bool(whole) + [f"{cut} cut over the hosts"] * bool(cut)
    if away:
        device_bytes = sum(table.device_bytes for table in found.tables)
        parts.append(f"{away} on the devices, {format_bytes(device_bytes)} on each")
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    held = least if least == most else f"{least} to {most}"
    moving = sum(host.incoming_bytes or 0 for host in found.hosts)
    moves = f", {format_bytes(moving)} change hosts" if moving else ""
    return f"tables: {', '.join(parts)}; a host holds {held} of rows and slots{moves}"
