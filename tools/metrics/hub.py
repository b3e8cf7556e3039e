"""`MetricsHub`: stands in the way of a driver's events, makes points of them, and hands both to sinks.

Each sink has a thread and a queue with an end. A sink that fails is named once and tried again with the next line. One
that hangs loses the oldest lines of its queue. Neither delays the driver.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from podembed.orchestrator.events.event import Emit, Event
from podembed.orchestrator.events.run import SinkFailed
from podembed.tools.metrics.measurer import Measurer
from podembed.tools.metrics.point import POINT, Point, StreamLine
from podembed.workers.liveness.carried_error import words_of

MOST_LINES = 4096
"""Most lines that wait for a sink."""
TOLD_EVERY_S = 60.0
"""A sink's failures are reported at most so often."""
SLOW = "it was too slow"
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

    def write(self, line: StreamLine) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class PointJudge(Protocol):
    """Judges points as they come, in the driver's thread. It should take no time that anybody would notice.

    Attributes:
      severities: severities of the alarms that it may say, `warning` or `info`.
    """

    @property
    def severities(self) -> Mapping[str, str]: ...

    def take(self, point: Point) -> Sequence[Event]: ...


class SinkThread:
    """One sink at work. Mutated: its queue."""

    def __init__(self, sink: Sink, failures: queue.SimpleQueue[SinkFailed], *, wall_s: Callable[[], float]) -> None:
        self.sink = sink
        self._failures, self._wall_s = failures, wall_s
        self._lines: deque[StreamLine] = deque()
        # All that it has missed, and how much of that was said.
        self._num_dropped = self._num_told = 0
        self._num_taken = 0
        self._changed = threading.Condition()
        self._is_over = False
        self._said, self._said_s = "", -math.inf
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, line: StreamLine) -> None:
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
            missed = self._num_dropped + len(self._lines) + self._num_taken
            self._tell(f"it has not answered for {END_WAIT_S:.0f} s", missed)
        elif self._num_dropped > self._num_told:
            self._tell(SLOW, self._num_dropped)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._lines and not self._is_over:
                    self._changed.wait(self.sink.flush_s)
                lines, dropped, is_over = [*self._lines], self._num_dropped, self._is_over
                self._lines.clear()
                self._num_taken = len(lines)
            if dropped > self._num_told:
                self._fail(SLOW)
            for line in lines:
                self._try(lambda line=line: self.sink.write(line))
                self._num_taken -= 1
            self._try(self.sink.flush)
            if is_over:
                self._try(self.sink.close)
                return

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # a program's own function may call `sys.exit()`
            self._fail(f"{type(error).__name__}: {words_of(error)}")

    def _fail(self, error: str) -> None:
        # The same trouble comes with every line, and its words may have a number of their own each time.
        if error != self._said and self._wall_s() - self._said_s >= TOLD_EVERY_S:
            self._tell(error, self._num_dropped)

    def _tell(self, error: str, dropped: int) -> None:
        self._said, self._said_s, self._num_told = error, self._wall_s(), dropped
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
        watch: PointJudge | None = None,
    ) -> None:
        self._emit, self._measurer, self._wall_s, self._watch = emit, measurer, wall_s, watch
        self._failures: queue.SimpleQueue[SinkFailed] = queue.SimpleQueue()
        self._said = ""
        self._threads = [SinkThread(sink, self._failures, wall_s=wall_s) for sink in sinks]

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
        """Hands an event and its point to the sinks. Training never suffers from what only measures it."""
        try:
            return self._measured(event)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            if words != self._said:
                self._said = words
                self._failures.put(SinkFailed(sink="any sink", error=f"of {event.kind}: {words}", dropped=1))
            return None

    def _measured(self, event: Event) -> Point | None:
        point = self._measurer.point(event)
        if point is not None:
            self._send(_line_of(point))
        # All that a window says is in its point.
        if event.kind != "window":
            self._send(
                StreamLine(
                    kind=event.kind,
                    unix_s=self._wall_s(),
                    values=event.values(),
                    text=event.sentence(),
                    level=str(event.level),
                )
            )
        return point

    def _send(self, line: StreamLine) -> None:
        for thread in self._threads:
            thread.put(line)

    def _say(self) -> None:
        # Those that are there now: a sink may fail at what is said of it.
        for _ in range(self._failures.qsize()):
            failure = self._failures.get()
            self._put(failure)
            self._emit(failure)


def _line_of(point: Point) -> StreamLine:
    return StreamLine(kind=POINT, unix_s=point.unix_s, values=point.to_json(), point=point)
