"""The dashboard's queries name series that a run has, and each has its place."""

from __future__ import annotations

import json
import re
from pathlib import Path

from podembed.tools.metrics.catalog import CATALOG

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text(encoding="utf-8"))
SERIES = {metric.full_name: metric for metric in CATALOG.values()}


def test_queries_and_legends_name_series_and_labels_of_the_catalog() -> None:
    targets = [one for panel in DASHBOARD["panels"] for one in panel.get("targets", [])]
    assert targets
    for target in targets:
        (name,) = re.findall(r"podembed_\w+", target["expr"])
        metric = SERIES[name]
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == set(metric.labels)
        assert re.search(r"\b(rate|increase)\(", target["expr"]) is not None or metric.kind == "gauge"


def test_panels_have_places_of_their_own_and_one_unit() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        taken = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells
        assert max(x for x, _ in taken) < 24
        cells |= taken
        names = re.findall(r"podembed_\w+", " ".join(one["expr"] for one in panel.get("targets", [])))
        # Files and sockets are both counts.
        assert len({SERIES[name].unit.replace("sockets", "files") for name in names}) <= 1, panel["title"]


def test_the_first_row_has_figures_of_how_the_run_stands() -> None:
    panels = DASHBOARD["panels"]
    first = [panel for panel in panels if panel["gridPos"]["y"] == 0]
    assert panels[: len(first)] == first
    assert {panel["type"] for panel in first} == {"stat"}
    assert sum(panel["gridPos"]["w"] for panel in first) == 24
    expressions = [target["expr"] for panel in first for target in panel["targets"]]
    for name in ("step", "left_seconds", "goodput_ratio", "recovery_seconds", "alarm"):
        assert any(f"podembed_{name}{{" in expression for expression in expressions), name
    (alarms,) = [panel for panel in first if panel["title"] == "Alarms"]
    # Those that stand now, by name; an alarm that is over is 0.
    assert alarms["targets"][0]["expr"] == 'podembed_alarm{run="$run"} == 1'
    assert alarms["targets"][0]["instant"]
    assert alarms["options"]["textMode"] == "value_and_name"
