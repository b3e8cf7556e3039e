"""`EventLog`: what a driver told its user, as one JSON line an event with its time, in the folder of the run's fault
plan.

It stands before the reporter that the user sees, and only where faults are injected. It is also where the driver's own
fault points are: all that happens to a run is told here, on the driver's thread.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from podembed.orchestrator.api.config import Evaluation, Recovery
from podembed.orchestrator.driver.console import Reporter, WindowReport
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.job.ranking import Baseline

FILE = "events.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event.

    Attributes:
      kind: `begin`, `end`, `notice`, `window`, `commit` or `recovery`.
      process: of the driver that told it.
      values: what it told.
    """

    kind: str
    unix_s: float
    process: int
    values: Mapping[str, Any]

    @property
    def text(self) -> str:
        return str(self.values.get("text", ""))


class EventLog:
    """A reporter that writes everything down and passes it on. Mutated: the open file, between `__enter__` and
    `__exit__`.
    """

    def __init__(self, reporter: Reporter, folder: str, faults: FaultPoints | None) -> None:
        self._reporter = reporter
        self._path = Path(folder) / FILE
        self._faults = faults

    def __enter__(self) -> EventLog:
        self._write("begin", {})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("end", {"error": None if error is None else f"{type(error).__name__}: {error}"[:2000]})

    def activity(self, what: str) -> None:
        self._reporter.activity(what)

    def notice(self, text: str) -> None:
        self._write("notice", {"text": text})
        self._reporter.notice(text)
        if text.startswith("fault: "):
            self._point("driver.fault")

    def window(self, report: WindowReport) -> None:
        self._write("window", {"step": report.step, "generation": report.generation, "loss": report.loss})
        self._reporter.window(report)
        self._point("driver.window", step=report.step)

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None:
        self._reporter.evaluation(evaluation, best_auc=best_auc, baseline=baseline)

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self._point("driver.acknowledge", detail=name)
        self._write("commit", {"name": name, "seconds": seconds})
        self._reporter.commit(name, size_bytes=size_bytes, seconds=seconds)

    def recovery(self, recovery: Recovery) -> None:
        self._write("recovery", asdict(recovery) | {"total_s": recovery.total_s})
        self._reporter.recovery(recovery)
        self._point("driver.recovered")

    def close(self) -> None:
        self._reporter.close()

    def _point(self, name: str, *, step: int | None = None, detail: str = "") -> None:
        if self._faults is not None:
            self._faults.hit(name, step=step, detail=detail)

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, "unix_s": time.time(), "process": os.getpid(), "values": dict(values)}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_events(folder: str) -> list[Event]:
    """All events of a run so far, over all its drivers. A line that a killed driver left unfinished is left out."""
    path = Path(folder) / FILE
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(Event(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return events
