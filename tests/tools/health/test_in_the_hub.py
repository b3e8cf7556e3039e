"""The watch in the way of a driver's events: what it says reaches people, and a failure of it stops no run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan
from podembed.orchestrator.events.run import SinkFailed
from podembed.tools.metrics.hub import MetricsHub, PointJudge
from podembed.tools.metrics.measurer import Measurer
from podembed.tools.metrics.point import Point, StreamLine
from tests.clock import FakeClock
from tests.tools.metrics.windows import window

BEGAN = AlarmBegan(
    alarm="slow_storage", subject="", step=10, is_note=False, finding="commits take 9 s", remedy="Use another disk."
)


class Kept:
    """A sink that keeps what it gets."""

    name, flush_s = "kept", 0.01

    def __init__(self) -> None:
        self.lines: list[StreamLine] = []

    def write(self, line: StreamLine) -> None:
        self.lines.append(line)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Alarming:
    """Says the same at each point."""

    severities: Mapping[str, str] = {}

    def take(self, point: Point) -> Sequence[Event]:
        return [BEGAN]


class Broken:
    """Cannot judge anything."""

    severities: Mapping[str, str] = {}

    def take(self, point: Point) -> Sequence[Event]:
        raise ZeroDivisionError("no windows")


def heard(watch: PointJudge, windows: int) -> tuple[list[Event], list[StreamLine]]:
    clock, kept, emitted = FakeClock(), Kept(), list[Event]()
    measurer = Measurer(monotonic_s=clock.monotonic_s, wall_s=clock.wall_s)
    with MetricsHub(emitted.append, [kept], measurer=measurer, wall_s=clock.wall_s, watch=watch) as hub:
        for at in range(windows):
            hub.emit(window(10 * at, 10 * at + 10))
    return emitted, kept.lines


def test_alarms_follow_the_window_that_showed_them_to_people_and_sinks() -> None:
    emitted, lines = heard(Alarming(), 1)
    assert [event.kind for event in emitted] == ["window", "alarm_began"]
    assert [line.kind for line in lines] == ["point", "point", "alarm_began"]
    point = lines[1].point
    assert point is not None
    assert point.by_label("alarm", "alarm") == {"slow_storage": 1.0}
    assert emitted[1].sentence() == "ALARM slow_storage at step 10: commits take 9 s. Use another disk."
    assert lines[2].values["remedy"] == "Use another disk."


def test_a_watch_that_fails_is_named_once_and_the_run_goes_on() -> None:
    emitted, lines = heard(Broken(), 5)
    assert [event.kind for event in emitted].count("window") == 5
    (failure,) = [event for event in emitted if isinstance(event, SinkFailed)]
    assert failure.error == "ZeroDivisionError: no windows"
    assert sum(line.kind == "point" for line in lines) == 5
