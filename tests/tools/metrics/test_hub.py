"""Sinks that fail or hang never delay a driver; and Prometheus at a real port."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from prometheus_client.parser import text_string_to_metric_families

from podembed.orchestrator.api.metrics_config import MetricsConfig
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.run import MetricsServed, SinkFailed
from podembed.tools.metrics import hub
from podembed.tools.metrics.catalog import CATALOG
from podembed.tools.metrics.hub import MetricsHub, Sink
from podembed.tools.metrics.measurer import Measurer
from podembed.tools.metrics.point import Point, StreamLine
from podembed.tools.metrics.sinks import CallbackSink, measuring
from podembed.workers.storage.store import Store
from tests.clock import FakeClock
from tests.tools.metrics.windows import window

WAIT_S = 60.0


class Kept:
    """A sink that keeps what it gets."""

    flush_s = 0.01

    def __init__(self, name: str = "kept") -> None:
        self.name = name
        self.lines: list[StreamLine] = []
        self.is_closed = False

    def write(self, line: StreamLine) -> None:
        self.lines.append(line)

    def flush(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Failing(Kept):
    def write(self, line: StreamLine) -> None:
        raise OSError("disk full")


class Chatty(Kept):
    """Its error has another text each time, such as the id of a request."""

    def write(self, line: StreamLine) -> None:
        self.lines.append(line)
        raise OSError(f"request {len(self.lines)}")


class Hanging(Kept):
    """Until it is told to go on."""

    def __init__(self) -> None:
        super().__init__("hanging")
        self.has_begun, self.go_on = threading.Event(), threading.Event()

    def write(self, line: StreamLine) -> None:
        self.has_begun.set()
        self.go_on.wait(WAIT_S)
        super().write(line)


def a_hub(emitted: list[Event], sinks: Sequence[Sink]) -> MetricsHub:
    clock = FakeClock()
    return MetricsHub(
        emitted.append,
        sinks,
        measurer=Measurer(monotonic_s=clock.monotonic_s, wall_s=clock.wall_s),
        wall_s=clock.wall_s,
    )


def failures(emitted: Sequence[Event]) -> list[SinkFailed]:
    return [event for event in emitted if isinstance(event, SinkFailed)]


def test_a_sink_that_fails_is_named_once_and_others_get_all() -> None:
    emitted: list[Event] = []
    kept = Kept()
    with a_hub(emitted, [Failing("broken"), kept]) as running:
        for at in range(20):
            running.emit(window(at, at + 1))
    assert [(one.sink, one.error) for one in failures(emitted)] == [("broken", "OSError: disk full")]
    assert sum(event.kind == "window" for event in emitted) == 20
    assert [line.point.step for line in kept.lines if line.point is not None] == list(range(1, 21))
    assert kept.is_closed


def test_a_sink_that_exits_is_named_as_one_that_fails() -> None:
    emitted: list[Event] = []
    heard: list[Point] = []

    def exits_once(point: Point) -> None:
        heard.append(point)
        if len(heard) == 1:
            raise SystemExit(3)

    with a_hub(emitted, [CallbackSink(exits_once)]) as running:
        for at in range(20):
            running.emit(window(at, at + 1))
    assert [one.error for one in failures(emitted)] == ["SystemExit: 3"]
    assert len(heard) == 20


def test_an_error_with_a_number_of_its_own_is_named_once_a_minute() -> None:
    emitted: list[Event] = []
    with a_hub(emitted, [Chatty()]) as running:
        for at in range(20):
            running.emit(window(at, at + 1))
    assert len(failures(emitted)) == 1


def test_an_event_that_cannot_be_measured_ends_nothing() -> None:
    emitted: list[Event] = []
    with a_hub(emitted, [Kept()]) as running:
        running.emit(replace(window(0, 10), seconds="long"))  # type: ignore[arg-type]
        running.emit(window(10, 20))
    assert sum(event.kind == "window" for event in emitted) == 2
    assert "of window" in failures(emitted)[0].error


def test_a_sink_that_hangs_loses_its_oldest_lines_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_LINES", 8)
    monkeypatch.setattr(hub, "END_WAIT_S", 0.2)
    emitted: list[Event] = []
    hanging = Hanging()
    began = monotonic()
    with a_hub(emitted, [hanging]) as running:
        running.emit(window(0, 1))
        assert hanging.has_begun.wait(WAIT_S)
        for at in range(1, 50):
            running.emit(window(at, at + 1))
    assert monotonic() - began < WAIT_S / 2
    left = failures(emitted)
    assert [one.sink for one in left] == ["hanging"]
    assert "has not answered" in left[0].error
    hanging.go_on.set()


def test_a_slow_sink_gets_the_newest_lines_and_says_how_many_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_LINES", 8)
    emitted: list[Event] = []
    hanging = Hanging()
    with a_hub(emitted, [hanging]) as running:
        running.emit(window(0, 1))
        assert hanging.has_begun.wait(WAIT_S)
        for at in range(1, 50):
            running.emit(window(at, at + 1))
        hanging.go_on.set()
    steps = [line.point.step for line in hanging.lines if line.point is not None]
    assert steps[-8:] == list(range(43, 51))
    (failure,) = failures(emitted)
    assert failure.dropped == 50 - len(steps)


def scraped(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        text = answer.read().decode()
    return {
        family.name: {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def until_scraped(port: int, name: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    end = monotonic() + WAIT_S
    while name not in (found := scraped(port)):
        assert monotonic() < end, f"{name} was not served: {sorted(found)}"
    return found


def test_prometheus_scrapes_what_a_run_measures(tmp_path: Path) -> None:
    emitted: list[Event] = []
    with measuring(MetricsConfig(port=0), Store(str(tmp_path / "my-run")), emitted.append) as emit:
        (served,) = [event for event in emitted if isinstance(event, MetricsServed)]
        emit(window(0, 10, rates={"clicks": 0.1, "users": 0.2}))
        found = until_scraped(served.port, "podembed_loss")
        assert found["podembed_loss"] == {(("run", "my-run"),): 0.5}
        assert found["podembed_samples"] == {(("run", "my-run"),): 640}
        hosts = {dict(labels)["host"] for labels in found["podembed_memory_bytes"]}
        assert hosts == {"0", "1"}
        assert set(found) <= {f"podembed_{name}" for name in CATALOG}
        emit(window(10, 20, num_hosts=1, rates={"clicks": 0.05, "users": 0.2}))
        end = monotonic() + WAIT_S
        while len((found := scraped(served.port))["podembed_memory_bytes"]) != 1:
            assert monotonic() < end, "a host that is gone should not stay at its last value"
        rates = {dict(labels)["table"]: value for labels, value in found["podembed_learning_rate"].items()}
        assert rates == {"clicks": 0.05, "users": 0.2}, "a rate that did not change is still known"


def test_a_port_in_use_is_said_and_taken_when_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from podembed.tools.metrics.prometheus import PrometheusSink

    monkeypatch.setattr(PrometheusSink, "flush_s", 0.05)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        emitted: list[Event] = []
        with measuring(MetricsConfig(port=port, in_run=False), Store(str(tmp_path)), emitted.append) as emit:
            (failure,) = failures(emitted)
            assert "in use" in failure.error
            for at in range(5):
                emit(window(at, at + 1))
            assert str(port) in failure.sink
            taken.close()
            emit(window(5, 10))
            end = monotonic() + WAIT_S
            while True:
                try:
                    assert "podembed_loss" in until_scraped(port, "podembed_loss")
                    break
                except OSError:
                    assert monotonic() < end, "the port is free, and nobody answers"
    assert len(failures(emitted)) == 1, "a port that stays taken is named once"


def test_a_folder_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("a file in the folder's place")
    emitted: list[Event] = []
    with measuring(MetricsConfig(), Store(str(tmp_path)), emitted.append) as emit:
        emit(window(0, 10))
    assert sum(event.kind == "window" for event in emitted) == 1
    assert failures(emitted)
    assert "metrics" in failures(emitted)[0].sink
