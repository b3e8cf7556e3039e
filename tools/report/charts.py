"""Charts as Vega-Lite specifications. Colours are variables of the page's style, so that they follow light and dark.

They have no legends: these are elements of the page, which lays them out in the font that it has. Vega lays them out by
widths of another font, so they overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podembed.tools.report.curves import Curve

NUM_COLOURS = 8
COLOURS = [f"var(--c{at})" for at in range(NUM_COLOURS)]
ZOOM = "zoom"
WIDTH, HEIGHT, WIDE = 520, 200, 1000
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2))
_FEW_POINTS = 60
_LEAST_LATER = 5
# The day at midnight, else a time of 24 hours.
_TIME_OF_DAY = (
    "utcFormat(datum.value, utchours(datum.value) + utcminutes(datum.value) + utcseconds(datum.value) > 0 "
    "? '%H:%M:%S' : '%b %d')"
)
_INK, _MUTED, _RULE = "var(--ink)", "var(--muted)", "var(--rule)"
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": _MUTED,
        "titleColor": _MUTED,
        "titleFontWeight": "normal",
        "gridColor": _RULE,
        "domainColor": _RULE,
        "tickColor": _RULE,
        "labelFontSize": 12,
        "titleFontSize": 12,
    },
}

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """How a line or a part of a bar is drawn.

    Attributes:
      dash: lengths of strokes and gaps; empty for a part of a bar.
    """

    name: str
    colour: str
    dash: tuple[int, ...] = ()


def line_keys(names: Sequence[str]) -> list[Key]:
    """One of each line. Colour alone does not tell lines apart, and the ninth does not look like the first."""
    return [
        Key(name=name, colour=COLOURS[at % NUM_COLOURS], dash=_DASHES[(at + at // NUM_COLOURS) % len(_DASHES)])
        for at, name in enumerate(names)
    ]


def part_keys(parts: Sequence[str]) -> list[Key]:
    return [Key(name=part, colour=COLOURS[at % NUM_COLOURS]) for at, part in enumerate(parts)]


def curve_chart(curve: Curve) -> Spec:
    """Lines over steps, which can be zoomed along the steps."""
    keys = line_keys(list(curve.lines))
    names = [key.name for key in keys]
    values = [
        {"step": step, "value": value, "line": name} for name, line in curve.lines.items() for step, value in line
    ]
    is_sparse = max(len(line) for line in curve.lines.values()) <= _FEW_POINTS
    return _spec(
        values,
        mark={
            "type": "line",
            "clip": True,
            "strokeWidth": 2,
            "point": {"size": 22, "filled": True} if is_sparse else "transparent",
        },
        params=[
            {
                "name": ZOOM,
                "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
                "bind": "scales",
            }
        ],
        encoding={
            "x": {
                "field": "step",
                "type": "quantitative",
                "title": "step",
                "scale": {"padding": 6, "nice": False, "zero": False},
                "axis": {"grid": False, "tickMinStep": 1, "tickCount": 6, "labelFlush": False},
            },
            "y": {
                "field": "value",
                "type": "quantitative",
                "title": None,
                "scale": {"zero": False, "nice": False, **(_domain(curve) or {"padding": 6})},
                "axis": {"tickCount": 5, **_format(curve.unit)},
            },
            "color": {
                "field": "line",
                "type": "nominal",
                "scale": {"domain": names, "range": [key.colour for key in keys]},
                "legend": None,
            },
            "strokeDash": {
                "field": "line",
                "type": "nominal",
                "scale": {"domain": names, "range": [list(key.dash) for key in keys]},
                "legend": None,
            },
            "tooltip": [
                {"field": "line", "type": "nominal", "title": "of"},
                {"field": "step", "type": "quantitative", "format": ","},
                {"field": "value", "type": "quantitative", "format": ".5~g"},
            ],
        },
    )


def _domain(curve: Curve) -> Spec:
    """Without the first value of each line, where it lies so far off that the others would be a flat line."""
    later = [value for line in curve.lines.values() for _, value in line[1:]]
    low, high = min(later, default=0.0), max(later, default=0.0)
    span = high - low
    firsts = [line[0][1] for line in curve.lines.values()]
    if span <= 0 or len(later) < _LEAST_LATER or (min(firsts) >= low - span and max(firsts) <= high + span):
        return {}
    return {"domain": [low - span / 20, high + span / 20]}


def _format(unit: str) -> Spec:
    return {"format": ".0%"} if unit == "ratio" else {"format": ".3~s"} if unit == "bytes" else {}


def bars_chart(rows: Sequence[tuple[str, str, float]], *, title: str, parts: Sequence[str]) -> Spec:
    """Stacked bars.

    Args:
      rows: name of a bar, name of a part, its length.
      title: title of the lengths.
      parts: in the order of their colours.
    """
    order = {part: at for at, part in enumerate(parts)}
    values = [{"bar": bar, "part": part, "value": value, "order": order[part]} for bar, part, value in rows]
    num_bars = len({bar for bar, _, _ in rows})
    return _spec(
        values,
        height=max(40, min(420, 34 * num_bars)),
        width=WIDE,
        mark={"type": "bar", "stroke": "var(--paper)", "strokeWidth": 1},
        encoding={
            "y": {"field": "bar", "type": "nominal", "title": None, "sort": None},
            "x": {"field": "value", "type": "quantitative", "title": title, "axis": {"tickCount": 6}},
            "order": {"field": "order", "type": "quantitative"},
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {"domain": list(parts), "range": [key.colour for key in part_keys(parts)]},
                "legend": None,
            },
            "tooltip": [
                {"field": "bar", "type": "nominal", "title": "of"},
                {"field": "part", "type": "nominal"},
                {"field": "value", "type": "quantitative", "format": ".4~g", "title": title},
            ],
        },
    )


def time_line_chart(marks: Sequence[Spec], rows: Sequence[str]) -> Spec:
    """What happened when.

    Args:
      marks: `row`, `from` and `until` in milliseconds since 1970, and `text`.
      rows: from top to bottom.
    """
    time = {
        "field": "from",
        "type": "temporal",
        "title": "time (UTC)",
        "scale": {"type": "utc", "padding": 6},
        "axis": {"tickCount": 6, "labelOverlap": True, "labelFlush": True, "labelExpr": _TIME_OF_DAY},
    }
    colour = {
        "field": "row",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": list(rows), "range": [COLOURS[at % NUM_COLOURS] for at in range(len(rows))]},
    }
    tooltip = [
        {"field": "text", "type": "nominal", "title": "what"},
        {"field": "from", "type": "temporal", "title": "when", "timeUnit": "utcyearmonthdatehoursminutesseconds"},
    ]
    place = {"field": "row", "type": "nominal", "title": None, "sort": list(rows), "scale": {"domain": list(rows)}}
    spec = _spec(marks, height=30 * len(rows), width=WIDE)
    spec["layer"] = [
        {
            "mark": {"type": "rule", "strokeWidth": 8, "opacity": 0.6, "clip": True},
            "encoding": {"x": time, "x2": {"field": "until"}, "y": place, "color": colour, "tooltip": tooltip},
        },
        {
            "params": [
                {
                    "name": ZOOM,
                    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
                    "bind": "scales",
                }
            ],
            "mark": {"type": "point", "filled": True, "size": 70, "clip": True, "opacity": 1},
            "encoding": {
                "x": time,
                "y": place,
                "color": colour,
                "shape": {"field": "row", "type": "nominal", "legend": None, "scale": {"domain": list(rows)}},
                "tooltip": tooltip,
            },
        },
    ]
    return spec


def _spec(values: Sequence[Spec], *, height: int = HEIGHT, width: int = WIDTH, **parts: Any) -> Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": list(values)},
        "width": width,
        "height": height,
        "padding": {"left": 12, "top": 5, "right": 24, "bottom": 5},
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": CONFIG,
        **parts,
    }
