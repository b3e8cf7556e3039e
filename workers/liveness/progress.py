"""`Progress`: what a worker says of itself while it works, and the timers of a step's phases.

The working thread writes a `Tracker`, but for the count of files that a background save has written, which is the
saving thread's. The control thread reads both. Every field is replaced whole, so a reader sees old or new values, never
torn ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from podembed.workers.faults.inject import FaultPoints
from podembed.workers.liveness.worker import Worker
from podembed.workers.tracing.recorder import Recorded, Recorder

__all__ = ["WORK", "Phase", "Progress", "Recorded", "Recorder", "Stopwatch", "Tracker"]

WORK = "work"
"""The track of a process's working thread."""


class _Is(Enum):
    WAITING_FOR_HOSTS = auto()
    WAITING_FOR_DEVICE = auto()
    WAITING_FOR_STORAGE = auto()
    RESTING = auto()


class Phase(StrEnum):
    """The work that a worker does, and what it can be held responsible for meanwhile. Users see the text.

    Attributes:
      waits_for_hosts: nothing is done here but waiting for other hosts, so a long stay is no fault of this one.
      waits_for_device: the same for this host's device process.
      depends_on_storage: it lasts as long as storage lets it; storage has deadlines of its own, with repetitions.
      is_resting: a host has nothing to do, or waits for its save to go on.
    """

    waits_for_hosts: bool
    waits_for_device: bool
    depends_on_storage: bool
    is_resting: bool

    def __new__(cls, text: str, *properties: _Is) -> Phase:
        phase = str.__new__(cls, text)
        phase._value_ = text
        phase.waits_for_hosts = _Is.WAITING_FOR_HOSTS in properties
        phase.waits_for_device = _Is.WAITING_FOR_DEVICE in properties
        phase.depends_on_storage = _Is.WAITING_FOR_STORAGE in properties
        phase.is_resting = _Is.RESTING in properties
        return phase

    @property
    def waits_for_others(self) -> bool:
        """Whether a host in this phase does no work of its own."""
        return self.waits_for_hosts or self.waits_for_device

    @property
    def has_own_deadline(self) -> bool:
        """Whether a stay may be longer than a step's deadline. Its beginning and its end count as progress, so that
        time before it is not held against it, nor the stay against what follows.
        """
        return self.depends_on_storage or self is Phase.COMPILE

    @property
    def fault_point(self) -> str:
        """The point of a fault plan that is hit as the phase begins."""
        return f"step.{self.value.replace(' ', '_')}"

    # Of both kinds of worker.
    IDLE = "idle", _Is.RESTING
    BETWEEN = "between phases", _Is.RESTING
    RESTORE = "restore", _Is.WAITING_FOR_STORAGE

    # Of a host, in the order of a step.
    READ = "read", _Is.WAITING_FOR_STORAGE
    DEDUP = "dedup"
    ID_EXCHANGE = "id exchange", _Is.WAITING_FOR_HOSTS
    GROUP = "group"
    SPLIT = "split"
    # Fault plans and the history of stored runs name these phases, so the text stays.
    PREFETCH_GATHER = "early gather"
    PREFETCH_POOL = "early pool"
    PREFETCH_EXCHANGE = "early exchange", _Is.WAITING_FOR_HOSTS
    GATHER = "gather"
    POOL_FOR_OTHERS = "pool for others"
    POOL = "pool"
    ACTIVATION_EXCHANGE = "activation exchange", _Is.WAITING_FOR_HOSTS
    DEVICE = "device", _Is.WAITING_FOR_DEVICE
    GRADIENT_SUM = "gradient sum"
    GRADIENT_EXCHANGE = "gradient exchange", _Is.WAITING_FOR_HOSTS
    UPDATE = "update"

    # Of a host, beside its steps.
    WAIT_FOR_SAVE = "wait for save", _Is.WAITING_FOR_STORAGE, _Is.RESTING
    UNDO = "undo"
    BUCKET_EXCHANGE = "bucket exchange", _Is.WAITING_FOR_HOSTS

    # Of a device process.
    JOIN = "join"
    COMPILE = "compile"
    SERVE = "serve"
    WAIT_FOR_HOST = "wait for host", _Is.WAITING_FOR_HOSTS
    COPY_FOR_SAVE = "copy for save"
    USER_FUNCTION = "user function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A worker's state at one moment.

    Attributes:
      step: the step it works on, or did last.
      phase: work that it is doing.
      marks: grows with every finished step or file, and at both ends of a phase with a deadline of its own; two
        equal readings far apart mean it is stuck.
      step_unix_s: wall-clock time of the last finished step, 0 before the first.
      phase_s: how long it has been in the phase.
      waits_for: the workers without which it cannot go on; empty while it works itself.
      unheard_s: by number, hosts from whose machines nothing came, not even answers of their kernels, and for how
        long.
    """

    step: int
    phase: Phase
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

    Args:
      monotonic_s: clock of the phases; None for that of this machine.
      cpu_s: processor seconds so far, by default of the thread that calls. Waiting takes none, nor does sharing a
        processor.

    Attributes:
      faults: fault points of this process, where a plan injects faults; each phase is one, its `fault_point`.
      trace: recorder of phases and steps while a trace is on.
      phase_s, phase_cpu_s: seconds and processor seconds of each phase. Those of a phase within another one count there
        alone.
    """

    def __init__(
        self, monotonic_s: Callable[[], float] | None = None, cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        self.faults: FaultPoints | None = None
        # Looked up at each call: simulated time takes the module's place.
        self._monotonic_s = monotonic_s or (lambda: time.perf_counter())
        self.trace = Recorder(self._monotonic_s)
        self._step = 0
        self._step_began_s = 0.0
        # Name and beginning in one value, so that no reader pairs one with the other of another phase.
        self._phase = (Phase.IDLE, self._monotonic_s())
        self._marks = 0
        self._saved_marks = 0
        self._step_unix_s = 0.0
        self._around: Phase | None = None
        self._nested_s = 0.0
        self.phase_s: dict[Phase, float] = {}
        self._cpu_s = cpu_s
        self._nested_cpu_s = 0.0
        self._taken_cpu_s = 0.0
        self.phase_cpu_s: dict[Phase, float] = {}

    @property
    def now_s(self) -> float:
        """Reading of the clock that times the phases."""
        return self._monotonic_s()

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
    def phase(self, phase: Phase) -> Iterator[None]:
        """Counts the time inside towards `phase`; that of a phase within it towards that one alone."""
        around, nested_before_s, nested_before_cpu_s = self._around, self._nested_s, self._nested_cpu_s
        self._around = phase
        self._nested_s = self._nested_cpu_s = 0.0
        began_cpu_s = self._cpu_s()
        started = self._monotonic_s()
        self._phase = (phase, started)
        self._marks += phase.has_own_deadline
        try:
            if self.faults is not None:
                self.faults.hit(phase.fault_point, step=self._step)
            yield
            self._marks += phase.has_own_deadline
            # After an exception the phase stays, so that a report can name it.
            self._phase = (around or Phase.BETWEEN, self._monotonic_s())
        finally:
            ended_s = self._monotonic_s()
            spent_s = ended_s - started
            if self.trace.is_on:
                self.trace.add(WORK, phase.value, started, ended_s, step=self._step)
            self.phase_s[phase] = self.phase_s.get(phase, 0.0) + spent_s - self._nested_s
            cpu_s = self._cpu_s() - began_cpu_s
            self.phase_cpu_s[phase] = self.phase_cpu_s.get(phase, 0.0) + cpu_s - self._nested_cpu_s
            self._around, self._nested_s = around, nested_before_s + spent_s
            self._nested_cpu_s = nested_before_cpu_s + cpu_s

    def point(self, name: str) -> None:
        """A fault point outside the phases."""
        if self.faults is not None:
            self.faults.hit(name, step=self._step)

    def begin_step(self, step: int) -> None:
        self._step = step
        if self.trace.is_on:
            self._step_began_s = self._monotonic_s()

    def mark(self) -> None:
        """Something other than a step got done."""
        self._marks += 1
        if self._phase[0] is Phase.RESTORE:
            self.point("restore.file")

    def mark_saved(self) -> None:
        """A background save has written another file."""
        self._saved_marks += 1
        self.point("save.file")

    def finish_step(self) -> None:
        self._marks += 1
        self._step_unix_s = time.time()
        if self.trace.is_on:
            self.trace.add(WORK, f"step {self._step}", self._step_began_s, self._monotonic_s())
        self.point("step.done")

    def take_phase_s(self) -> dict[Phase, float]:
        """The timers since the last call, which start again at 0."""
        taken, self.phase_s = self.phase_s, {}
        return taken

    def take_phase_cpu_s(self) -> dict[Phase, float]:
        """The processor seconds since the last call, which start again at 0, and those between phases. For the thread
        whose phases these are.
        """
        now_s = self._cpu_s()
        between_s = max(0.0, now_s - self._taken_cpu_s - sum(self.phase_cpu_s.values()))
        taken = self.phase_cpu_s | {Phase.BETWEEN: between_s}
        self.phase_cpu_s, self._taken_cpu_s = {}, now_s
        return taken


class Stopwatch:
    """Seconds of parts that follow each other, by name. Mutated: `seconds`."""

    def __init__(self, monotonic_s: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._monotonic_s = monotonic_s
        self._began_s = monotonic_s()

    def end(self, name: str) -> None:
        """Ends the part that began with the last call, or with the stopwatch, and names it."""
        now_s = self._monotonic_s()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._began_s
        self._began_s = now_s
