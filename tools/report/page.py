"""`render_report`: the whole page of one or several runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from podembed.tools.report import charts, markup, sections, vega
from podembed.tools.report.curves import Curve, curves_of
from podembed.tools.report.differences import differences
from podembed.tools.report.markup import Html, data, element, figure, folded, join, table
from podembed.tools.report.material import Material
from podembed.tools.report.style import SCRIPT, STYLE
from podembed.tools.report.time_line import ROWS, marks_of
from podembed.tools.report.times import date_and_time

# Nothing is loaded, whatever text a run may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_MOST_PHASES = charts.NUM_COLOURS - 1


class Page:
    """A report in the making. Mutated: the charts that it has so far.

    Args:
      materials: one of each run, under different names.
    """

    def __init__(self, materials: Sequence[Material]) -> None:
        self._materials = materials
        self._specs: dict[str, dict[str, Any]] = {}

    def render(self, *, version: str, now_unix_s: float) -> str:
        """The whole page."""
        names = [material.name for material in self._materials]
        title = names[0] if len(names) == 1 else f"{len(names)} runs side by side"
        body = [
            element("a", "To the curves", href="#curves", class_="skip"),
            element(
                "header",
                element("h1", title),
                element(
                    "p", f"Made by podembed {version} at {date_and_time(now_unix_s)}. All times are UTC.", class_="note"
                ),
                *self._notes(),
                self._contents(),
            ),
            element("main", *self._main()),
        ]
        scripts = [
            element("script", data(self._specs), type="application/json", id="charts"),
            element("script", Html(f"(function () {{{vega.programs()}\n}})();")),
            element("script", Html(SCRIPT)),
        ]
        head = [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Html('<link rel="icon" href="data:,">'),
            element("title", f"{title} – podembed report"),
            element("style", Html(STYLE)),
        ]
        page = element("html", element("head", *head), element("body", *body, *scripts), lang="en")
        return f"<!doctype html>\n{page}\n"

    def _notes(self) -> Iterator[Html]:
        for material in self._materials:
            for note in material.notes():
                said = note if len(self._materials) == 1 else f"{material.name}: {note}"
                yield element("p", said, class_="warning", role="note")

    def _contents(self) -> Html:
        links = [("overview", "Overview"), ("curves", "Curves")]
        links += [(f"run-{at}", material.name) for at, material in enumerate(self._materials, 1)]
        items = [element("li", element("a", text, href=f"#{target}")) for target, text in links]
        buttons = [
            element("button", text, type="button", hidden=True, data_fold=fold)
            for fold, text in (("open", "Unfold all"), ("close", "Fold all"))
        ]
        return element("nav", element("ul", *items, *(element("li", one) for one in buttons)), aria_label="Contents")

    def _main(self) -> Iterator[Html]:
        yield element("section", element("h2", "Overview"), self._overview(), *self._differences(), id="overview")
        curves = curves_of(self._materials)
        yield element("section", element("h2", "Curves"), *self._curves(curves), id="curves")
        for at, material in enumerate(self._materials, 1):
            yield element("section", element("h2", material.name), *self._run(material, f"run-{at}"), id=f"run-{at}")

    def _overview(self) -> Html:
        outcomes = [dict(sections.outcome(material)) for material in self._materials]
        rows: dict[str, None] = {}
        for outcome in outcomes:
            rows |= dict.fromkeys(outcome)
        body = [(row, *(outcome.get(row, "–") for outcome in outcomes)) for row in rows]
        shown = table("How it stands", ["figure", *(material.name for material in self._materials)], body)
        return element("div", shown, class_="overview")

    def _differences(self) -> Iterator[Html]:
        if len(self._materials) < 2:
            return
        yield element("h3", "What differs")
        rows = differences(self._materials)
        if not rows:
            yield element(
                "p",
                "Nothing of what runs record: neither job, arguments and tables, nor data files, hosts and versions.",
            )
            return
        yield sections.left_out(len(rows))
        head = ["what", *(material.name for material in self._materials)]
        shown = table("Of the job, its data, hosts and versions", head, rows[: sections.MOST_ROWS], numbers=False)
        yield element("div", shown, class_="differences")

    def _curves(self, curves: Sequence[Curve]) -> Iterator[Html]:
        if not curves:
            yield element("p", "There is nothing to draw yet.")
            return
        yield element(
            "p",
            "Drag a curve to move along the steps, and turn the wheel with the shift key to zoom. "
            "The buttons do the same.",
            class_="note hint",
        )
        main = [self._curve(curve, "h3") for curve in curves if curve.is_main]
        others = [self._curve(curve, "h4") for curve in curves if not curve.is_main]
        yield element("div", *main, class_="charts")
        if others:
            heading = element("h3", f"More curves ({len(others)})")
            yield folded(heading, element("div", *others, class_="charts"), class_="part")

    def _curve(self, curve: Curve, heading: str) -> Html:
        rows = [(f"{step:,}", *map(figure, values)) for step, values in curve.rows()]
        return self._figure(
            curve.key,
            charts.curve_chart(curve),
            heading=element(heading, curve.title),
            words=curve.described(),
            caption=curve.meaning,
            values=table(f"{curve.title} at some steps", ["step", *curve.lines], rows),
            legend=charts.line_keys(list(curve.lines)) if len(curve.lines) > 1 else (),
            zooms="step",
        )

    def _figure(
        self,
        key: str,
        spec: dict[str, Any],
        *,
        heading: Html,
        words: str,
        caption: str,
        values: Html | None,
        legend: Sequence[charts.Key] = (),
        zooms: str = "",
        is_wide: bool = False,
    ) -> Html:
        self._specs[key] = spec
        buttons = [
            element("button", text, type="button", data_act=act)
            for act, text in (("in", "Zoom in"), ("out", "Zoom out"), ("all", "Show all"))
        ]
        return element(
            "figure",
            heading,
            element("figcaption", caption) if caption else "",
            element("div", Html(vega.drawn(spec)), class_="chart", role="img", aria_label=words),
            markup.legend([(key.name, key.colour, key.dash) for key in legend]) if legend else "",
            element("div", *buttons, class_="zoom", hidden=True, data_field=zooms) if zooms else "",
            folded("Values as a table", values) if values is not None else "",
            id=key,
            class_="drawn wide" if is_wide else "drawn",
        )

    def _run(self, material: Material, key: str) -> Iterator[Html]:
        parts: list[tuple[str, Callable[[], object]]] = [
            ("What was trained", lambda: sections.pairs(sections.facts(material))),
            ("Health", lambda: sections.alarms_table(material)),
            ("Time by phase and host", lambda: join(self._time(material, key))),
            ("Faults and recoveries", lambda: join(self._faults(material, key))),
            ("Commits", lambda: sections.commits_table(material)),
            ("Tables", lambda: sections.tables_table(material)),
            ("Data", lambda: join(sections.data_parts(material))),
            ("Environment", lambda: sections.environment(material)),
            ("Resume, serve, reproduce", lambda: join(sections.command_parts(material))),
        ]
        for title, content in parts:
            yield folded(element("h3", title), content(), is_open=True, class_="part")

    def _time(self, material: Material, key: str) -> Iterator[Html]:
        times = sections.phase_times(material)
        if not times:
            yield element("p", "Without measurements, the time of phases is not known.")
            return
        totals: dict[str, float] = {}
        for phases in times.values():
            for phase, seconds in phases.items():
                totals[phase] = totals.get(phase, 0.0) + seconds
        phases = sorted(totals, key=lambda phase: -totals[phase])
        shown = phases[:_MOST_PHASES] if len(phases) > charts.NUM_COLOURS else phases
        rest = "other phases"
        rows = []
        for host, of_host in times.items():
            rows += [(f"host {host}", phase, of_host[phase]) for phase in shown if phase in of_host]
            left = sum(seconds for phase, seconds in of_host.items() if phase not in shown)
            rows += [(f"host {host}", rest, left)] if left else []
        parts = [*shown, rest] if len(shown) < len(phases) else shown
        longest = phases[0]
        yield self._figure(
            f"{key}-phases",
            charts.bars_chart(rows, title="seconds in all", parts=parts),
            heading=element("h4", "Seconds of each phase"),
            words=f"Seconds of each phase on {len(times)} hosts. The longest is {longest}, "
            f"{totals[longest] / sum(totals.values()):.0%} of the time.",
            caption="Of steps that count. Phases that wait for hosts or the device are waiting, not work.",
            values=table(
                "Seconds of each phase",
                ["phase", *(f"host {host}" for host in times)],
                [(phase, *(figure(of_host.get(phase, 0.0)) for of_host in times.values())) for phase in phases],
            ),
            legend=charts.part_keys(parts),
            is_wide=True,
        )
        yield sections.waited_table(material)

    def _faults(self, material: Material, key: str) -> Iterator[Html]:
        marks = marks_of(material)
        if marks:
            counts = {row: sum(mark["row"] == row for mark in marks) for row in ROWS}
            rows = [row for row in ROWS if counts[row]]
            told = ", ".join(f"{row} {counts[row]}" for row in rows)
            yield self._figure(
                f"{key}-time-line",
                charts.time_line_chart(marks, rows),
                heading=element("h4", "Time line"),
                words=f"Events of the run over time: {told}. The tables below have them in words.",
                caption="Point at a mark for its words. The length of a recovery is the time that it took.",
                values=None,
                zooms="from",
                is_wide=True,
            )
        yield sections.faults_table(material)
        yield sections.events_table(material)


def render_report(materials: Sequence[Material], *, version: str, now_unix_s: float) -> str:
    """One HTML page that needs nothing besides itself.

    Args:
      materials: of each run, in the order in which they are shown.

    Raises:
      ConfigurationError: the package that draws is not installed.
    """
    return Page(materials).render(version=version, now_unix_s=now_unix_s)
