"""`StreamReader`: reads a run's stream back, also while it is written. It never changes anything.

Points whose steps a fault took back are left out. They are of an earlier generation, and end after the step at which a
later one begins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from podembed.orchestrator.run.history import Window, median_samples_per_s
from podembed.tools.metrics.point import POINT, Point, StreamLine, point_of
from podembed.tools.metrics.segments import MOST_SEGMENT_BYTES, SegmentName, list_segments
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store

_READS = 5  # of a folder whose segments are merged meanwhile

FAULTS = (
    "generation_lost",
    "recovery",
    "hosts_changed",
    "hosts_awaited",
    "save_failed",
    "commit_lost",
    "storage_awaited",
    "host_slow",
    "alarm_began",
    "machine_rests",
)
"""Kinds of events that say that something went wrong. Who shows faults may add to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStream:
    """A run's stream at one moment.

    Attributes:
      points: points that count, by (generation, step).
      lost: points of steps that a fault took back.
      events: all lines that are no points, in the order in which they were written.
      num_drivers: number of drivers that wrote it.
      num_unread: lines that are damaged or of an unknown kind; they are left out.
    """

    points: tuple[Point, ...]
    lost: tuple[Point, ...]
    events: tuple[StreamLine, ...]
    num_drivers: int
    num_unread: int = 0

    @property
    def windows(self) -> tuple[Point, ...]:
        """The points of windows of steps."""
        return tuple(point for point in self.points if point.step > point.first_step)

    @property
    def median_samples_per_s(self) -> float | None:
        """As the summary of a call has it, over all drivers; None without a window that has a rate."""
        found = []
        for point in self.windows:
            rate, step_s = point.value("samples_per_second"), point.value("step_seconds")
            if rate is not None and step_s is not None and math.isfinite(rate * step_s):
                seconds = step_s * (point.step - point.first_step)
                found.append(
                    Window(
                        generation=point.generation,
                        first_step=point.first_step,
                        step=point.step,
                        loss=point.value("loss") or math.nan,
                        num_samples=round(rate * seconds),
                        seconds=seconds,
                    )
                )
        return median_samples_per_s(found) if found else None

    def series(self, name: str, **labels: str) -> list[tuple[int, float]]:
        """Step and value of all points that have it."""
        found = ((point.step, point.value(name, **labels)) for point in self.points)
        return [(step, value) for step, value in found if value is not None]


@dataclass(slots=True)
class StreamReader:
    """See the module. Mutated: what it has read; segments never change, so each is read once."""

    store: Store
    _read: dict[SegmentName, tuple[list[tuple[int, StreamLine]], int]] = field(default_factory=dict)

    def read(self) -> RunStream:
        """The stream as it is now. Empty for a run without measurements.

        Raises:
          StorageError: the storage does not answer.
        """
        for attempt in range(_READS):
            names = list_segments(self.store)
            self._read = {name: found for name, found in self._read.items() if name in names}
            try:
                for name in names:
                    if name not in self._read:
                        self._read[name] = _lines(self.store, name)
                break
            except NameNotFound:
                # Its driver has merged it in between.
                if attempt == _READS - 1:
                    raise
        lines: dict[tuple[str, int], StreamLine] = {}
        for name, (numbered, _) in sorted(self._read.items()):
            for number, line in numbered:
                lines[name.driver, number] = line
        places = _places(lines)
        ordered = [lines[key] for key in sorted(lines, key=lambda key: (places[key[0]], key[1]))]
        points = [line.point for line in ordered if line.point is not None]
        counted, lost = without_lost(points)
        return RunStream(
            points=tuple(counted),
            lost=tuple(lost),
            events=tuple(line for line in ordered if line.point is None),
            num_drivers=len({driver for driver, _ in lines}),
            num_unread=sum(unread for _, unread in self._read.values()),
        )


def _places(lines: Mapping[tuple[str, int], StreamLine]) -> dict[str, int]:
    """The number of drivers before each driver. Clocks of machines differ, so generations decide; one that trained
    nothing stays behind the one that its clock names.
    """
    firsts: dict[str, int] = {}
    for (driver, _), line in lines.items():
        if line.point is not None and line.point.step > line.point.first_step:
            firsts[driver] = min(line.point.generation, firsts.get(driver, line.point.generation))
    keys, newest = {}, 0
    for driver in sorted({driver for driver, _ in lines}):
        newest = firsts.get(driver, newest)
        keys[driver] = (newest, driver)
    return {driver: place for place, driver in enumerate(sorted(keys, key=lambda driver: keys[driver]))}


def without_lost(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points that count, and those of steps that a later generation did again. Both keep their order."""
    counted: list[Point] = []
    lost: list[Point] = []
    newest = -1
    for point in points:
        # Not compared with the point before: that of a late commit has a step of long ago.
        if point.generation > newest:
            newest = point.generation
            lost += [one for one in counted if one.step > point.first_step]
            counted = [one for one in counted if one.step <= point.first_step]
        counted.append(point)
    return counted, lost


def _lines(store: Store, name: SegmentName) -> tuple[list[tuple[int, StreamLine]], int]:
    """Numbered lines of a segment, and how many could not be read."""
    found, unread = [], 0
    for text in store.read(name.path, max_bytes=MOST_SEGMENT_BYTES).splitlines():
        try:
            found += _line(text)
        except (ValueError, TypeError, KeyError, AttributeError):
            unread += 1
    return found, unread


def _line(text: bytes) -> Iterator[tuple[int, StreamLine]]:
    document = json.loads(text)
    number, kind, unix_s = int(document["number"]), str(document["kind"]), float(document["unix_s"])
    if kind == POINT:
        point = point_of(document, unix_s=unix_s)
        yield number, StreamLine(kind=kind, unix_s=unix_s, values={}, point=point)
    else:
        yield (
            number,
            StreamLine(
                kind=kind,
                unix_s=unix_s,
                values=dict(document["values"]),
                text=str(document["text"]),
                level=str(document.get("level", "info")),
            ),
        )
