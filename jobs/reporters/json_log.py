"""`JsonReporter`: what a run tells its user as JSON, one object a line, for programs that gather logs.

A line has the same kinds and values as docs/events.md. A window's values have the names of the run's measurements.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.events.event import Event, Level
from podembed.orchestrator.events.progress import WindowTrained
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.tools.metrics.measurer import Measurer

NOTICE, ACTIVITY, SUMMARY, FAILURE = "notice", "activity", "summary", "failed"
"""Kinds of lines that are no events."""


class JsonReporter(SilentReporter):
    """A `Reporter`. Mutated: what it has counted of the run, and whether its output is still read.

    Args:
      out: stream that takes the lines; by default what is standard output when a line is written.
    """

    def __init__(self, out: TextIO | None = None, *, wall_s: Callable[[], float] = SYSTEM_CLOCK.wall_s) -> None:
        self._out, self._wall_s = out, wall_s
        self._measurer = Measurer(monotonic_s=SYSTEM_CLOCK.monotonic_s, wall_s=wall_s)
        self._is_read, self._has_failed = True, False
        self._told = ""

    def line(
        self, kind: str, message: str, values: Mapping[str, Any] | None = None, *, level: str = Level.INFO
    ) -> None:
        """Writes a line. Goes on when no process reads it any more."""
        time = datetime.fromtimestamp(self._wall_s(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        document = {"time": time, "level": str(level), "event": kind, "message": message, "values": dict(values or {})}
        if not self._is_read:
            return
        try:
            print(json.dumps(document, allow_nan=False, default=float), file=self._out or sys.stdout, flush=True)
        except BrokenPipeError:
            self._is_read = False
        except (OSError, TypeError, ValueError) as error:
            # A full disk behind the log, say. Hours of training are worth more than a line of theirs.
            if not self._has_failed:
                self._has_failed = True
                print(f"podembed: lines of the log are missing from here on: {error}", file=sys.stderr)

    def event(self, event: Event) -> None:
        point = self._measurer.point(event)
        if isinstance(event, WindowTrained) and point is not None:
            values = {one.name: _finite(one.value) for one in point.measurements if not one.labels}
            values["first_step"] = event.first_step
        else:
            values = event.values()
        self._told = event.sentence()
        self.line(event.kind, self._told, values, level=event.level)

    def activity(self, what: str) -> None:
        self.line(ACTIVITY, what)

    def notice(self, text: str) -> None:
        # The sentence of an event comes again.
        if text != self._told:
            self.line(NOTICE, text.strip())
        self._told = ""


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
