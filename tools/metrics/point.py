"""`Point`: what was measured at one moment of a run, and `StreamLine`, as which points and events are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from podembed.tools.metrics.catalog import CATALOG, MetricSeries

# The kind of a line that is no event.
POINT = "point"

NO_LABELS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number.

    Attributes:
      name: name of a `MetricSeries` in the catalog.
      labels: all labels of that metric.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def metric(self) -> MetricSeries:
        return CATALOG[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Measurements of one moment.

    Attributes:
      generation: generation of the driver at that moment; with `step` the key of the point.
      first_step, step: steps done before what was measured, and after it. A later generation that begins before `step`
        takes the point back.
      unix_s: when.
    """

    generation: int
    first_step: int
    step: int
    unix_s: float
    measurements: tuple[Measurement, ...]

    def value(self, name: str, **labels: str) -> float | None:
        """The number of that name with exactly these labels; None if it was not measured."""
        for one in self.measurements:
            if one.name == name and one.labels == labels:
                return one.value
        return None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """All numbers of that name, by the value of one of its labels. Those of other versions may lack it."""
        return {one.labels[label]: one.value for one in self.measurements if one.name == name and label in one.labels}

    def each(self, name: str, *labels: str) -> Iterator[Measurement]:
        """All of that name that have these labels."""
        return (one for one in self.measurements if one.name == name and all(label in one.labels for label in labels))

    def to_json(self) -> dict[str, Any]:
        """As a line of the stream has it. Numbers that are not finite are null."""
        values = [
            [one.name, one.value if math.isfinite(one.value) else None, *([dict(one.labels)] if one.labels else [])]
            for one in self.measurements
        ]
        return {
            "generation": self.generation,
            "first_step": self.first_step,
            "step": self.step,
            "values": values,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLine:
    """One line of a run's stream: a point, or an event.

    Attributes:
      kind: `point`, or the kind of the event.
      unix_s: when.
      values: values of the event, or of a point as `Point.to_json`.
      text: the event's sentence, for people.
      level: level of the event.
      point: where it is one.
    """

    kind: str
    unix_s: float
    values: Mapping[str, Any]
    text: str = ""
    level: str = "info"
    point: Point | None = None


def point_of(values: Mapping[str, Any], *, unix_s: float) -> Point:
    """What `Point.to_json` wrote. Measurements of versions with other names stay readable.

    Raises:
      KeyError, TypeError, ValueError: it is none.
    """
    measurements = []
    for name, value, *labels in values["values"]:
        number = math.nan if value is None else float(value)
        by_name = {str(key): str(text) for key, text in labels[0].items()} if labels else NO_LABELS
        measurements.append(Measurement(str(name), number, by_name))
    return Point(
        generation=int(values["generation"]),
        first_step=int(values["first_step"]),
        step=int(values["step"]),
        unix_s=unix_s,
        measurements=tuple(measurements),
    )
