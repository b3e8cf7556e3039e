"""Marks of the time line: what happened in a run, when, and for how long."""

from __future__ import annotations

from typing import Any

from podembed.tools.report.material import Material

MOST_MARKS = 2000
# From top to bottom, with the kinds of events that they show.
_KINDS: dict[str, tuple[str, ...]] = {
    "generations": ("generation_started", "generation_ended", "hosts_changed"),
    "faults": ("generation_lost", "commit_lost"),
    "recoveries": ("recovery",),
    "failed saves": ("save_failed", "commit_unsettled", "storage_awaited"),
    "stalls": ("commit_delayed",),
    "commits": ("commit",),
    "evaluations": ("evaluation",),
    "slow hosts": ("host_slow", "owner_busy"),
}
ROWS = tuple(_KINDS)
# There may be many of them, and one more or less does not matter.
_MANY = ("commits", "evaluations")
# Events that come at the end of what they tell, and the value that says how long it took.
_LENGTHS = {"recovery": "total_s", "commit_delayed": "waited_s", "commit": "seconds", "hosts_changed": "seconds"}


def marks_of(material: Material) -> list[dict[str, Any]]:
    """As `charts.time_line_chart` takes them. Of too many commits and evaluations, the newest stay."""
    rows = {kind: row for row, kinds in _KINDS.items() for kind in kinds}
    found = []
    for line in material.stream.events:
        if line.kind in rows:
            length = line.values.get(_LENGTHS.get(line.kind, ""), 0.0)
            length_s = float(length) if isinstance(length, int | float) else 0.0
            found.append(
                {
                    "row": rows[line.kind],
                    "from": round((line.unix_s - length_s) * 1e3),
                    "until": round(line.unix_s * 1e3),
                    "text": line.text[:300],
                }
            )
    many = [at for at, one in enumerate(found) if one["row"] in _MANY]
    left_out = set(many[: max(0, len(found) - MOST_MARKS)])
    return [one for at, one in enumerate(found) if at not in left_out]
