"""Predictions as text: a step by phase, memory, what would be faster, and predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.embedding.costs.profile import HOT_ROWS, TableProfile
from podembed.embedding.costs.work import TableWay
from podembed.orchestrator.api.result import Prediction
from podembed.orchestrator.api.text import columns, format_bytes, printable
from podembed.orchestrator.prediction.choices import TableChoice, WayCost
from podembed.orchestrator.prediction.forecast import Forecast

_LEAST_SHARE = 0.005
_LEAST_COMPARED = 0.02
_FASTER = 1.02
_CHEAPER = 1.1
_MOST_LINES = 40


def render_forecast(found: Forecast) -> str:
    """What `podembed plan` says of time and memory."""
    step = found.step
    rows = [("part of a step, host 0", "predicted ms", "share")]
    for part, seconds in step.parts_s.items():
        if seconds >= _LEAST_SHARE * step.step_s:
            rows.append((part, f"{1e3 * seconds:.2f}", f"{seconds / step.step_s:.0%}"))
    rows.append(("all", f"{1e3 * step.step_s:.2f}", ""))
    memory = found.memory
    held = [
        ("rows and slots", memory.table_bytes),
        ("marks of rows", memory.mark_bytes),
        ("hash slots", memory.hash_slot_bytes),
        ("undo log, when full", memory.undo_bytes),
        ("saves beside training", memory.save_bytes),
        ("batches in flight", memory.batch_bytes),
        ("the process without tables", memory.process_bytes),
        ("all", memory.total_bytes),
    ]
    parts = [
        columns(rows),
        f"predicted: {step.samples_per_s:,.0f} samples/s; a host sends {format_bytes(step.sent_bytes)} a step",
        columns([("memory of the fullest host", ""), *((name, format_bytes(size)) for name, size in held)]),
        _choices(found),
        _ways(found.tables),
        _faster(found),
    ]
    if not found.is_measured:
        parts.append("ids were taken to be spread evenly; with --data or a job that has its files, they are measured")
    return printable("\n\n".join(parts))


def _choices(found: Forecast) -> str:
    """Overlap, staleness and the wire's type, each with what its alternatives would take."""
    rows = [("choice", "", "predicted ms of a step", "why")]
    for choice in found.choices:
        steps = ", ".join(f"{name} {1e3 * step.step_s:.2f}" for name, step in choice.steps)
        rows.append((choice.name, choice.chosen, steps, choice.why))
    return columns(rows)


def _ways(tables: Sequence[TableChoice]) -> str:
    """The way of each table and what the others would cost, the most expensive table first. Alike ones share a line."""
    rows: list[tuple[str, ...]] = [("table", "way", *(f"{way} ms" for way in TableWay), "sends", "why", "cheaper")]
    alike: dict[tuple[str, ...], list[str]] = {}
    on_hosts = [table for table in tables if not table.is_on_devices]
    for table in sorted(on_hosts, key=lambda table: -table.cost.host_s):
        costs = dict(table.costs)
        cheapest = table.cheapest
        is_better = costs[cheapest].host_s * _CHEAPER < table.cost.host_s
        cells = (
            str(table.way),
            *(_cost(costs.get(way)) for way in TableWay),
            format_bytes(table.cost.sent_bytes),
            table.why,
            str(cheapest) if is_better else "-",
        )
        alike.setdefault(cells, []).append(table.name)
    for cells, names in list(alike.items())[:_MOST_LINES]:
        rows.append((names[0] if len(names) == 1 else f"{len(names)} tables: {names[0]} ... {names[-1]}", *cells))
    more = sum(len(names) for names in list(alike.values())[_MOST_LINES:])
    note = "ms: of a host in the mean, for lookup, update and messages of the table; in brackets its owner"
    return columns(rows) + (f"\n  ... {more} more tables" if more else "") + f"\n{note}"


def _cost(cost: WayCost | None) -> str:
    if cost is None:
        return "-"
    owner = "" if cost.owner_s is None else f" ({1e3 * cost.owner_s:.3f})"
    return f"{1e3 * cost.host_s:.3f}{owner}"


def _faster(found: Forecast) -> str:
    """Every other setting with its step, the fastest first."""
    declared = found.step.step_s
    rows = [("with", "predicted ms", "samples/s", "against the plan")]
    others = list(found.others)
    for choice in found.choices:
        others += [(f"{choice.name} {name}", step) for name, step in choice.steps if name != choice.chosen]
    for name, step in sorted(others, key=lambda other: other[1].step_s):
        ratio = declared / step.step_s if step.step_s else 1.0
        verdict = f"{ratio:.2f} x as fast" if ratio >= _FASTER or ratio <= 1 / _FASTER else "the same"
        rows.append((name, f"{1e3 * step.step_s:.2f}", f"{step.samples_per_s:,.0f}", verdict))
    return columns(rows) if len(rows) > 1 else "no other setting to compare with"


def render_profiles(names: Sequence[str], profiles: Sequence[TableProfile], *, most: int = 40) -> str:
    """What was measured of the data, table by table, the one with most ids first."""
    rows = [("table", "ids a sample", "distinct share", f"top {HOT_ROWS} rows", "untouched before")]
    ordered = sorted(zip(names, profiles, strict=True), key=lambda one: -sum(one[1].ids_per_sample))
    for name, profile in ordered[:most]:
        rows.append(
            (
                name,
                f"{sum(profile.ids_per_sample):.2f}",
                f"{profile.distinct_share:.0%}",
                f"{profile.hot_share:.0%}",
                f"{profile.free_bags:.0%} of bags, {profile.free_rows:.0%} of rows",
            )
        )
    more = f"\n  ... {len(names) - most} more tables" if len(names) > most else ""
    return printable(columns(rows) + more)


def render_comparison(found: Prediction) -> str:
    """Predicted and measured side by side, by part of a step."""
    longest_s = max(found.step_s, found.measured_step_s)
    rows = [("part of a step", "predicted ms", "measured ms", "off by")]
    for name in dict.fromkeys((*found.phase_s, *found.measured_phase_s)):
        expected, spent = found.phase_s.get(name, 0.0), found.measured_phase_s.get(name, 0.0)
        if max(expected, spent) >= _LEAST_COMPARED * longest_s:
            rows.append(_pair(name, expected, spent))
    rows.append(_pair("all", found.step_s, found.measured_step_s))
    return printable(columns(rows) + _beside_saves(found))


def _beside_saves(found: Prediction) -> str:
    """What steps beside a save took. They are not in the table, since nothing predicts them."""
    if found.saving_step_s is None:
        return ""
    share = f"{found.saving_share:.0%}"
    if found.saving_share < 0.01:
        share = "under 1%"
    elif 0.99 < found.saving_share < 1:
        share = "over 99%"
    took = f"{share} of the steps were beside a save of host 0 and took {1e3 * found.saving_step_s:.2f} ms each"
    of_table = "the table has all steps" if found.is_beside_saves else "the table has the others"
    return f"\n{took}; {of_table}"


def _pair(name: str, predicted_s: float, measured_s: float) -> tuple[str, str, str, str]:
    off = f"{predicted_s / measured_s - 1:+.0%}" if measured_s else "-"
    return name, f"{1e3 * predicted_s:.2f}", f"{1e3 * measured_s:.2f}", off
