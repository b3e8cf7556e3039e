"""`Html` and the few elements of the report. What is not `Html` is escaped, so no text of a run becomes markup."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def markup(value: object) -> Html:
    """Anything as markup: as it is where it is `Html`, else escaped."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(parts: Iterable[object], separator: str = "\n") -> Html:
    return Html(separator.join(markup(part) for part in parts))


def element(name: str, *content: object, **attributes: object) -> Html:
    """One element. A trailing underscore of an attribute's name is dropped, and others become hyphens. False and None
    leave the attribute out.
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{given}>{join(content, '')}</{name}>")


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = True) -> Html:
    """A table that scrolls within the page where it is too wide. The first cell of a row is its heading.

    Args:
      numbers: whether the other columns are figures, which are aligned to the right.
    """
    kind = "figures" if numbers else "words"
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell) for cell in row[1:]),
        )
        for row in rows
    ]
    inner = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *(element("th", name, scope="col") for name in head))),
        element("tbody", *body),
        class_=kind,
    )
    return element("div", inner, class_="scroll", tabindex="0", role="group", aria_label=caption)


def pairs(items: Iterable[tuple[str, object]]) -> Html:
    """Names and what they are."""
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in items))


def folded(summary: object, *content: object, is_open: bool = False, **attributes: object) -> Html:
    return element("details", element("summary", summary), *content, open=is_open, **attributes)


def legend(keys: Sequence[tuple[str, str, Sequence[int]]]) -> Html:
    """Names beside what they look like in a chart.

    Args:
      keys: name, colour, and lengths of strokes and gaps of a line; these are empty for a filled area.
    """
    items = []
    for name, colour, dash in keys:
        line = {"stroke_width": 2, "stroke_dasharray": " ".join(map(str, dash))} if dash else {"stroke_width": 12}
        drawn = element("line", x1=0, y1=6, x2=28 if dash else 12, y2=6, stroke=colour, **line)
        picture = element("svg", drawn, width=28 if dash else 12, height=12, aria_hidden="true")
        items.append(element("li", picture, " ", name))
    return element("ul", *items, class_="legend")


def command(line: str) -> Html:
    return element("pre", element("code", line), tabindex="0")


def data(document: Any) -> Html:
    """JSON for a script element, which no text in it can close."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def figure(value: float | None) -> str:
    """A number with few digits; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
