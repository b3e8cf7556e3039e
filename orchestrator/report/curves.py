"""Curves of one or several runs: which are drawn, their lines, and their values as a table. Nothing is drawn here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.text import printable
from podembed.orchestrator.metrics.catalog import CATALOG
from podembed.orchestrator.report.material import Material

MOST_POINTS = 600
"""Of a line; a longer one keeps the lowest and the highest value of each piece."""
MOST_ROWS = 100
"""Of a curve's table."""
MOST_LINES = 12
"""Of a curve, for each run."""
# Where the run stands, and what other parts of the report show.
_NOT_DRAWN = {
    "step",
    "steps_planned",
    "generation",
    "committed_step",
    "left_seconds",
    "malformed_rows",
    "recovery_seconds",
}
_MAIN = ("loss", "samples_per_second", "goodput_ratio", "step_seconds")
_EVALUATION = "evaluation"
_FIGURES = {"auc": "AUC", "log_loss": "Log loss"}
# Parts of names of learning curves: they stand beside the loss.
_LEARNING = ("auc", "entropy", "calibration", "gradient", "learning_rate", "update_norm")

Line = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Lines over steps.

    Attributes:
      key: unique in a report; letters, figures and hyphens.
      lines: by name, each by growing steps.
      is_main: whether it is shown unfolded.
    """

    key: str
    title: str
    meaning: str
    unit: str
    lines: dict[str, Line]
    is_main: bool

    def described(self) -> str:
        """The curve in words, for who cannot see it."""
        told = []
        for name, line in self.lines.items():
            values = [value for _, value in line]
            told.append(
                f"{name}: {values[0]:.4g} at step {line[0][0]}, {values[-1]:.4g} at step {line[-1][0]}, "
                f"lowest {min(values):.4g}, highest {max(values):.4g}"
            )
        return f"{self.title} over steps. {'; '.join(told)}."

    def rows(self) -> list[tuple[int, list[float | None]]]:
        """Steps and the value of each line there, at most `MOST_ROWS` of them, the last one included."""
        by_step: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for name, line in self.lines.items():
            for step, value in line:
                by_step[step][name] = value
        steps = sorted(by_step)
        stride = math.ceil(len(steps) / MOST_ROWS)
        shown = steps[:: max(1, stride)]
        if steps and shown[-1] != steps[-1]:
            shown[-1:] = [steps[-1]]
        return [(step, [by_step[step].get(name) for name in self.lines]) for step in shown]


def curves_of(materials: Sequence[Material]) -> list[Curve]:
    """All curves that any of the runs has, the main ones first."""
    lines: defaultdict[tuple[str, str], dict[str, Line]] = defaultdict(dict)
    for material in materials:
        for (name, labels), line in _series(material).items():
            figure = labels if name == _EVALUATION else ""
            labels = printable(labels)
            label = printable(material.name if not labels or figure else f"{material.name}, {labels}")
            lines[name, figure][label if len(materials) > 1 or not labels or figure else labels] = line
    found = [_curve(name, figure, lines[name, figure]) for name, figure in sorted(lines, key=_order)]
    return [curve for curve in found if curve.lines]


def _series(material: Material) -> dict[tuple[str, str], Line]:
    """By name and value of the only label, which is empty where there is none."""
    found: defaultdict[tuple[str, str], Line] = defaultdict(list)
    for step, one in material.measurements():
        metric = CATALOG.get(one.name)
        is_drawn = one.name not in _NOT_DRAWN and len(one.labels) <= 1 and (metric is None or metric.kind == "gauge")
        if is_drawn and math.isfinite(one.value):
            ((label, value),) = one.labels.items() or [("", "")]
            found[one.name, f"{label} {value}" if label and one.name != _EVALUATION else value].append(
                (step, one.value)
            )
    _add_history(material, found)
    if found.get((_EVALUATION, "loss")) == found.get((_EVALUATION, "log_loss")):
        found.pop((_EVALUATION, "loss"), None)
    return {key: thinned(sorted(line)) for key, line in _most_of(found).items()}


def _add_history(material: Material, found: defaultdict[tuple[str, str], Line]) -> None:
    """What the history has of steps for which there are no measurements."""
    history = material.description.history
    if history is None:
        return
    known = {key: {step for step, _ in line} for key, line in found.items()}
    for window in history.windows:
        for name, value in (("loss", window.loss), ("samples_per_second", window.samples_per_s)):
            if window.step not in known.get((name, ""), ()) and not known.get((name, "")) and math.isfinite(value):
                found[name, ""].append((window.step, value))
    for made in history.evaluations:
        for name, value in made.metrics.items():
            if made.step not in known.get((_EVALUATION, name), ()):
                found[_EVALUATION, name].append((made.step, value))


def _most_of(found: dict[tuple[str, str], Line]) -> dict[tuple[str, str], Line]:
    """Without the smaller lines of a curve that has too many."""
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for name, label in found:
        by_name[name].append(label)
    kept = {}
    for name, labels in by_name.items():
        largest = sorted(labels, key=lambda label: -max(value for _, value in found[name, label]))
        for label in labels:
            if name == _EVALUATION or label in largest[:MOST_LINES]:
                kept[name, label] = found[name, label]
    return kept


def thinned(line: Line) -> Line:
    """At most `MOST_POINTS` points, with the extremes of each piece, so that no peak is lost."""
    if len(line) <= MOST_POINTS:
        return line
    size = math.ceil(2 * len(line) / MOST_POINTS)
    kept: set[tuple[int, float]] = {line[0], line[-1]}
    for at in range(0, len(line), size):
        piece = line[at : at + size]
        kept |= {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])}
    return sorted(kept)


def _order(key: tuple[str, str]) -> tuple[int, int, str, str]:
    name, figure = key
    if name == "loss":
        return (0, 0, "", "")
    if name == _EVALUATION:
        return (0, 1, "" if figure == "auc" else figure, "")
    if _is_learning(name):
        return (0, 2, name, figure)
    return (1, _MAIN.index(name), "", "") if name in _MAIN else (2, 0, name, figure)


def _is_learning(name: str) -> bool:
    return any(part in name for part in _LEARNING)


def _curve(name: str, figure: str, lines: dict[str, Line]) -> Curve:
    metric = CATALOG.get(name)
    title = (_FIGURES.get(figure, worded(figure)) + " of evaluations") if name == _EVALUATION else worded(name)
    return Curve(
        key="curve-" + "".join(c if c.isalnum() and c.isascii() else "-" for c in f"{name}-{figure}".strip("-")),
        title=title,
        meaning=metric.meaning if metric and name != _EVALUATION else "",
        unit=metric.unit if metric else "",
        lines=lines,
        is_main=name in _MAIN or name == _EVALUATION or (_is_learning(name) and len(lines) <= MOST_LINES),
    )


def worded(name: str) -> str:
    """A name of a series as words."""
    words = name.removesuffix("_ratio").replace("_", " ").replace("auc", "AUC")
    return words[:1].upper() + words[1:]
