"""`Detector`: what all detectors are, and means that several of them need."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from podembed.orchestrator.api.text import plural
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.metrics.point import Point

Standing = Collection[tuple[str, str]]
"""Keys of the findings that stood before."""


class Detector(Protocol):
    """Judges a run by its points, in their order.

    Its fields are replaced and never changed, so that a shallow copy is what it knew at a moment. Points of steps that
    a fault takes back are undone that way.

    Attributes:
      alarms: that it may find.
    """

    alarms: frozenset[str]

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """What stands after this point; None where the point changes nothing.

        Args:
          standing: what stood before. An alarm ends at a lower value than that at which it begins.
        """
        ...


MOST_NAMED = 8
"""Subjects of the same alarm that are named one by one."""


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """A window, or a pause: seconds, and numbers that belong to them by a name."""

    seconds: float
    values: dict[str, float]


def recent(spans: tuple[MeasuredSpan, ...], span: MeasuredSpan, *, least_s: float) -> tuple[MeasuredSpan, ...]:
    """With one more, and without the oldest that are not needed for so many seconds."""
    spans = (*spans, span)
    total_s, first = sum(one.seconds for one in spans), 0
    while total_s - spans[first].seconds >= least_s:
        total_s -= spans[first].seconds
        first += 1
    return spans[first:]


def total_s(spans: Sequence[MeasuredSpan]) -> float:
    """Seconds of all of them."""
    return sum(span.seconds for span in spans)


def weighted(spans: Sequence[MeasuredSpan], name: str) -> float:
    """The mean of a number, each weighted by its seconds."""
    return sum(span.seconds * span.values.get(name, 0.0) for span in spans) / max(total_s(spans), 1e-9)


def is_window(point: Point) -> bool:
    """Whether it has the measurements of a window of steps."""
    return point.step > point.first_step


def window_s(point: Point) -> float:
    """Seconds of a window."""
    return (point.value("step_seconds") or 0.0) * (point.step - point.first_step)


def shortened(found: Sequence[StandingAlarm], standing: Standing, *, what: str) -> list[StandingAlarm]:
    """At most `MOST_NAMED` of each alarm; those that stood before stay.

    Args:
      what: the alarms are about, such as `table`.
    """
    kept: list[StandingAlarm] = []
    for alarm in dict.fromkeys(one.alarm for one in found):
        alike = sorted((one for one in found if one.alarm == alarm), key=lambda one: one.key not in standing)
        if len(alike) > MOST_NAMED:
            more = f"; {plural(len(alike) - 1, f'other {what}')} have the same alarm"
            alike = [replace(one, text=one.text + more) for one in alike[:MOST_NAMED]]
        kept += alike
    return kept
