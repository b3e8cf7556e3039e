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
from podembed.orchestrator.api.result import Evaluation, Recovery
from podembed.orchestrator.events.event import Event, Level
from podembed.orchestrator.events.progress import WindowReport, WindowTrained
from podembed.tools.metrics.measurer import Measurer
from podembed.workers.job.ranking import Baseline

NOTICE, ACTIVITY, SUMMARY, FAILURE = "notice", "activity", "summary", "failed"
"""Kinds of lines that are no events."""


class JsonReporter:
    """A `Reporter`. Mutated: what it has counted of the run, and whether its output is still read.

    Args:
      out: stream that takes the lines; by default what is standard output when a line is written.
    """

    def __init__(self, out: TextIO | None = None, *, wall_s: Callable[[], float] = SYSTEM_CLOCK.wall_s) -> None:
        self._out, self._wall_s = out, wall_s
        self._measurer = Measurer(monotonic_s=SYSTEM_CLOCK.monotonic_s, wall_s=wall_s)
        self._is_read, self._has_failed = True, False
        # Each event comes again, to the method that shows it to people.
        self._is_told = False

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
        self.line(event.kind, event.sentence(), values, level=event.level)
        self._is_told = True

    def activity(self, what: str) -> None:
        self.line(ACTIVITY, what)

    def notice(self, text: str) -> None:
        if not self._was_told():
            self.line(NOTICE, text.strip())

    def window(self, report: WindowReport) -> None:
        self._was_told()

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None:
        self._was_told()

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self._was_told()

    def recovery(self, recovery: Recovery) -> None:
        self._was_told()

    def close(self) -> None: ...

    def _was_told(self) -> bool:
        was_told, self._is_told = self._is_told, False
        return was_told


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
