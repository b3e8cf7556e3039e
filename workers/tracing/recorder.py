"""`Recorder`: spans of time of one process, while a trace is on.

Any thread may add spans. A list takes them one by one, which Python makes safe without a lock. The list has an end:
what finds no room is counted. Times are those of the monotonic clock of the machine, which `time.perf_counter` and
`time.monotonic` both read on Linux. Other processes have other clocks: the driver finds out by how much they differ.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

MOST_SPANS = 100_000
"""Most spans of one process in one trace, some 10 MB of memory."""
JAX_TRACK = "JAX "
"""How the tracks of JAX's own profile begin."""
_OFF = nullcontext()


class Span(NamedTuple):
    """Something that a process did.

    Attributes:
      track: the line of the process on which it is drawn, such as `work` or `input`.
      began_s, ended_s: seconds by the clock of the process.
      values: more about it, as numbers and short texts.
    """

    track: str
    name: str
    began_s: float
    ended_s: float
    values: dict[str, int | float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What one process recorded.

    Attributes:
      num_dropped: spans that found no room.
      process: its id on its machine.
      without_jax: why JAX's profile was requested and is not in it, in words; empty if all is well.
    """

    spans: tuple[Span, ...]
    num_dropped: int
    process: int
    hostname: str
    without_jax: str = ""


def _nothing() -> None: ...


class Recorder:
    """See the module. Mutated: whether it is on, and its spans.

    Attributes:
      is_on: what is done is recorded. Looked at by everybody who has something to add.
    """

    def __init__(self, monotonic_s: Callable[[], float] | None = None, *, most: int = MOST_SPANS) -> None:
        # Looked up at each call: simulated time takes the module's place.
        self._monotonic_s = monotonic_s or (lambda: time.perf_counter())
        self._most = most
        self.is_on = False
        self._spans: list[Span] = []
        self._open: dict[object, Span] = {}
        self._num_dropped = 0

    def now_s(self) -> float:
        """The clock by which spans are recorded."""
        return self._monotonic_s()

    def begin(self) -> None:
        """Records from now on; what an earlier trace left is forgotten."""
        self._spans, self._open, self._num_dropped = [], {}, 0
        self.is_on = True

    def end(self) -> Recorded:
        """Stops. What is still being done ends now, with the value `unfinished`."""
        self.is_on = False
        now_s = self.now_s()
        # Another thread may end one of them meanwhile.
        cut = [one._replace(ended_s=now_s, values={**one.values, "unfinished": 1}) for one in [*self._open.values()]]
        spans, self._spans, self._open = [*self._spans, *cut], [], {}
        return Recorded(
            spans=tuple(spans), num_dropped=self._num_dropped, process=os.getpid(), hostname=socket.gethostname()
        )

    def add(self, track: str, name: str, began_s: float, ended_s: float, **values: int | float | str) -> None:
        """Records something that is over. To be called while it is on; later it does nothing."""
        self._put(Span(track, name, began_s, ended_s, values))

    def span(self, track: str, name: str, **values: int | float | str) -> AbstractContextManager[None]:
        """Records what is done inside, also if it raises. If it is still being done at the end of the trace, that part
        is recorded.
        """
        return self._recorded(track, name, values) if self.is_on else _OFF

    def begin_span(self, track: str, name: str, **values: int | float | str) -> Callable[[], None]:
        """Something begins whose end is elsewhere: as `span`. Returns what ends it; a second call does nothing."""
        if not self.is_on:
            return _nothing
        key, begun = object(), Span(track, name, self.now_s(), 0.0, values)
        self._open[key] = begun

        def end() -> None:
            # Not there any more if the trace ended before it.
            if self._open.pop(key, None) is not None:
                self._put(begun._replace(ended_s=self.now_s()))

        return end

    @contextmanager
    def _recorded(self, track: str, name: str, values: dict[str, int | float | str]) -> Iterator[None]:
        end = self.begin_span(track, name, **values)
        try:
            yield
        finally:
            end()

    def _put(self, span: Span) -> None:
        if not self.is_on:
            return
        if len(self._spans) < self._most:
            self._spans.append(span)
        else:
            self._num_dropped += 1
