"""What a step asks of each table, as text, with an estimate of the time that it takes."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.jobs.planning.data_at_hand import ProfilesAtHand
from podembed.orchestrator.api.text import columns, format_bytes, printable
from podembed.orchestrator.planning.traffic import TableTraffic
from podembed.workers.input.table_profile import HOT_ROWS, TableProfile

MEMORY_BYTES_S, WIRE_BYTES_S = 10e9, 1.25e9
"""Constants of the estimate: what one processor reads and writes at random in memory, and 10 Gbit/s between hosts."""
MOST_LINES = 40


def sent_bytes(traffic: Sequence[TableTraffic]) -> float:
    """Bytes that a host sends in a step in the mean, for all tables."""
    return sum(table.sent_bytes for table in traffic)


def render_step(traffic: Sequence[TableTraffic], profiles: ProfilesAtHand) -> str:
    """What a step asks of each table, those that a host touches most first; and an estimate from its bytes."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for one, profile in sorted(zip(traffic, profiles.tables, strict=True), key=lambda pair: -pair[0].touched_bytes):
        alike.setdefault(_cells(one, profile), []).append(one.table.spec.name)
    hot = f"of {HOT_ROWS} rows"
    rows: list[tuple[str, ...]] = [
        ("table", "way", "ids a sample", "distinct", hot, "a host touches", "and sends, a step")
    ]
    for cells, names in list(alike.items())[:MOST_LINES]:
        rows.append((names[0] if len(names) == 1 else f"{len(names)} tables: {names[0]} ... {names[-1]}", *cells))
    more = sum(len(names) for names in list(alike.values())[MOST_LINES:])
    lines = [columns(rows), *([f"  ... {more} more tables"] if more else []), _estimate(traffic)]
    if not profiles.is_measured:
        lines.append("ids are taken to be spread evenly, and lengths of bags are assumed where nothing else says them")
    return printable("\n".join(lines))


def _cells(one: TableTraffic, profile: TableProfile) -> tuple[str, ...]:
    return (
        one.way,
        f"{sum(profile.ids_per_sample):.2f}",
        f"{profile.distinct_share:.0%}",
        f"{profile.hot_share:.0%}",
        format_bytes(one.touched_bytes),
        format_bytes(one.sent_bytes),
    )


def _estimate(traffic: Sequence[TableTraffic]) -> str:
    touched, sent = sum(one.touched_bytes for one in traffic), sent_bytes(traffic)
    on_wire = f" and sends {format_bytes(sent)}" if sent else ""
    times = f"{1e3 * touched / MEMORY_BYTES_S:.2g} ms with a thread at {MEMORY_BYTES_S / 1e9:g} GB/s of memory"
    if sent:
        times += f", and {1e3 * sent / WIRE_BYTES_S:.2g} ms at {8 * WIRE_BYTES_S / 1e9:g} Gbit/s"
    return (
        f"\nin a step a host touches {format_bytes(touched)} of rows, slots and vectors{on_wire}\n"
        f"that takes about {times}; the model's step comes on top or hides it"
    )
