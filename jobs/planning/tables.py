"""Where tables would lie, as text."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.orchestrator.api.text import columns, format_bytes, printable
from podembed.orchestrator.decisions.table_plan import PlacementPlan, PlannedTable, summary

MAX_HOSTS_SHOWN = 32


def render_tables(found: PlacementPlan) -> str:
    """Tables that are alike in one line each, and what each host holds."""
    lines = [("table", "rows", "dim", "optimizer", "size", "buckets", "features", "on", "why")]
    lines += [_line(tables, len(found.hosts)) for tables in _alike(found.tables)]
    hosts = [("host", "holds", "pools features", "reads")]
    shown = range(min(len(found.hosts), MAX_HOSTS_SHOWN))
    for number, host in [(number, found.hosts[number]) for number in shown]:
        incoming = "-" if host.incoming_bytes is None else format_bytes(host.incoming_bytes)
        hosts.append((str(number), format_bytes(host.shard_bytes), str(host.num_pooled), incoming))
    if len(found.hosts) > MAX_HOSTS_SHOWN:
        hosts.append((f"... {len(found.hosts) - 1}", "", "", ""))
    text = printable("\n\n".join([columns(lines), columns(hosts), summary(found)]))
    if not any(table.is_on_devices for table in found.tables):
        return text
    text += "\nhosts send nothing for tables on the devices, and hold their rows as they were committed"
    for one in found.messages:
        text += (
            f"\n{_named(one.tables)}: if all ids differ, a message between two devices has room for {one.room:,} rows, "
            f"and a device sends {format_bytes(one.sent_bytes)} a step; a run makes less room where its ids repeat"
        )
    return text


def _named(tables: Sequence[str]) -> str:
    return printable(tables[0] if len(tables) == 1 else f"{len(tables)} tables, {tables[0]} ... {tables[-1]}")


def _alike(tables: Sequence[PlannedTable]) -> list[list[PlannedTable]]:
    """Tables that differ in nothing but their names and hosts, together, in the order of the first of each kind."""
    groups: dict[tuple[object, ...], list[PlannedTable]] = {}
    for table in tables:
        spec = table.spec
        rule = (type(spec.optimizer), *spec.widths.items())
        kind = (spec.num_rows, spec.dim, rule, spec.layout.num_buckets, table.num_features, table.way, table.why)
        # A cut table lies on all hosts; whole ones may lie anywhere.
        is_anywhere = table.is_whole or table.is_on_devices
        groups.setdefault((*kind, () if is_anywhere else table.hosts), []).append(table)
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
        f"{format_bytes(table.device_bytes or table.way.size_bytes)}{each}",
        str(spec.layout.num_buckets),
        str(table.num_features),
        _where(tables, num_hosts),
        table.why,
    )


def _where(tables: Sequence[PlannedTable], num_hosts: int) -> str:
    hosts = sorted({host for table in tables for host in table.hosts})
    if tables[0].is_on_devices:
        num_parts, most = tables[0].num_parts, tables[0].spec.layout.num_buckets
        return f"{most} of {num_parts} devices" if tables[0].spec.is_sharded and most < num_parts else "all devices"
    if not tables[0].is_whole:
        return "all hosts" if len(hosts) == num_hosts else f"{len(hosts)} of {num_hosts} hosts"
    if len(tables) == 1:
        return f"host {hosts[0]}"
    counts = [sum(table.hosts == (host,) for table in tables) for host in hosts]
    least, most = min(counts), max(counts)
    share = f"{least}" if least == most else f"{least} to {most}"
    return f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts, {share} on each"
