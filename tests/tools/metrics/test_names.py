"""The page and the catalog have the same names, and names follow OpenMetrics."""

from __future__ import annotations

import re
from pathlib import Path

from podembed.tools.metrics.catalog import CATALOG

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"


def test_the_page_names_every_series() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `podembed_")]
    expected = [
        f"| `{metric.full_name}` | {metric.kind} | {metric.unit or '–'} "
        f"| {', '.join(f'`{label}`' for label in metric.labels) or '–'} | {metric.meaning} |"
        for metric in CATALOG.values()
    ]
    assert rows == expected


def test_names_follow_openmetrics() -> None:
    for metric in CATALOG.values():
        assert re.fullmatch(r"podembed_[a-z][a-z0-9_]*", metric.full_name), metric.full_name
        assert metric.full_name.endswith("_total") == (metric.kind == "counter")
        if metric.unit in ("seconds", "bytes", "ratio"):
            assert metric.name.endswith(metric.unit), f"{metric.name} should end in its unit"
