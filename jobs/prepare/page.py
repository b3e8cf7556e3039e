"""`report.html`: the report of a preparation as one page that needs nothing besides itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from podembed.orchestrator.api.text import format_bytes

_WIDTH, _HEIGHT = 220, 44
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; } p { margin: .3rem 0; }
.note { color: #617080; font-size: 12.5px; max-width: 80ch; } .bad { color: #b42318; }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.tile { border: 1px solid #dfe5ea; border-radius: 6px; padding: .5rem .9rem; } .tile b { display: block; font-size: 1.15rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; color: #617080; font-size: 12.5px; }
td, th { border-bottom: 1px solid #e8ecf0; padding: .35rem .7rem .35rem 0; vertical-align: top; } td.number { text-align: right; }
th.number { text-align: right; } td, .tile b { font-variant-numeric: tabular-nums; }
td small { color: #617080; display: block; overflow-wrap: anywhere; max-width: 34ch; } svg { display: block; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 .9em; }
"""
_KEPT, _UNSEEN, _MISSING, _BAR = "#3b82c4", "#e0913a", "#cbd3da", "#7aa7d2"


def render_page(report: dict[str, Any]) -> str:
    """The whole page, from the content of `report.json`."""
    sources = report["sources"]
    shown = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Prepared data</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>Prepared data</h1><p class=note>from {escape(shown)}</p>\n"
        + _tiles(report)
        + _malformed(report)
        + _numbers(report)
        + _fields(report)
        + "</body></html>\n"
    )


def _tiles(report: dict[str, Any]) -> str:
    kept_share = report["kept"] / report["lines"]
    tiles = [
        ("lines", f"{report['lines']:,}"),
        ("kept", f"{report['kept']:,} ({kept_share:.2%})"),
        ("malformed", f"{report['malformed']:,}"),
        ("text", format_bytes(report["source_bytes"])),
        (
            "Parquet",
            f"{format_bytes(report['part_bytes'])} in {report['parts']:,} file{'s' if report['parts'] != 1 else ''}",
        ),
        ("rows of a group", f"{report['rows_per_group']:,}"),
    ]
    return f"<div class=tiles>{''.join(f'<div class=tile>{name}<b>{value}</b></div>' for name, value in tiles)}</div>\n"


def _malformed(report: dict[str, Any]) -> str:
    if not report["malformed"]:
        return ""
    columns = ", ".join(f"{escape(name)} {count:,}" for name, count in report["malformed_by_column"].items())
    return (
        f"<p class=bad>Malformed lines, by the column that is wrong: {columns}. The lines are in malformed.jsonl.</p>\n"
    )


def _numbers(report: dict[str, Any]) -> str:
    rows = []
    for column in [report["label"] | {"transform": "label"}, *report["dense"]]:
        total = max(1, column["present"] + column["missing"])
        rows.append(
            f"<tr><td>{escape(column['name'])}<small>{column['transform']}</small></td>"
            f"<td class=number>{column['missing'] / total:.2%}</td>"
            + "".join(f"<td class=number>{_figure(column[name])}</td>" for name in ("min", "mean", "max"))
            + f"<td>{_histogram([(_range(low, high), count) for low, high, count in column['distribution']])}</td></tr>\n"
        )
    return (
        "<h2>Label and numbers</h2><p class=note>A bar is the share of samples between one power of two and the next. "
        "Negative values are on the left of zero. Point at a bar for its range.</p>\n<table><tr><th>column<th class=number>missing<th "
        "class=number>min"
        f"<th class=number>mean<th class=number>max<th>distribution</tr>\n{''.join(rows)}</table>\n"
    )


def _fields(report: dict[str, Any]) -> str:
    key = "".join(
        f'<i style="background:{colour}"></i>{name}'
        for name, colour in (("kept", _KEPT), ("unseen or rare", _UNSEEN), ("missing", _MISSING))
    )
    return (
        f"<h2>Fields</h2><p class='note key'>Samples:{key}</p><p class=note>A bar is the share of the kept samples "
        "whose row is hit "
        "1, 2–3, 4–7, … times, from left to right: what lies on the left was seen too seldom to be learned well.</p>\n"
        "<table><tr><th>field<th class=number>table rows<th class=number>values<th>samples<th>distribution<th>most "
        "frequent</tr>\n" + "".join(_field(field) for field in report["fields"]) + "</table>\n"
    )


def _field(field: dict[str, Any]) -> str:
    is_estimate = field["tracked_share"] < 1
    kind = "hash" if field["ids"] == "hash" else f"vocabulary, at least {field['min_count']:,} times"
    if field["values_seen"] is None:
        hit = sum(rows for _, rows, _ in field["distribution"])
        values = f"{'about ' if is_estimate else ''}{hit:,}<small>rows hit</small>"
    else:
        values = f"{field['values_kept']:,}<small>of {field['values_seen']:,} seen</small>"
    bars = [(_times(low), samples) for low, _, samples in field["distribution"]]
    top = ", ".join(f"{escape(value)}&nbsp;×{count:,}" for value, count in (field["most_frequent"] or [])[:3])
    return (
        f"<tr><td>{escape(field['name'])}<small>{kind}</small></td><td class=number>{field['rows']:,}</td><td "
        f"class=number>{values}</td>"
        f"<td>{_shares(field)}</td><td>{_histogram(bars)}<small>{_hit_range(field)}</small></td><td><small>{top}</small></td></tr>\n"
    )


def _shares(field: dict[str, Any]) -> str:
    """One bar of three parts, with the figures below."""
    total = max(1, field["samples"])
    parts, at = [], 0.0
    for name, colour in (("kept", _KEPT), ("unseen", _UNSEEN), ("missing", _MISSING)):
        width = _WIDTH * field[name] / total
        parts.append(
            f'<rect x="{at:.1f}" y="4" width="{width:.1f}" height="12" fill="{colour}"><title>{name} '
            f"{field[name]:,}</title></rect>"
        )
        at += width
    words = (
        f"{field['kept'] / total:.1%} kept, {field['unseen'] / total:.1%} unseen, {field['missing'] / total:.1%} "
        "missing"
    )
    return f'<svg width="{_WIDTH}" height="20" role="img">{"".join(parts)}</svg><small>{words}</small>'


def _histogram(bars: Sequence[tuple[str, int]]) -> str:
    if not bars:
        return ""
    total, most = sum(count for _, count in bars), max(count for _, count in bars)
    step = min(18.0, _WIDTH / len(bars))
    drawn = []
    for at, (name, count) in enumerate(bars):
        height = max(1.0, (_HEIGHT - 2) * count / max(1, most))
        drawn.append(
            f'<rect x="{at * step:.1f}" y="{_HEIGHT - height:.1f}" width="{step - 2:.1f}" height="{height:.1f}" '
            f'fill="{_BAR}">'
            f"<title>{escape(name)}: {count:,} samples, {count / max(1, total):.1%}</title></rect>"
        )
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _range(low: float, high: float) -> str:
    return "0" if low == high else f"{_figure(low)} to {_figure(high)}"


def _times(low: int) -> str:
    return "once" if low == 1 else f"{low:,}–{2 * low - 1:,} times"


def _hit_range(field: dict[str, Any]) -> str:
    """The range over the whole distribution."""
    if not field["distribution"]:
        return "none is hit"
    return f"hit {field['distribution'][0][0]:,} to {2 * field['distribution'][-1][0] - 1:,} times"


def _figure(number: float | None) -> str:
    if number is None:
        return "none"
    return f"{number:,.0f}" if number == int(number) and abs(number) < 1e9 else f"{number:,.4g}"
