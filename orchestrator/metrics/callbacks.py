"""`CallbackSink`: a program's own function as a sink."""

from __future__ import annotations

from collections.abc import Callable

from podembed.orchestrator.metrics.point import Line, Point


class CallbackSink:
    """A `Sink` that calls a function with each point.

    Args:
      on_point: called in a thread of its own. What it raises is reported once, and the run goes on.
    """

    flush_s = 60.0

    def __init__(self, on_point: Callable[[Point], None]) -> None:
        self.name = f"the function {getattr(on_point, '__qualname__', type(on_point).__name__)}"
        self._on_point = on_point

    def write(self, line: Line) -> None:
        if line.point is not None:
            self._on_point(line.point)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""
