"""`Progress`: what a worker says of itself while it works, and the timers of a step's phases.

The working thread writes a `Tracker`, but for the count of files that a background save has written, which is the
saving thread's; the control thread reads both. Every field is replaced whole, so a reader sees old or new values, never
torn ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from podembed.workers.faults.inject import FaultPoints
from podembed.workers.liveness.worker import Worker

# Phases in which a host does nothing itself but waits: for other hosts, or for its device process.
DEVICE_PHASE = "device"
# Phases that last as long as storage lets them; it has deadlines of its own, with repetitions.
STORAGE_PHASES = frozenset({"read", "restore", "wait for save"})
# Phases in which a host has nothing to do, or waits for its save to go on.
RESTING_PHASES = frozenset({"idle", "between phases", "wait for save"})


def is_waiting_phase(phase: str) -> bool:
    """Whether a host in this phase waits for another host or for its device process."""
    return phase == DEVICE_PHASE or phase.endswith("exchange")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A worker's state at one moment.

    Attributes:
      step: the step it works on, or did last.
      phase: what it is doing.
      marks: grows with every finished step or file; two equal readings far apart mean it is stuck.
      step_unix_s: wall-clock time of the last finished step, 0 before the first.
      phase_s: how long it has been in the phase.
      waits_for: the workers without which it cannot go on; empty while it works itself.
      unheard_s: by number, the hosts from whose machines nothing came, not even answers of their kernels, and for how
        long.
    """

    step: int
    phase: str
    marks: int
    step_unix_s: float
    phase_s: float = 0.0
    waits_for: tuple[Worker, ...] = ()
    unheard_s: Mapping[int, float] = field(default_factory=dict)


def machine_identity() -> str:
    """This boot of this machine, in this process namespace: where a process id means the same process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


class Tracker:
    """Phase timers of one worker, written by its working thread only; `mark_saved` by its saving thread only.

    Attributes:
      faults: where a plan injects faults, the points of this process; each phase is one, called `step.` and its name.
    """

    def __init__(self, monotonic_s: Callable[[], float] | None = None) -> None:
        self.faults: FaultPoints | None = None
        # Looked up at each call: simulated time takes the module's place.
        self._monotonic_s = monotonic_s or (lambda: time.perf_counter())
        self._step = 0
        # Name and beginning in one value, so that no reader pairs one with the other of another phase.
        self._phase = ("idle", self._monotonic_s())
        self._marks = 0
        self._saved_marks = 0
        self._step_unix_s = 0.0
        self._around: str | None = None
        self._nested_s = 0.0
        self.phase_s: dict[str, float] = {}

    def progress(self) -> Progress:
        marks = self._marks + self._saved_marks
        phase, began = self._phase
        return Progress(
            step=self._step,
            phase=phase,
            marks=marks,
            step_unix_s=self._step_unix_s,
            phase_s=max(0.0, self._monotonic_s() - began),
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside towards `name`; that of a phase within it towards that one alone."""
        around, nested_before_s = self._around, self._nested_s
        self._around = name
        self._nested_s = 0.0
        started = self._monotonic_s()
        self._phase = (name, started)
        try:
            if self.faults is not None:
                self.faults.hit(f"step.{name.replace(' ', '_')}", step=self._step)
            yield
            # After an exception the phase stays, so that a report can name it.
            self._phase = (around or "between phases", self._monotonic_s())
        finally:
            spent_s = self._monotonic_s() - started
            self.phase_s[name] = self.phase_s.get(name, 0.0) + spent_s - self._nested_s
            self._around, self._nested_s = around, nested_before_s + spent_s

    def point(self, name: str) -> None:
        """A fault point outside the phases."""
        if self.faults is not None:
            self.faults.hit(name, step=self._step)

    def begin_step(self, step: int) -> None:
        self._step = step

    def mark(self) -> None:
        """Something other than a step got done."""
        self._marks += 1
        if self._phase[0] == "restore":
            self.point("restore.file")

    def mark_saved(self) -> None:
        """A background save has written another file."""
        self._saved_marks += 1
        self.point("save.file")

    def finish_step(self) -> None:
        self._marks += 1
        self._step_unix_s = time.time()
        self.point("step.done")

    def take_phase_s(self) -> dict[str, float]:
        """The timers since the last call, which start again at 0."""
        taken, self.phase_s = self.phase_s, {}
        return taken


class Laps:
    """Seconds of parts that follow each other, by name. Mutated: `seconds`."""

    def __init__(self, monotonic_s: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._monotonic_s = monotonic_s
        self._began_s = monotonic_s()

    def end(self, name: str) -> None:
        """What was done since the last call, or since the beginning, was this."""
        now_s = self._monotonic_s()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._began_s
        self._began_s = now_s
