"""Predictions as text: a step by phase, memory, what would be faster, and predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podembed.embedding.costs.profile import HOT_ROWS, TableProfile
from podembed.orchestrator.api.text import columns, format_bytes, printable
from podembed.orchestrator.prediction.forecast import Forecast
from podembed.orchestrator.prediction.step import PredictedStep

_LEAST_SHARE = 0.005
_FASTER = 1.02


def render_forecast(found: Forecast) -> str:
    """What `podembed plan` says of time and memory."""
    step = found.step
    rows = [("phase of a step, host 0", "predicted ms", "share")]
    for phase, seconds in step.phase_s.items():
        if seconds >= _LEAST_SHARE * step.step_s:
            rows.append((str(phase), f"{1e3 * seconds:.2f}", f"{seconds / step.step_s:.0%}"))
    rows.append(("all", f"{1e3 * step.step_s:.2f}", ""))
    memory = found.memory
    held = [
        ("rows and slots", memory.table_bytes),
        ("marks of rows", memory.mark_bytes),
        ("hash slots", memory.hash_slot_bytes),
        ("undo log, when full", memory.undo_bytes),
        ("batches in flight", memory.batch_bytes),
        ("all", memory.total_bytes),
    ]
    parts = [
        columns(rows),
        f"predicted: {step.samples_per_s:,.0f} samples/s; a host sends {format_bytes(step.sent_bytes)} a step",
        columns([("memory of the fullest host", ""), *((name, format_bytes(size)) for name, size in held)]),
        _faster(found),
    ]
    if not found.is_measured:
        parts.append("ids were taken to be spread evenly; with --data or a job that has its files, they are measured")
    return printable("\n\n".join(parts))


def _faster(found: Forecast) -> str:
    """Every other setting with its step, the fastest first."""
    declared = found.step.step_s
    rows = [("with", "predicted ms", "samples/s", "against the plan")]
    for name, step in sorted(found.others, key=lambda other: other[1].step_s):
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


def render_comparison(predicted: PredictedStep, measured_s: Mapping[str, float]) -> str:
    """Predicted and measured side by side, by phase.

    Args:
      measured_s: seconds a step of each phase on host 0.
    """
    total = sum(measured_s.values())
    rows = [("phase of a step", "predicted ms", "measured ms", "off by")]
    by_name = {str(phase): seconds for phase, seconds in predicted.phase_s.items()}
    for name in dict.fromkeys((*by_name, *map(str, measured_s))):
        expected, found = by_name.get(name, 0.0), measured_s.get(name, 0.0)
        if max(expected, found) >= 0.02 * max(total, predicted.step_s):
            rows.append(_pair(name, expected, found))
    rows.append(_pair("all", predicted.step_s, total))
    return printable(columns(rows))


def _pair(name: str, predicted_s: float, measured_s: float) -> tuple[str, str, str, str]:
    off = f"{predicted_s / measured_s - 1:+.0%}" if measured_s else "-"
    return name, f"{1e3 * predicted_s:.2f}", f"{1e3 * measured_s:.2f}", off
