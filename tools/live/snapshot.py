"""`LiveSnapshot`: what is known of a run at one moment, and `Watcher`, which takes one after another."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from podembed.orchestrator.api.configuration_error import ConfigurationError
from podembed.orchestrator.commit.holder import HEARTBEAT_FRESH_S, Heartbeat, read_heartbeat
from podembed.orchestrator.commit.lease_files import read_claims
from podembed.orchestrator.run.reference import open_run_store
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.watch import HealthWatch
from podembed.tools.metrics.point import Point, StreamLine
from podembed.tools.metrics.reading import FAULTS, RunStream, StreamReader

MOST_FAULTS = 50
# What people should know of.
SHOWN = (*FAULTS, "callback_failed", "sink_failed", "stopped_early")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """One host in the last window.

    Attributes:
      step_s: seconds of a step that are in some phase.
      waited: share of the window, by what for.
      phase_s: seconds of a step, by phase, the longest first.
    """

    host: str
    step_s: float
    waited: dict[str, float]
    phase_s: dict[str, float]
    memory_bytes: float
    peak_memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSnapshot:
    """A run at one moment.

    Attributes:
      silent_s: since the driver's last heartbeat; None where no driver holds the run.
      window: the newest one that counts; None before the first.
      faults: the newest last.
      alarms: alarms that stand, as `podembed health` finds them, with the steps at which they began.
    """

    name: str
    now_unix_s: float
    silent_s: float | None
    stream: RunStream
    window: Point | None
    hosts: tuple[HostView, ...]
    faults: tuple[StreamLine, ...]
    alarms: tuple[tuple[StandingAlarm, int], ...]

    @property
    def is_driven(self) -> bool:
        """Whether a driver was alive a moment ago."""
        return self.silent_s is not None and self.silent_s <= HEARTBEAT_FRESH_S

    @property
    def is_known(self) -> bool:
        """Whether there is anything to show, or somebody who will measure it."""
        return bool(self.stream.points or self.stream.events or self.is_driven)

    def last(self, name: str, **labels: str) -> float | None:
        """The newest value of a series; None where there is none."""
        for point in reversed(self.stream.points):
            value = point.value(name, **labels)
            if value is not None and math.isfinite(value):
                return value
        return None

    def newest_of(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The newest value for each value of a label, where the others have these values."""
        found: dict[str, float] = {}
        for point in self.stream.points:
            for one in point.each(name):
                if label in one.labels and all(one.labels.get(other) == value for other, value in labels.items()):
                    found[one.labels[label]] = one.value
        return found

    def values(self, name: str) -> list[float]:
        """Values of all windows, the newest last."""
        series = (point.value(name) for point in self.stream.windows)
        return [value for value in series if value is not None and math.isfinite(value)]

    @property
    def total(self) -> int:
        """Steps of the whole run; 0 where that is not known."""
        return int(self.last("steps_planned") or 0)

    @property
    def left_s(self) -> float | None:
        """To the end, as the driver's own lines have it, less what has passed since; None where it was not known."""
        left_s = self.window.value("left_seconds") if self.window else None
        return (
            None if left_s is None or self.window is None else max(0.0, left_s - self.now_unix_s + self.window.unix_s)
        )

    def event(self, kind: str) -> StreamLine | None:
        """The newest of a kind."""
        return next((line for line in reversed(self.stream.events) if line.kind == kind), None)


class Watcher:
    """Reads a run again and again. Mutated: what it has read.

    Args:
      run: folder or URL.

    Raises:
      ConfigurationError: there is no run.
    """

    def __init__(self, run: str) -> None:
        self.store = open_run_store(run)
        self.name = self.store.location.rstrip("/").rsplit("/", 1)[-1]
        self._reader = StreamReader(self.store)
        self._health, self._judged = HealthWatch(), tuple[Point, ...]()

    def look(self, *, now_unix_s: float) -> LiveSnapshot:
        """The run now.

        Raises:
          StorageError: the storage does not answer.
        """
        # Before the stream: who reads it after the driver's end sees all of it.
        beat = self._heartbeat()
        stream = self._reader.read()
        windows = stream.windows
        return LiveSnapshot(
            name=self.name,
            now_unix_s=now_unix_s,
            silent_s=None if beat is None else max(0.0, now_unix_s - beat.written_unix_s),
            stream=stream,
            window=windows[-1] if windows else None,
            hosts=_hosts(windows[-1]) if windows else (),
            faults=tuple(line for line in stream.events if line.kind in SHOWN)[-MOST_FAULTS:],
            alarms=self._alarms(stream.points),
        )

    def _alarms(self, points: tuple[Point, ...]) -> tuple[tuple[StandingAlarm, int], ...]:
        """Shows the detectors what is new. After a fault, or where the stream was thinned, all of it."""
        num = len(self._judged)
        if points[:num] != self._judged:
            self._health, num = HealthWatch(), 0
        for point in points[num:]:
            self._health.take(point)
        self._judged = points
        return tuple((one, self._health.began_step[key]) for key, one in self._health.standing.items())

    def _heartbeat(self) -> Heartbeat | None:
        claims = read_claims(self.store)
        return read_heartbeat(self.store, claims[-1]) if claims else None

    def may_begin(self) -> bool:
        """Whether the run has no commit yet, so that its first driver may be at its beginning."""
        return not self.store.children("commit")

    def refuse_without_measurements(self, seen: LiveSnapshot) -> None:
        """Raises `ConfigurationError` for a run of which nothing is known, and which no driver holds."""
        if not seen.is_known:
            raise ConfigurationError(
                f"Found no measurements and no driver at {self.store.location}. Expected a run that is measured while "
                "it trains. Start it, or look at its commits: podembed inspect RUN."
            )


def _hosts(window: Point) -> tuple[HostView, ...]:
    phases: defaultdict[str, dict[str, float]] = defaultdict(dict)
    waited: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for one in window.each("phase_seconds"):
        phases[one.labels.get("host", "?")][one.labels.get("phase", "?")] = one.value
    for one in window.each("waited_ratio"):
        waited[one.labels.get("host", "?")][one.labels.get("source", "?")] = one.value
    memory, peak = window.by_label("memory_bytes", "host"), window.by_label("peak_memory_bytes", "host")
    names = sorted({*phases, *waited, *memory}, key=lambda name: (len(name), name))
    return tuple(
        HostView(
            host=name,
            step_s=sum(phases[name].values()),
            waited=waited[name],
            phase_s=dict(sorted(phases[name].items(), key=lambda item: -item[1])),
            memory_bytes=memory.get(name, math.nan),
            peak_memory_bytes=peak.get(name, math.nan),
        )
        for name in names
    )
