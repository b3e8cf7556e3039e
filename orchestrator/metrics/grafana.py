"""`dashboard`: a Grafana dashboard of the series of the catalog, made here so that its queries cannot go stale.

Usage: `python -m podembed.orchestrator.metrics.grafana > docs/grafana.json`
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.metrics.catalog import CATALOG

WIDTH, HEIGHT = 8, 8
ROW_WIDTH = 24
SCHEMA = 36
"""Version of Grafana's dashboard format, that of Grafana 10; later ones read it."""
UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}
SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Shown:
    """A panel.

    Attributes:
      names: names of series in the catalog, all of one unit. Counters are shown as what they grow by in a second, or in
        the shown time where `is_sum` is set.
    """

    title: str
    names: tuple[str, ...]
    is_sum: bool = False


NOW_HEIGHT = 4
NOW: tuple[tuple[int, Shown], ...] = (
    (5, Shown("Step", ("step", "steps_planned"))),
    (4, Shown("Time left", ("left_seconds",))),
    (4, Shown("Goodput", ("goodput_ratio",))),
    (4, Shown("Last recovery", ("recovery_seconds",))),
    (7, Shown("Alarms", ("alarm",))),
)
"""The row of figures at the top: width and panel. Of alarms it has the names of those that stand."""
ROWS: dict[str, tuple[Shown, ...]] = {
    "Learning": (
        Shown("Loss", ("loss",)),
        Shown("AUC of each window, before it is trained on", ("window_auc",)),
        Shown("Normalized entropy", ("window_normalized_entropy",)),
        Shown("Calibration", ("window_calibration",)),
        Shown("Evaluations", ("evaluation",)),
        Shown("Norms of the dense half", ("dense_gradient_norm", "dense_update_norm")),
    ),
    "Speed": (
        Shown("Samples a second", ("samples_per_second",)),
        Shown("Goodput", ("goodput_ratio",)),
        Shown("Steps that are done and committed", ("step", "committed_step")),
        Shown("Time of a step by phase and host", ("phase_seconds",)),
        Shown("Waited, by source and host", ("waited_ratio",)),
        Shown("Bytes sent a second", ("sent_bytes",)),
    ),
    "Commits and faults": (
        Shown("Time of a commit", ("commit_seconds",)),
        Shown("Bytes of a commit", ("commit_bytes",)),
        Shown("Commits and failed saves", ("commits", "failed_saves"), is_sum=True),
        Shown("Lost steps by cause", ("lost_steps",), is_sum=True),
        Shown("Recoveries by cause", ("recoveries",), is_sum=True),
        Shown("Hosts", ("hosts",)),
    ),
    "Tables": (
        Shown("Norms of rows", ("table_row_norm",)),
        Shown("Norms of rows over those of their first values", ("table_row_growth",)),
        Shown("Rows that were ever updated", ("table_trained_ratio",)),
    ),
    "Data": (
        Shown("Samples that differ from the first ones", ("feature_distance_ratio",)),
        Shown("Samples without an id", ("feature_empty_ratio",)),
        Shown("Share of the most frequent id", ("feature_top_ratio",)),
        Shown("Share of the ten most frequent ids", ("feature_top_ten_ratio",)),
        Shown("Malformed rows", ("malformed_rows",)),
    ),
    "Machines": (
        Shown("Memory", ("memory_bytes", "peak_memory_bytes")),
        Shown("Open files and sockets", ("open_files", "open_sockets")),
        Shown("Processors in use", ("cpu_seconds",)),
    ),
}


def dashboard() -> dict[str, Any]:
    """As Grafana imports it. It asks for a Prometheus data source and a run."""
    panels: list[dict[str, Any]] = []
    x = 0
    for width, shown in NOW:
        place = {"h": NOW_HEIGHT, "w": width, "x": x, "y": 0}
        panels.append(_figure(shown, number=len(panels) + 1, place=place))
        x += width
    y = NOW_HEIGHT
    for title, row in ROWS.items():
        place = {"h": 1, "w": ROW_WIDTH, "x": 0, "y": y}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        )
        y += 1
        for at, shown in enumerate(row):
            x = at % (ROW_WIDTH // WIDTH) * WIDTH
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y + at // (ROW_WIDTH // WIDTH) * HEIGHT}
            panels.append(_panel(shown, number=len(panels) + 1, place=place))
        y += -(-len(row) * WIDTH // ROW_WIDTH) * HEIGHT
    return {
        "uid": "podembed",
        "title": "podembed",
        "description": "Measurements of a run.",
        "tags": ["podembed"],
        "editable": True,
        "schemaVersion": SCHEMA,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": _choices()},
        "panels": panels,
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _choices() -> list[dict[str, Any]]:
    query = "label_values(podembed_step, run)"
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {"name": "run", "label": "Run", "type": "query", "datasource": SOURCE, "query": query, "refresh": 2},
    ]


def _panel(shown: Shown, *, number: int, place: dict[str, int]) -> dict[str, Any]:
    metrics = [CATALOG[name] for name in shown.names]
    targets = []
    for at, metric in enumerate(metrics):
        series = f'{metric.full_name}{{run="$run"}}'
        if metric.kind == "counter":
            series = f"increase({series}[$__range])" if shown.is_sum else f"rate({series}[$__rate_interval])"
        name = [metric.name] if len(metrics) > 1 or not metric.labels else []
        legend = " ".join([*name, *(f"{{{{{label}}}}}" for label in metric.labels)])
        targets.append({"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": series, "legendFormat": legend})
    # Of a counter of seconds, what a second has is a number of processors.
    unit = "Bps" if shown.names == ("sent_bytes",) else "" if metrics[0].kind == "counter" else metrics[0].unit
    return {
        "id": number,
        "type": "timeseries",
        "title": shown.title,
        "description": " ".join(metric.meaning for metric in metrics),
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": UNITS.get(unit, unit if unit == "Bps" else "short")}, "overrides": []},
    }


def _figure(shown: Shown, *, number: int, place: dict[str, int]) -> dict[str, Any]:
    """The newest values as figures."""
    panel = _panel(shown, number=number, place=place)
    are_names = shown.names == ("alarm",)
    for target in panel["targets"] if are_names else ():
        # At this moment: in a span of time, the last value of an alarm that is over would be its 1.
        target |= {"expr": f"{target['expr']} == 1", "instant": True, "range": False}
    colour = {"color": "orange" if are_names else "text", "value": None}
    words = [{"type": "value", "options": {"1": {"text": "stands"}}}] if are_names else []
    panel["type"] = "stat"
    panel["fieldConfig"]["defaults"] |= {
        "noValue": "none",
        "mappings": words,
        "thresholds": {"mode": "absolute", "steps": [colour]},
    }
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value_and_name" if are_names or len(shown.names) > 1 else "value",
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
    }
    return panel


if __name__ == "__main__":
    print(text(), end="")
