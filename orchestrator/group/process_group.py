"""`ProcessGroup`: the processes of some hosts, the one wait for calls to them, and the watch for those that stop
answering.

It knows nothing of what is asked of them. Training (`orchestrator.group.worker_group`) and the step-by-step mode
(`orchestrator.stepwise.pod`) stand on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure, is_host_fault
from podembed.orchestrator.group.backend import Backend, Call, Handle, HostHandles, Locating
from podembed.orchestrator.group.calls import LOOK_S, looks
from podembed.orchestrator.group.waiting import charged
from podembed.orchestrator.group.watch import CallWatch, Deadlines, Silence
from podembed.workers.liveness.progress import Progress
from podembed.workers.liveness.worker import Worker
from podembed.workers.tracing.recorder import Recorder

GRACE_S = 1.5
"""How long after a first failure the others are waited for, so that equal causes are reported together."""
DEATH_GRACE_S = 0.2
GRACE_LOOK_S = 0.05


@dataclass(slots=True)
class ProcessGroup:
    """See the module. Mutated: `progress`, the last answers of the workers' status, and `silences`, the questions
    without one yet.

    Attributes:
      handles: one entry a host.
      on_poll: called while calls are waited for, several times a second.
      trace: recorder of the calls that are waited for while a trace is on.
    """

    backend: Backend
    handles: Sequence[HostHandles]
    deadlines: Deadlines
    on_poll: Callable[[], None]
    progress: dict[Worker, Progress] = field(default_factory=dict)
    silences: dict[Worker, Silence] = field(default_factory=dict)
    is_stopped: bool = False
    clock: Clock = SYSTEM_CLOCK
    trace: Recorder = field(default_factory=Recorder)

    @property
    def num_hosts(self) -> int:
        return len(self.handles)

    def gather(
        self,
        calls: Sequence[Call[Any]],
        timeout_s: float,
        *,
        counts_marks: bool = False,
        bears_storage: bool = False,
        is_users_function: bool = False,
        grace_s: float | None = None,
    ) -> list[Any]:
        """Waits for all calls; their results in order.

        Args:
          timeout_s: for all calls together.
          counts_marks: the time starts again whenever a worker finishes a step or a file, however many there are.
          bears_storage: failures of the storage do not end the wait for the others.
          is_users_function: device processes may leave status calls unanswered until `timeout_s`.
          grace_s: how long the others are waited for after a first failure; None for `GRACE_S`.

        Raises:
          WorkerFailure: with every failure that was seen within the grace period after the first.
        """
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        tolerated: list[Failure] = []
        number = {id(call): at for at, call in enumerate(calls)}
        patient = frozenset(call.worker for call in calls if is_users_function and not call.worker.is_host)
        watch = CallWatch(self, timeout_s=timeout_s, counts_marks=counts_marks, patient_with=patient)
        longest_grace_s = GRACE_S if grace_s is None else grace_s
        failed_at: float | None = None
        began_s = self.trace.now_s() if self.trace.is_on else 0.0
        for ended, running in looks(
            self.backend, calls, clock=self.clock, look_s=lambda: GRACE_LOOK_S if failures else LOOK_S
        ):
            for call in ended:
                result = self.backend.result(call)
                if self.trace.is_on:
                    # Its answer may have come a moment before it was looked for.
                    self.trace.add(f"calls to {call.worker}", call.method, began_s, self.trace.now_s())
                if isinstance(result, Failure):
                    (tolerated if bears_storage and result.is_storage else failures).append(result)
                else:
                    results[number[id(call)]] = result
            if failures:
                failed_at = failed_at or self.clock.monotonic_s()
                # A death is the root; whoever else failed by now is its echo.
                has_died = any(failure.kind is FailureKind.DIED for failure in failures)
                # Where a process is lost, it does not matter how others go on.
                patience_s = GRACE_S if is_host_fault(failures) else longest_grace_s
                limit_s = min(patience_s, DEATH_GRACE_S) if has_died else patience_s
                if not running or self.clock.monotonic_s() - failed_at > limit_s:
                    raise WorkerFailure(charged(failures))
            else:
                self.on_poll()
                if found := watch.check(running):
                    # Who waits for a frozen process has nothing to add.
                    raise WorkerFailure(found)
        if failures or tolerated:
            raise WorkerFailure(charged(failures) or tolerated)
        return [results[at] for at in range(len(calls))]

    def note(self, worker: Worker, answer: Any) -> None:
        """Remembers the answer to a status call; a failed one says nothing here."""
        if isinstance(answer, Progress):
            self.progress[worker] = answer

    def cut_off(self, workers: Sequence[Handle]) -> frozenset[Worker]:
        """Silent workers whose machine does not answer either, where the backend can tell."""
        return self.backend.cut_off(workers) if isinstance(self.backend, Locating) else frozenset()

    def stop(self) -> None:
        """Ends every process of the group and waits until they are gone. Safe to call twice."""
        if not self.is_stopped:
            self.backend.stop(self.handles)
            self.is_stopped = True
