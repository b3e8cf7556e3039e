"""`EventLog`: what happened to a run, as one JSON line an event with its time, in the folder of the run's fault plan.

It stands before the reporter that the user sees, and only where faults are injected. It is also where the driver's own
fault points are: all that happens to a run is emitted in the driver's thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from podembed.orchestrator.events.commits import Committed
from podembed.orchestrator.events.event import Emit, Event
from podembed.orchestrator.events.progress import WindowTrained
from podembed.orchestrator.events.run import DriverBegan, DriverEnded, GenerationLost, Recovered
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.faults.plan import FaultPlan, FaultPlanError
from podembed.workers.faults.storage import with_faults

FILE = "events.jsonl"
MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """One line of the log.

    Attributes:
      kind: kind of the event.
      process: process of the driver that wrote it.
      values: the event's fields.
      text: the event's sentence, for people.
    """

    kind: str
    unix_s: float
    process: int
    values: Mapping[str, Any]
    text: str = ""


class EventLog:
    """Writes events down and passes them on. Begins and ends as a context, with the driver.

    Args:
      emit: to which events are passed on.
      faults: the driver's fault points, which its events reach.
    """

    def __init__(self, emit: Emit, folder: str, faults: FaultPoints | None) -> None:
        self._emit = emit
        self._path = Path(folder) / FILE
        self._faults = faults

    def __enter__(self) -> EventLog:
        folder = self._path.parent
        try:
            # That of a plan written by hand is often not there yet.
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FaultPlanError(
                f"Found that the plan's folder {folder} cannot be made: {error.strerror}. Expected one that can be "
                "written, for what strikes and when. Name another one in the plan."
            ) from error
        self._write(DriverBegan())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        name = None if error is None else type(error).__name__
        self._write(DriverEnded(error=name, message=str(error or "")[:MAX_MESSAGE]))

    def emit(self, event: Event) -> None:
        """Takes an event, and reaches the fault point before or after it."""
        if isinstance(event, Committed):
            self._point("driver.acknowledge", detail=event.name)
        self._write(event)
        self._emit(event)
        match event:
            case GenerationLost():
                self._point("driver.fault")
            case WindowTrained(report=report):
                self._point("driver.window", step=report.step)
            case Recovered():
                self._point("driver.recovered")

    def _point(self, name: str, *, step: int | None = None, detail: str = "") -> None:
        if self._faults is not None:
            self._faults.hit(name, step=step, detail=detail)

    def _write(self, event: Event) -> None:
        line = {
            "kind": event.kind,
            "unix_s": time.time(),
            "process": os.getpid(),
            "values": event.values(),
            "text": event.sentence(),
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def injecting(plan: FaultPlan, run: OpenRun, emit: Emit) -> Iterator[tuple[OpenRun, Emit]]:
    """The run and its events with a plan's faults in them, and the log of the driver that begins."""
    faults = FaultPoints.of(plan, "driver")
    with EventLog(emit, plan.folder, faults) as log:
        yield replace(run, store=with_faults(run.store, faults)), log.emit


def read_events(folder: str) -> list[LoggedEvent]:
    """All events of a run so far, over all its drivers. A line that a killed driver left unfinished is left out."""
    path = Path(folder) / FILE
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(LoggedEvent(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return events
