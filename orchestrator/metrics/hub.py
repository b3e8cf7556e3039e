"""`MetricsHub`: stands in the way of a driver's events, makes points of them, and hands both to sinks.

Each sink has a thread and a queue with an end. A sink that fails is named once and tried again with the next line. One
that hangs loses the oldest lines of its queue. Neither delays the driver.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from podembed.orchestrator.events.event import Emit, Event
from podembed.orchestrator.events.run import SinkFailed
from podembed.orchestrator.events.sentences import sentence
from podembed.orchestrator.metrics.measurer import Measurer
from podembed.orchestrator.metrics.point import POINT, Line, Point

MOST_LINES = 4096
"""That wait for a sink."""
END_WAIT_S = 5.0
"""For a sink to take what waits for it, at the end of the run."""


class Sink(Protocol):
    """Takes the stream somewhere. Only one thread calls it.

    Attributes:
      name: in messages, such as `Prometheus at port 9090`.
      flush_s: seconds after which `flush` is called although no line comes.
    """

    name: str
    flush_s: float

    def write(self, line: Line) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Watch(Protocol):
    """Judges points as they come, in the driver's thread. It should take no time that anybody would notice."""

    def take(self, point: Point) -> Sequence[Event]: ...


class SinkThread:
    """One sink at work. Mutated: its queue."""

    def __init__(self, sink: Sink, failures: queue.SimpleQueue[SinkFailed]) -> None:
        self.sink = sink
        self._failures = failures
        self._lines: deque[Line] = deque()
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._is_over = False
        self._said = ""
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Never waits."""
        with self._changed:
            if len(self._lines) >= MOST_LINES:
                self._lines.popleft()
                self._num_dropped += 1
            self._lines.append(line)
            self._changed.notify()

    def close(self) -> None:
        """Lets it take what is there, for `END_WAIT_S` at most."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(END_WAIT_S)
        if self._thread.is_alive():
            self._failures.put(
                SinkFailed(
                    sink=self.sink.name, error=f"it has not answered for {END_WAIT_S:.0f} s", dropped=len(self._lines)
                )
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._lines and not self._is_over:
                    self._changed.wait(self.sink.flush_s)
                lines, dropped, is_over = [*self._lines], self._num_dropped, self._is_over
                self._lines.clear()
                self._num_dropped = 0
            if dropped:
                self._fail("it was too slow", dropped=dropped)
            for line in lines:
                self._try(lambda line=line: self.sink.write(line))
            self._try(self.sink.flush)
            if is_over:
                self._try(self.sink.close)
                return

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}", dropped=0)

    def _fail(self, error: str, *, dropped: int) -> None:
        # The same trouble comes with every line.
        if error != self._said:
            self._said = error
            self._failures.put(SinkFailed(sink=self.sink.name, error=error, dropped=dropped))


class MetricsHub:
    """See the module. A context: it ends with the driver.

    Args:
      emit: to which events are passed on.
      sinks: to begin with.
      watch: what it says of the points goes where events go. If it fails, it is named and left out from then on.
    """

    def __init__(
        self,
        emit: Emit,
        sinks: Sequence[Sink],
        *,
        measurer: Measurer,
        wall_s: Callable[[], float],
        watch: Watch | None = None,
    ) -> None:
        self._emit, self._measurer, self._wall_s, self._watch = emit, measurer, wall_s, watch
        self._failures: queue.SimpleQueue[SinkFailed] = queue.SimpleQueue()
        self._threads = [SinkThread(sink, self._failures) for sink in sinks]

    def __enter__(self) -> MetricsHub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.close()
        self._say()

    def emit(self, event: Event) -> None:
        """Takes an event."""
        point = self._put(event)
        self._emit(event)
        if point is not None:
            for told in self._judged(point):
                self._put(told)
                self._emit(told)
        self._say()

    def _judged(self, point: Point) -> Sequence[Event]:
        if self._watch is None:
            return ()
        try:
            return self._watch.take(point)
        except Exception as error:
            # Training never suffers from what only looks at it.
            self._watch = None
            self._failures.put(SinkFailed(sink="the run's health", error=f"{type(error).__name__}: {error}", dropped=0))
            return ()

    def _put(self, event: Event) -> Point | None:
        point = self._measurer.point(event)
        if point is not None:
            self._send(_line_of(point))
        # All that a window says is in its point.
        if event.kind != "window":
            self._send(
                Line(
                    kind=event.kind,
                    unix_s=self._wall_s(),
                    values=event.values(),
                    text=sentence(event),
                    level=str(event.level),
                )
            )
        return point

    def _send(self, line: Line) -> None:
        for thread in self._threads:
            thread.put(line)

    def _say(self) -> None:
        while not self._failures.empty():
            failure = self._failures.get()
            self._put(failure)
            self._emit(failure)


def _line_of(point: Point) -> Line:
    return Line(kind=POINT, unix_s=point.unix_s, values=point.to_json(), point=point)
