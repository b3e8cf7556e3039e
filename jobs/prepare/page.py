"""`report.html`: the report of a preparation as one page that needs nothing besides itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from podembed.orchestrator.api.text import format_bytes, plural
from podembed.tools.report.markup import Html, element, figure, join, legend, pairs, table
from podembed.tools.report.style import STYLE

_WIDTH, _HEIGHT = 220, 44
_STYLE = (
    "small { display: block; color: var(--muted); white-space: normal; max-width: 34ch; } td svg { display: block; }"
)
# Parts of the samples of a field, by the name in the report.
_PARTS = {"kept": ("kept", "var(--c0)"), "unseen": ("unseen or rare", "var(--c1)"), "missing": ("missing", "var(--c5)")}


def render_page(report: dict[str, Any]) -> str:
    """The whole page, from the content of `report.json`."""
    sources = report["sources"]
    shown = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
    columns = ", ".join(f"{name} {count:,}" for name, count in report["malformed_by_column"].items())
    malformed = f"Malformed lines, by the column that is wrong: {columns}. The lines are in malformed.jsonl."
    numbers = [report["label"] | {"transform": "label"}, *report["dense"]]
    body = [
        element("h1", "Prepared data"),
        element("p", f"from {shown}", class_="note"),
        pairs(
            [
                ("lines", f"{report['lines']:,}"),
                ("kept", f"{report['kept']:,} ({report['kept'] / report['lines']:.2%})"),
                ("malformed", f"{report['malformed']:,}"),
                ("text", format_bytes(report["source_bytes"])),
                ("Parquet", f"{format_bytes(report['part_bytes'])} in {plural(report['parts'], 'file')}"),
                ("rows of a group", f"{report['rows_per_group']:,}"),
            ]
        ),
        element("p", malformed, class_="warning") if report["malformed"] else "",
        element("h2", "Label and numbers"),
        table(
            "A bar is the share of samples between one power of two and the next. Negative values are on the left of "
            "zero. Point at a bar for its range.",
            ["column", "missing", "min", "mean", "max", "distribution"],
            map(_number, numbers),
        ),
        element("h2", "Fields"),
        legend([(name, colour, ()) for name, colour in _PARTS.values()]),
        table(
            "A bar is the share of the kept samples whose row is hit 1, 2–3, 4–7, … times, from left to right: what "
            "lies on the left was seen too seldom to be learned well.",
            ["field", "table rows", "values", "samples", "distribution", "most frequent"],
            map(_field, report["fields"]),
        ),
    ]
    head = [Html('<meta charset="utf-8">'), element("title", "Prepared data"), element("style", Html(STYLE + _STYLE))]
    return f"<!doctype html>\n{element('html', element('head', *head), element('body', *body), lang='en')}\n"


def _number(column: dict[str, Any]) -> list[object]:
    bars = [
        ("0" if low == high else f"{figure(low)} to {figure(high)}", count)
        for low, high, count in column["distribution"]
    ]
    return [
        join([column["name"], element("small", column["transform"])], ""),
        f"{column['missing'] / max(1, column['present'] + column['missing']):.2%}",
        *(figure(column[name]) for name in ("min", "mean", "max")),
        _histogram(bars),
    ]


def _field(field: dict[str, Any]) -> list[object]:
    kind = "hash" if field["ids"] == "hash" else f"vocabulary, at least {field['min_count']:,} times"
    distribution = field["distribution"]
    if field["values_seen"] is None:
        about = "about " if field["tracked_share"] < 1 else ""
        values, of = f"{about}{sum(rows for _, rows, _ in distribution):,}", "rows hit"
    else:
        values, of = f"{field['values_kept']:,}", f"of {field['values_seen']:,} seen"
    bars = [("once" if low == 1 else f"{low:,}–{2 * low - 1:,} times", samples) for low, _, samples in distribution]
    hit = f"hit {distribution[0][0]:,} to {2 * distribution[-1][0] - 1:,} times" if distribution else "none is hit"
    top = ", ".join(f"{value} ×{count:,}" for value, count in (field["most_frequent"] or [])[:3])
    return [
        join([field["name"], element("small", kind)], ""),
        f"{field['rows']:,}",
        join([values, element("small", of)], ""),
        _shares(field),
        join([_histogram(bars), element("small", hit)], ""),
        element("small", top),
    ]


def _shares(field: dict[str, Any]) -> Html:
    """One bar of three parts, with the figures below."""
    total = max(1, field["samples"])
    parts, at = [], 0.0
    for name, (_, colour) in _PARTS.items():
        width = _WIDTH * field[name] / total
        parts.append(_bar(f"{name} {field[name]:,}", colour, x=at, y=4.0, width=width, height=12.0))
        at += width
    words = ", ".join(f"{field[name] / total:.1%} {name}" for name in _PARTS)
    return join([element("svg", *parts, width=_WIDTH, height=20, role="img"), element("small", words)], "")


def _histogram(bars: Sequence[tuple[str, int]]) -> Html:
    total, most = sum(count for _, count in bars), max((count for _, count in bars), default=0)
    step = min(18.0, _WIDTH / max(1, len(bars)))
    drawn = []
    for at, (name, count) in enumerate(bars):
        height = max(1.0, (_HEIGHT - 2) * count / max(1, most))
        title = f"{name}: {count:,} samples, {count / max(1, total):.1%}"
        drawn.append(_bar(title, "var(--c0)", x=at * step, y=_HEIGHT - height, width=step - 2, height=height))
    return element("svg", *drawn, width=_WIDTH, height=_HEIGHT, role="img")


def _bar(title: str, colour: str, **place: float) -> Html:
    return element("rect", element("title", title), fill=colour, **{key: f"{one:.1f}" for key, one in place.items()})
