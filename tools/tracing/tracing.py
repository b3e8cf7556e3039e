"""`Tracing`: the trace of the steps that were requested. Before the first of them all processes begin to record. After
the last one the driver gathers what they have, and a thread writes the file.

Nothing here may harm the run. A failure becomes an event with the reason, and the run goes on without the trace. A
fault of a worker is noticed by the calls that train, as without a trace. What the processes that live have recorded up
to it becomes a file, too, and the next generation traces what it does of these steps. Where hosts change in order, each
generation writes a part.

Threads: the driver's thread calls everything. The writing thread lives from a trace's end until the file is there, and
answers with an event. It is a daemon, since a storage may hang.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.metrics_config import TracedSteps
from podembed.orchestrator.api.run_errors import Failure
from podembed.orchestrator.driver.step_trace import NEVER, StepTrace
from podembed.orchestrator.events.event import Emit, Event
from podembed.orchestrator.events.tracing import ProcessClock, TraceCut, TraceLost, TraceWritten
from podembed.orchestrator.group.backend import Handle
from podembed.orchestrator.group.calls import Calls, answers_within
from podembed.orchestrator.group.process_group import ProcessGroup
from podembed.tools.tracing.clocks import ClockOffset, Recording, asked, best
from podembed.tools.tracing.perfetto import TracedProcess, trace_bytes
from podembed.workers.device.process import DeviceProcess
from podembed.workers.host.host import HostWorker
from podembed.workers.liveness.worker import Worker
from podembed.workers.storage.store import Store
from podembed.workers.tracing.recorder import Recorded, Recorder

FOLDER = "traces"
BEGIN_S = 5.0
GATHER_S = 15.0
"""For the spans of all processes."""
FAULT_S = 2.0
"""The same after a fault: the recovery waits so long at most."""
END_WAIT_S = 30.0
"""For the file, at the end of the run."""


@dataclass(slots=True, kw_only=True)
class _Recording:
    """A trace under way. Mutated: `reached`, the step up to which was trained.

    Attributes:
      handles: handles of the processes that record.
      offsets: offsets of their clocks, as found at its beginning.
    """

    group: ProcessGroup
    generation: int
    first: int
    reached: int
    handles: Sequence[Handle]
    offsets: dict[Worker, list[ClockOffset]]


class Tracing(StepTrace):
    """See the module.

    Args:
      asked: the steps.
      store: store of the run.
    """

    def __init__(self, asked: TracedSteps, store: Store, *, emit: Emit, clock: Clock) -> None:
        super().__init__(Recorder(clock.monotonic_s))
        self._asked, self._store, self._emit = asked, store, emit
        self._generation, self._is_cut = 0, False
        # What is still to be traced; none when it is done.
        self._left: TracedSteps | None = asked
        self._recording: _Recording | None = None
        self._written: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._writing: list[threading.Thread] = []
        self._window_began_s = 0.0

    def begin(self, step: int, total_steps: int, *, generation: int) -> None:
        self._generation, self._is_cut = generation, False
        if self._left is None:
            return
        first, last = max(self._left.first, step), min(self._left.last, total_steps)
        if first >= last:
            is_beyond = self._left.first >= total_steps
            self._lose(f"the run has {total_steps} steps" if is_beyond else f"training goes on from step {step}")
            return
        reasons = [
            *([f"training goes on from step {step}"] if first > self._left.first else []),
            *([f"the run has {total_steps} steps"] if last < self._left.last else []),
        ]
        if reasons:
            reason = ", and ".join(reasons)
            self._emit(TraceCut(asked=str(self._left), first_step=first, last_step=last, reason=reason))
        self._left = replace(self._left, first=first, last=last)

    def boundary(self, step: int) -> int:
        # Steps that are traced have windows of their own.
        if self._left is None:
            return NEVER
        return self._left.first if step < self._left.first else self._left.last

    def before(self, group: ProcessGroup, step: int) -> None:
        if self._left is None or step < self._left.first:
            return
        if self._recording is None:
            with_jax = self._left.with_jax
            self._safely(lambda: self._record(group, step, with_jax))
            group.on_poll()
        self._window_began_s = self.driver.now_s()

    def after(self, step: int) -> None:
        self._tell()
        if self._recording is None or self._left is None:
            return
        name = f"steps {self._recording.reached}:{step}"
        self.driver.add("work", name, self._window_began_s, self.driver.now_s())
        self._recording.reached = step
        if step >= self._left.last:
            self._end()
            self._left = None

    def leave(self) -> None:
        recording = self._recording
        if recording is not None:
            self._end()
            if self._left is not None:
                self._left = replace(self._left, first=recording.reached)

    def cut(self, reason: str, lost: Collection[Worker] = ()) -> None:
        """As in `StepTrace`. What was recorded is written."""
        if self._recording is not None and self._left is not None:
            # The driver knows of whole windows alone; the workers were in the middle of one.
            self._recording.reached, self._is_cut = self._left.last, True
            self._end(lost, reason)

    def close(self) -> None:
        """Waits for the files, though not for ever."""
        self._give_up()
        if self._left is not None and not self._is_cut:
            self._lose(f"training ended before step {self._left.last}")
        for thread in self._writing:
            thread.join(END_WAIT_S)
            if thread.is_alive():
                self._lose(f"the storage has not taken it for {END_WAIT_S:.0f} s")
        self._tell()

    # ------------------------------------------------------------------ one trace

    def _record(self, group: ProcessGroup, step: int, with_jax: bool) -> None:
        hosts, devices = [pair.host for pair in group.handles], [pair.device for pair in group.handles]
        calls = [Calls(one).control(HostWorker.begin_trace) for one in hosts]
        calls += [Calls(one).control(DeviceProcess.begin_trace, with_jax) for one in devices]
        begun = answers_within(group.backend, calls, timeout_s=BEGIN_S, clock=group.clock)
        handles = [*hosts, *devices]
        able = [one for at, one in enumerate(handles) if at in begun and not isinstance(begun[at], Failure)]
        offsets = asked(group, able)
        self._recording = _Recording(
            group=group, generation=self._generation, first=step, reached=step, handles=handles, offsets=offsets
        )
        group.trace = self.driver
        self.driver.begin()

    def _give_up(self) -> None:
        """Forgets what is recorded, if anything is."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.group.trace = Recorder()
            self.driver.end()

    def _end(self, lost: Collection[Worker] = (), fault: str = "") -> None:
        recording = self._recording
        if recording is not None:
            own = self.driver.end()
            self._give_up()
            self._safely(lambda: self._gather(recording, own, lost, fault))

    def _gather(self, recording: _Recording, own: Recorded, lost: Collection[Worker], fault: str) -> None:
        group = recording.group
        calls = [Calls(one).control(Recording.end_trace) for one in recording.handles if one.worker not in lost]
        timeout_s = FAULT_S if fault else GATHER_S
        found = answers_within(group.backend, calls, timeout_s=timeout_s, clock=group.clock)
        recorded: dict[Worker, Recorded] = {
            calls[at].worker: answer for at, answer in found.items() if not isinstance(answer, Failure)
        }
        # After a fault nothing waits for more than it must: the clocks at the beginning will do.
        after = {} if fault else asked(group, [one for one in recording.handles if one.worker in recorded])
        offsets = {
            worker: offset
            # In the file, a host's two processes lie below each other.
            for worker in sorted(recorded, key=lambda one: (one.number, not one.is_host))
            if (offset := best([*recording.offsets.get(worker, ()), *after.get(worker, ())])) is not None
        }
        missing = tuple(str(one.worker) for one in recording.handles if one.worker not in offsets)
        trace = _Trace(recording.first, recording.reached, recording.generation, own, recorded, offsets, missing, fault)
        thread = threading.Thread(target=self._write, args=(trace,), name="write trace", daemon=True)
        self._writing.append(thread)
        thread.start()

    def _write(self, trace: _Trace) -> None:
        try:
            data = trace_bytes(trace.processes(self._store.location))
            self._store.write_new(trace.file, [data])
            self._written.put(trace.written(self._store.locate(trace.file), len(data)))
        except Exception as error:
            self._written.put(TraceLost(asked=str(self._asked), reason=_in_words(error)))

    # ------------------------------------------------------------------ what is reported

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._give_up()
            self._lose(_in_words(error))

    def _lose(self, reason: str) -> None:
        lost, self._left = self._left or self._asked, None
        self._emit(TraceLost(asked=str(lost), reason=reason))

    def _tell(self) -> None:
        while not self._written.empty():
            self._emit(self._written.get())


@dataclass(frozen=True, slots=True)
class _Trace:
    """All that a file is made of.

    Attributes:
      offsets: offsets of the processes whose spans are in it.
      fault: fault that ended it before its last step, in words; empty if none did.
    """

    first: int
    last: int
    generation: int
    driver: Recorded
    recorded: dict[Worker, Recorded]
    offsets: dict[Worker, ClockOffset]
    missing: tuple[str, ...]
    fault: str

    @property
    def file(self) -> str:
        ending = "-cut" if self.fault else ""
        return f"{FOLDER}/steps-{self.first}-{self.last}-generation-{self.generation}{ending}.pftrace"

    def processes(self, run: str) -> list[TracedProcess]:
        facts = {
            "run": run,
            "first step": self.first,
            "last step, not traced": self.last,
            "generation": self.generation,
            "processes that did not answer": ", ".join(self.missing) or "none",
            "ended by": self.fault or "its last step",
        }
        found = [TracedProcess(name="driver", spans=self.driver.spans, facts=facts | _machine(self.driver))]
        for worker, offset in self.offsets.items():
            own = self.recorded[worker]
            clock = {
                "clock, ms ahead of the driver's": offset.offset_s * 1e3,
                "clock, uncertain by ms": offset.uncertainty_s * 1e3,
            }
            found.append(
                TracedProcess(name=str(worker), spans=own.spans, offset_s=offset.offset_s, facts=_machine(own) | clock)
            )
        return found

    def written(self, location: str, size_bytes: int) -> TraceWritten:
        parts = [self.driver, *(self.recorded[worker] for worker in self.offsets)]
        return TraceWritten(
            location=location,
            first_step=self.first,
            last_step=self.last,
            size_bytes=size_bytes,
            num_spans=sum(len(part.spans) for part in parts),
            num_dropped=sum(part.num_dropped for part in parts),
            clocks=tuple(
                ProcessClock(process=str(worker), offset_s=offset.offset_s, uncertainty_s=offset.uncertainty_s)
                for worker, offset in self.offsets.items()
            ),
            missing=self.missing,
            fault=self.fault,
            without_jax=tuple(
                f"{worker}: {self.recorded[worker].without_jax}"
                for worker in self.offsets
                if self.recorded[worker].without_jax
            ),
        )


def _machine(recorded: Recorded) -> dict[str, int | float | str]:
    without = {"without JAX's profile": recorded.without_jax} if recorded.without_jax else {}
    return {
        "machine": recorded.hostname,
        "process id": recorded.process,
        "spans without room": recorded.num_dropped,
        **without,
    }


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
