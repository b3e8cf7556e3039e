"""Tables that collapse, whose rows jump or stand still, and rows that no sample ever names.

Hosts look at samples of their rows from time to time, and the last three looks must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from podembed.orchestrator.metrics.point import Point
from podembed.tools.health.alarms import Finding
from podembed.tools.health.detector import Standing, is_window, shortened

LOOKS = 3
LEAST_STEPS = 200
"""Rows that begin at zero all take the same way at first."""
COLLAPSED_BEGINS, COLLAPSED_ENDS = 1.5, 2.0
"""Rows of healthy tables have an effective rank of more than half their width, of 8 or more."""
JUMPS_BEGINS, JUMPS_ENDS = 0.5, 0.3
FAR_BEGINS, FAR_ENDS = 2.0, 1.0
"""The tenth of the rows that change most. Where rates are right, rows that are trained change by hundredths."""
GROWN_BEGINS, GROWN_ENDS = 8.0, 6.0
"""The tenth of the rows that grew most. Adaptive rules make large steps at first, and then rows are as large as steps.
On generated clicks such rows grew to 2.6 times at most where rates were right. They grew to 5 times at tenfold rates,
and to 25 times at hundredfold ones.
"""
NEARLY_ALL = 0.9
"""The second and third updates of rows that began at zero may be as large. So few may be new."""
STANDS_STILL = 1e-8
"""A float32 number does not change by less than 6e-8 of itself."""
NEVER_BEGINS, NEVER_ENDS = 0.5, 0.6
GROWS = 0.01
NEVER_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a point says of one table. None where it does not say it.

    Attributes:
      jumps, most: the median and the nine tenths quantile of the change of a row by a step over its norm.
      grown: the nine tenths quantile of a row's norm over that of its first values.
    """

    step: int
    rank: float | None
    jumps: float | None
    most: float | None
    grown: float | None
    updated: float | None
    trained: float | None


class TableHealth:
    """Follows each table from look to look."""

    alarms = frozenset({"table_collapses", "table_rate_too_high", "table_not_training", "rows_never_train"})

    def __init__(self) -> None:
        self._looks: Mapping[str, tuple[Look, ...]] = {}

    def take(self, point: Point, standing: Standing) -> Sequence[Finding] | None:
        """As `Detector.take`."""
        looks = _looks(point) if is_window(point) else {}
        if not looks:
            return None
        self._looks = {
            **self._looks,
            **{table: (*self._looks.get(table, ()), one)[-LOOKS:] for table, one in looks.items()},
        }
        found = [
            finding
            for table, last in self._looks.items()
            if len(last) == LOOKS and last[0].step >= LEAST_STEPS
            for finding in _found(table, last, standing)
        ]
        return shortened(found, standing, what="table")


def _looks(point: Point) -> dict[str, Look]:
    ranks = point.by_label("table_effective_rank", "table")
    trained = point.by_label("table_trained_ratio", "table")
    updated = point.by_label("table_updated_rows", "table")
    changes = _quantiles(point, "table_update_ratio")
    growth = _quantiles(point, "table_row_growth")
    return {
        table: Look(
            step=point.step,
            rank=ranks.get(table),
            jumps=changes.get((table, "0.5")),
            most=changes.get((table, "0.9")),
            grown=growth.get((table, "0.9")),
            updated=updated.get(table),
            trained=trained.get(table),
        )
        for table in dict.fromkeys([*trained, *ranks, *updated, *(table for table, _ in [*changes, *growth])])
    }


def _quantiles(point: Point, name: str) -> dict[tuple[str, str], float]:
    """By table and quantile."""
    return {(one.labels["table"], one.labels["quantile"]): one.value for one in point.each(name, "table", "quantile")}


def _found(table: str, looks: Sequence[Look], standing: Standing) -> Iterator[Finding]:
    first, last = looks[0], looks[-1]

    def found(alarm: str, text: str) -> Finding:
        return Finding(alarm=alarm, subject=f"table {table}", text=text)

    def limit(alarm: str, begins: float, ends: float) -> float:
        return ends if (alarm, f"table {table}") in standing else begins

    ranks = _known(looks, "rank")
    if max(ranks, default=math.inf) < limit("table_collapses", COLLAPSED_BEGINS, COLLAPSED_ENDS):
        yield found(
            "table_collapses",
            f"the rows of table {table} point nearly the same way: their effective rank was {ranks[0]:.2f} at step "
            f"{first.step} and is {ranks[-1]:.2f} at step {last.step}",
        )
    jumps, most = _known(looks, "jumps"), _known(looks, "most")
    is_old = all(one.trained is None or one.trained >= NEARLY_ALL for one in looks)
    if (
        is_old
        and min(jumps, default=0.0) >= limit("table_rate_too_high", JUMPS_BEGINS, JUMPS_ENDS)
        and min(most, default=0.0) >= limit("table_rate_too_high", FAR_BEGINS, FAR_ENDS)
    ):
        yield found(
            "table_rate_too_high",
            f"a step changes half of the rows of table {table} that it updates by {jumps[-1]:.0%} of their norm or "
            f"more, and a tenth of them by {most[-1]:.0%} or more, at step {last.step} as in the looks before",
        )
    elif min(grown := _known(looks, "grown"), default=0.0) >= limit("table_rate_too_high", GROWN_BEGINS, GROWN_ENDS):
        yield found(
            "table_rate_too_high",
            f"a tenth of the rows of table {table} have grown to {min(grown):.0f} times their first norm or more, at "
            f"step {last.step} as in the looks before",
        )
    if (text := _stands_still(table, looks)) is not None:
        yield found("table_not_training", text)
        return
    shares = _known(looks, "trained")
    few = limit("rows_never_train", NEVER_BEGINS, NEVER_ENDS)
    if shares and last.step >= NEVER_STEPS and shares[-1] < few and shares[-1] - shares[0] < GROWS:
        yield found(
            "rows_never_train",
            f"{shares[-1]:.0%} of the rows of table {table} were ever updated up to step {last.step}, and hardly any "
            f"for the first time since step {first.step}",
        )


def _stands_still(table: str, looks: Sequence[Look]) -> str | None:
    first, last = looks[0].step, looks[-1].step
    if all(one.updated == 0 and one.trained == 0 for one in looks):
        return f"no step at which hosts looked updated a row of table {table}, from step {first} to {last}"
    # Where each step updates all rows, most may rest.
    updated = _known(looks, "updated")
    if min(updated, default=0) > 0 and max(_known(looks, "most"), default=1.0) < STANDS_STILL:
        return f"the rows of table {table} that a step updates do not change, from step {first} to {last}"
    return None


def _known(looks: Sequence[Look], name: str) -> list[float]:
    """A figure of all looks; nothing where one of them does not have it."""
    values = [getattr(one, name) for one in looks]
    return [] if None in values else values
