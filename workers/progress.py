"""`Progress`: what a worker says of itself while it works, and the timers of a step's phases.

The working thread writes a `Tracker`, but for the count of files that a background save has written, which is the saving thread's; the
control thread reads both. Every field is replaced whole, so a reader sees old or new values, never torn ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A worker's state at one moment.

    Attributes:
      step: the step it works on, or did last.
      phase: what it is doing.
      marks: grows with every finished step or file; two equal readings far apart mean it is stuck.
      step_unix_s: wall-clock time of the last finished step, 0 before the first.
    """

    step: int
    phase: str
    marks: int
    step_unix_s: float


def machine_identity() -> str:
    """This boot of this machine, in this process namespace: where a process id means the same process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


class Tracker:
    """Phase timers of one worker, written by its working thread only; `mark_saved` by its saving thread only."""

    def __init__(self) -> None:
        self._step = 0
        self._phase = "idle"
        self._marks = 0
        self._saved_marks = 0
        self._step_unix_s = 0.0
        self._around: str | None = None
        self._nested_s = 0.0
        self.phase_s: dict[str, float] = {}

    def progress(self) -> Progress:
        marks = self._marks + self._saved_marks
        return Progress(step=self._step, phase=self._phase, marks=marks, step_unix_s=self._step_unix_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside towards `name`; that of a phase within it towards that one alone."""
        around, nested_before_s = self._around, self._nested_s
        self._phase = self._around = name
        self._nested_s = 0.0
        started = time.perf_counter()
        try:
            yield
            # After an exception the phase stays, so that a report can name it.
            self._phase = around or "between phases"
        finally:
            spent_s = time.perf_counter() - started
            self.phase_s[name] = self.phase_s.get(name, 0.0) + spent_s - self._nested_s
            self._around, self._nested_s = around, nested_before_s + spent_s

    def begin_step(self, step: int) -> None:
        self._step = step

    def mark(self) -> None:
        """Something other than a step got done."""
        self._marks += 1

    def mark_saved(self) -> None:
        """A background save has written another file."""
        self._saved_marks += 1

    def finish_step(self) -> None:
        self._marks += 1
        self._step_unix_s = time.time()

    def take_phase_s(self) -> dict[str, float]:
        """The timers since the last call, which start again at 0."""
        taken, self.phase_s = self.phase_s, {}
        return taken
