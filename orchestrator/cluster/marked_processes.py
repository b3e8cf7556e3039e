"""Worker processes of this machine, found by a mark that they were started with.

Ray reports the process of an actor only once the actor answers, and one that freezes while it starts never does. Each
therefore gets a mark in its environment, by which the driver finds it in the process table from its first moment. The
driver sees whether it runs, and kills it by number, since Ray takes seconds to kill a process that is stopped.
Processes of other machines, or of other users, are not found.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterable, Sequence

from podembed.workers.liveness.process_statistics import ProcessStatistics, processes_with, read_statistics

VARIABLE = "PODEMBED_WORKER"
_LOOK_EVERY_S = 1.0


class MarkedProcesses:
    """The process table as far as it concerns our workers. Mutated: what the last look found."""

    def __init__(self) -> None:
        self._marks: set[str] = set()
        self._found: dict[str, ProcessStatistics] = {}
        self._looked_s: float | None = None

    def new_mark(self) -> dict[str, str]:
        """The variable for the environment of one more process."""
        mark = secrets.token_hex(8)
        self._marks.add(mark)
        return {VARIABLE: mark}

    def statistics(self, mark: str) -> ProcessStatistics | None:
        """What the kernel says of the process now; None if it is not of this machine, or not there."""
        first = self._found.get(mark)
        if first is None:
            now_s = time.monotonic()
            if self._looked_s is None or now_s - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = now_s
                self._look(self._marks)
            first = self._found.get(mark)
        statistics = None if first is None else read_statistics(first.process)
        # Setting up an environment may replace the program, but neither number nor start of the process.
        return (
            statistics if statistics is not None and first is not None and statistics.started == first.started else None
        )

    def kill(self, marks: Iterable[str]) -> list[int]:
        """Kills the processes at once, stopped ones too; forgets the marks. Returns the numbers of those that there
        were.
        """
        wanted = set(marks)
        killed = []
        for process in processes_with(VARIABLE, wanted).values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
                killed.append(process)
        self._marks -= wanted
        self._found = {mark: statistics for mark, statistics in self._found.items() if mark not in wanted}
        return killed

    def _look(self, marks: Iterable[str]) -> None:
        for mark, process in processes_with(VARIABLE, set(marks)).items():
            statistics = read_statistics(process)
            if statistics is not None:
                self._found[mark] = statistics


def await_end(processes: Sequence[int], *, timeout_s: float) -> None:
    """Waits until killed processes are gone, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while any(read_statistics(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
