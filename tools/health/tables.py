"""Tables whose rows grow too far, and rows that no sample ever names.

Hosts take norms of samples of their rows from time to time, and the last three must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.detector import Standing, is_window, shortened
from podembed.tools.metrics.point import Point

LOOKS = 3
LEAST_STEPS = 200
"""Rows that begin at zero make their largest steps first."""
GROWN_BEGINS, GROWN_ENDS = 8.0, 6.0
"""The tenth of the rows that grew most. Adaptive rules make large steps at first, and then rows are as large as steps.
On generated clicks such rows grew to 2.6 times at most where rates were right. They grew to 5 times at tenfold rates,
and to 25 times at hundredfold ones.
"""
NEVER_BEGINS, NEVER_ENDS = 0.5, 0.6
GROWS = 0.01
NEVER_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReading:
    """What a point says of one table. None where it does not say it.

    Attributes:
      grown: the nine tenths quantile of a row's norm over that of its first values.
      trained: share of the rows that were ever updated.
    """

    step: int
    grown: float | None
    trained: float | None


class TableHealth:
    """Follows each table from look to look."""

    alarms = frozenset({"table_rate_too_high", "rows_never_train"})

    def __init__(self) -> None:
        self._looks: Mapping[str, tuple[TableReading, ...]] = {}

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
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


def _looks(point: Point) -> dict[str, TableReading]:
    trained = point.by_label("table_trained_ratio", "table")
    growth = point.each("table_row_growth", "table", "quantile")
    grown = {one.labels["table"]: one.value for one in growth if one.labels["quantile"] == "0.9"}
    return {
        table: TableReading(step=point.step, grown=grown.get(table), trained=trained.get(table))
        for table in dict.fromkeys([*trained, *grown])
    }


def _found(table: str, looks: Sequence[TableReading], standing: Standing) -> Iterator[StandingAlarm]:
    first, last = looks[0], looks[-1]

    def found(alarm: str, text: str) -> StandingAlarm:
        return StandingAlarm(alarm=alarm, subject=f"table {table}", text=text)

    def limit(alarm: str, begins: float, ends: float) -> float:
        return ends if (alarm, f"table {table}") in standing else begins

    # Nothing is said of a figure that one of the looks does not have.
    grown = [one.grown for one in looks if one.grown is not None]
    if len(grown) == LOOKS and min(grown) >= limit("table_rate_too_high", GROWN_BEGINS, GROWN_ENDS):
        yield found(
            "table_rate_too_high",
            f"a tenth of the rows of table {table} have grown to {min(grown):.0f} times their first norm or more, at "
            f"step {last.step} as in the looks before",
        )
    shares = [one.trained for one in looks if one.trained is not None]
    few = limit("rows_never_train", NEVER_BEGINS, NEVER_ENDS)
    if len(shares) == LOOKS and last.step >= NEVER_STEPS and shares[-1] < few and shares[-1] - shares[0] < GROWS:
        yield found(
            "rows_never_train",
            f"{shares[-1]:.0%} of the rows of table {table} were ever updated up to step {last.step}, and hardly any "
            f"for the first time since step {first.step}",
        )
