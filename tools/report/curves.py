"""Curves of one or several runs: which are drawn, their lines, and their values as a table. Nothing is drawn here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.text import printable
from podembed.tools.metrics.catalog import CATALOG
from podembed.tools.report.material import Material

MOST_POINTS = 600
"""Most points of a line. A longer one keeps the lowest and the highest value of each piece."""
MOST_ROWS = 100
"""Most rows of a curve's table."""
MOST_LINES = 12
"""Most lines of a curve, for each run."""
# Where the run stands, and what other parts of the report show.
_NOT_DRAWN = {
    "step",
    "steps_planned",
    "generation",
    "committed_step",
    "left_seconds",
    "reachable_auc",
    "evaluation_order",
    "malformed_rows",
    "recovery_seconds",
}
_MAIN = ("loss", "samples_per_second", "goodput_ratio", "step_seconds")
_EVALUATION = "evaluation"
_BEST = "best reachable"
_FIGURES = {"auc": "AUC", "log_loss": "Log loss"}
# Parts of names of learning curves: they stand beside the loss.
_LEARNING = ("auc", "entropy", "calibration", "gradient", "learning_rate", "update_norm")
# But not these, of which another one says more.
_ASIDE = {"window_auc_error", "dense_largest_gradient_norm"}

Line = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Lines over steps.

    Attributes:
      key: unique in a report; letters, figures and hyphens.
      lines: lines by name, each by growing steps.
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
    series = [_series(material) for material in materials]
    labels_of: defaultdict[str, set[str]] = defaultdict(set)
    for name, labels in (key for of_run in series for key in of_run):
        labels_of[name].add(labels)
    lines: defaultdict[tuple[str, str], dict[str, Line]] = defaultdict(dict)
    for material, of_run in zip(materials, series, strict=True):
        for (name, labels), line in of_run.items():
            figure = labels if name == _EVALUATION else ""
            # A label that all lines have, such as that of the only host, tells none of them apart.
            parts = [material.name] if len(materials) > 1 or len(labels_of[name]) == 1 or figure else []
            parts += [labels] if len(labels_of[name]) > 1 and not figure else []
            lines[name, figure][printable(", ".join(parts))] = line
    if (_EVALUATION, "auc") in lines:
        lines[_EVALUATION, "auc"] |= _reachable(materials, list(lines[_EVALUATION, "auc"].values()))
    found = [_curve(name, figure, lines[name, figure]) for name, figure in sorted(lines, key=_order)]
    # A series that was seen once is no curve, unless it is what a reader looks for first.
    return [curve for curve in found if curve.is_main or max(map(len, curve.lines.values())) > 1]


def evaluations_of(material: Material) -> dict[str, Line]:
    """The evaluations of a run by metric, each by growing steps, without a loss that repeats the log loss."""
    return {figure: line for (name, figure), line in _series(material).items() if name == _EVALUATION}


def _reachable(materials: Sequence[Material], evaluations: Sequence[Line]) -> dict[str, Line]:
    """Level lines of the best AUC that any model can reach, one where that is the same in all runs."""
    steps = [step for line in evaluations for step, _ in line]
    known = {material.name: material.last("reachable_auc") for material in materials}
    values = {name: value for name, value in known.items() if value is not None}
    is_one = len(set(values.values())) == 1
    return {
        _BEST if is_one else printable(f"{name}, {_BEST}"): [(step, value) for step in sorted({min(steps), max(steps)})]
        for name, value in values.items()
    }


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
    return name not in _ASIDE and any(part in name for part in _LEARNING)


def _curve(name: str, figure: str, lines: dict[str, Line]) -> Curve:
    metric = CATALOG.get(name)
    title = (_FIGURES.get(figure, worded(figure)) + " of evaluations") if name == _EVALUATION else worded(name)
    return Curve(
        key="curve-" + "".join(c if c.isalnum() and c.isascii() else "-" for c in f"{name}-{figure}".strip("-")),
        title=title,
        meaning=metric.meaning.replace("`", "") if metric and name != _EVALUATION else "",
        unit=metric.unit if metric else "",
        lines=lines,
        is_main=name in _MAIN or name == _EVALUATION or (_is_learning(name) and len(lines) <= MOST_LINES),
    )


def worded(name: str) -> str:
    """A name of a series as words."""
    words = name.removesuffix("_ratio").replace("_", " ").replace("auc", "AUC")
    return words[:1].upper() + words[1:]


def within(name: str) -> str:
    """The same within a sentence."""
    words = worded(name)
    return words if words.startswith("AUC") else words[:1].lower() + words[1:]
