"""`CallWatch`: finds workers that are frozen, cut off or stuck while the driver waits for the answers to its calls.

Once a second it asks the control side of workers how far they are. It distinguishes four faults:

* *Frozen*: no answer, and the kernel says that the process uses no processor time. Where the process is on another
  machine, the others must say that they stand still.
* *Cut off*: no answer, and its machine takes no connection while others do. Or all answer, and two hosts hear nothing
  of each other's machines.
* *Starved*: no answer, but signs of life; such a worker has `silence_s`.
* *Stuck*: all answer, and nothing is finished within the deadline.

Time counts only as the driver itself sees it pass, a poll at a time. A driver that was stopped for a minute has not
waited a minute for any worker. What is known of a silent worker goes on from one round of calls to the next, since a
start is made of several. While steps are finished, the driver asks only the first workers. Hosts wait for each other in
every step, so a frozen one stops them all, and then all are asked. A watch over a thousand hosts therefore costs the
driver no more than one over ten.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from podembed.orchestrator.api.run_errors import Failure, FailureKind
from podembed.orchestrator.group.backend import Call, Handle
from podembed.orchestrator.group.calls import status
from podembed.orchestrator.group.waiting import blocked, severed
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.liveness.progress import Phase, Progress
from podembed.workers.liveness.worker import Worker

if TYPE_CHECKING:
    from podembed.orchestrator.group.process_group import ProcessGroup

LEAST_STEP_S = 30.0
STEP_FACTOR = 10.0
LEAST_STALL_S = 2.0
STALL_FACTOR = 3.0
SILENCE_S = 30.0
"""How long a process with signs of life may leave a control call unanswered."""
FROZEN_S = 5.0
"""The same for one without."""
POLL_S = 1.0
"""Between two rounds of questions."""
SAMPLE = 16
"""Processes that are asked how far they are, until nothing moves. Then all are."""
# A check that comes later than this was late itself; what passed in between says nothing about the workers.
_LONGEST_GAP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds.

    Attributes:
      start_s: for a worker to start, join, restore and compile; starts again with each finished file. Also for a
        program that a device compiles in the middle of a run.
      step_s: without a finished step, batch or file.
      storage_s: the same while a worker reads input or waits for a save, which repeat requests for a minute by
        themselves.
      stall_s: after so long without progress, the driver asks every process how far it is, not only the first `SAMPLE`.
    """

    start_s: float = 300.0
    step_s: float = 120.0
    storage_s: float = 120.0
    stall_s: float = LEAST_STALL_S

    def for_steps(self, step_s: Sequence[float], *, is_fixed: bool) -> Deadlines:
        """The deadlines of a group whose last steps took so long.

        Args:
          step_s: seconds of a step, one number a window; empty before the first.
          is_fixed: whether the user set the deadline of a step, which then stays.
        """
        if not step_s:
            return self
        median_s = statistics.median(step_s)
        limit_s = self.step_s if is_fixed else max(LEAST_STEP_S, STEP_FACTOR * median_s)
        return replace(self, step_s=limit_s, stall_s=max(LEAST_STALL_S, STALL_FACTOR * median_s))


@dataclass(slots=True, kw_only=True)
class Silence:
    """A status call under way. Mutable.

    Attributes:
      silent_s: how long it has been unanswered.
      idle_s: how long the process is known to have used no processor time; None where that cannot be seen.
      statistics: the last look at the process.
    """

    call: Call[Any]
    handle: Handle
    silent_s: float = 0.0
    idle_s: float | None = None
    statistics: ProcessStatistics | None = None

    def pass_time(self, passed_s: float, statistics: ProcessStatistics | None) -> None:
        """Counts the time since the last look, at the end of which the process looked like `statistics`."""
        self.silent_s += passed_s
        before, self.statistics = self.statistics, statistics
        if statistics is None:
            self.idle_s = None
        elif before is None or (before.process, before.started, before.cpu_s) != (
            statistics.process,
            statistics.started,
            statistics.cpu_s,
        ):
            self.idle_s = 0.0
        else:
            self.idle_s = (self.idle_s or 0.0) + passed_s


def why_frozen(
    silence: Silence,
    *,
    has_answered: bool,
    others_stand_still_s: float,
    start_s: float,
    is_cut_off: bool = False,
    is_users_function: bool = False,
) -> str | None:
    """Why a silent process is given up, or None while it is not.

    Args:
      start_s: for a worker to come up.
      has_answered: any call before. One that never has may still be coming up, and gives no sign that it should.
      others_stand_still_s: for how long workers that do answer have finished nothing; 0 where none answers or they need
        not wait for it.
      is_cut_off: whether its machine does not answer, while that of another worker does.
      is_users_function: whether it runs code that may hold the interpreter's lock for as long as it likes, and sleep
        meanwhile. Only what makes sure that the code cannot go on counts then; its call has a deadline of its own.
    """
    said = f"no answer to a status call for {silence.silent_s:.0f} s"
    if is_cut_off and silence.silent_s >= FROZEN_S:
        return f"{said}, and its machine takes no connection; it is lost, or cut off"
    if silence.statistics is not None and silence.idle_s is not None:
        is_given_up = silence.statistics.is_stopped or (has_answered and not is_users_function)
        if is_given_up and min(silence.silent_s, silence.idle_s) >= FROZEN_S:
            state = (
                "it is stopped by a signal" if silence.statistics.is_stopped else f"state {silence.statistics.state}"
            )
            return f"{said} and no processor time used ({state}); the process is frozen"
    elif has_answered and not is_users_function and min(silence.silent_s, others_stand_still_s) >= FROZEN_S:
        return f"{said} while the others stand still; the process is frozen, or its machine cannot be reached"
    if is_users_function:
        return None
    if silence.silent_s >= (SILENCE_S if has_answered else max(SILENCE_S, start_s)):
        return f"{said}; the process is frozen, cut off, or does not get any processor time"
    return None


class CallWatch:
    """The watch over one round of calls.

    Args:
      timeout_s: for all calls together.
      counts_marks: the time starts again whenever a worker finishes a step or a file, however many there are.
      patient_with: workers that run a user's function.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        timeout_s: float,
        counts_marks: bool,
        patient_with: Collection[Worker] = (),
    ) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._counts_marks = counts_marks
        self._patient_with = patient_with
        self._checked = group.clock.monotonic_s()
        self._next = self._checked + POLL_S
        self._still_s = 0.0
        self._died: list[Failure] = []
        # A worker that was silent before this round is so still.
        self._asked = group.silences
        self._handles = [handle for pair in group.handles for handle in (pair.host, pair.device)]

    def check(self, running: Sequence[Call[Any]]) -> list[Failure]:
        """Failures found since the last call; called often, asks once per poll interval."""
        now = self._group.clock.monotonic_s()
        if now < self._next:
            return []
        self._next = now + POLL_S
        passed_s, self._checked = min(now - self._checked, max(_LONGEST_GAP_S, 2 * POLL_S)), now
        self._still_s += passed_s
        answered = self._collect()
        for silence in self._asked.values():
            silence.pass_time(passed_s, self._group.backend.statistics(silence.handle))
        self._ask()
        # A call reports the death of its worker. A host has no call of its own while functions of the user run.
        if died := [failure for failure in self._died if failure.worker not in {call.worker for call in running}]:
            return died
        if frozen := self._frozen(others_answer=answered):
            return frozen
        if self._still_s > self._limit_s():
            return blocked(self._group.progress, [call.worker for call in running], timeout_s=self._still_s)
        return []

    def _collect(self) -> bool:
        """Takes the answers that came; whether there were any."""
        progress: Mapping[Worker, Progress] = self._group.progress
        before = dict(progress)
        calls = [silence.call for silence in self._asked.values()]
        ended, _ = self._group.backend.settled(calls, timeout_s=0.0) if calls else ([], [])
        for call in ended:
            answer = self._group.backend.result(call)
            if isinstance(answer, Failure) and answer.kind is FailureKind.DIED:
                self._died.append(answer)
            self._group.note(call.worker, answer)
            self._asked.pop(call.worker, None)
        if self._counts_marks and any(p.marks != before.get(w, p).marks for w, p in progress.items()):
            self._still_s = 0.0
        return bool(ended)

    def _ask(self) -> None:
        is_stalled = self._still_s >= self._group.deadlines.stall_s
        for handle in self._handles if is_stalled else self._handles[:SAMPLE]:
            if handle.worker not in self._asked:
                self._asked[handle.worker] = Silence(call=status(handle), handle=handle)

    def _frozen(self, *, others_answer: bool) -> list[Failure]:
        # Workers that do different things, as at the start, do not wait for each other.
        still_s = self._still_s if others_answer and self._counts_marks else 0.0
        # Where no worker answers, it is the driver that is cut off, and all may soon be back.
        cut_off = self._cut_off() if others_answer else frozenset()
        found = []
        for worker, silence in self._asked.items():
            why = why_frozen(
                silence,
                has_answered=worker in self._group.progress,
                others_stand_still_s=still_s,
                start_s=self._group.deadlines.start_s,
                is_cut_off=worker in cut_off,
                is_users_function=worker in self._patient_with,
            )
            if why is not None:
                found.append(Failure(worker=worker, kind=FailureKind.HUNG, message=why))
        if not found and still_s >= FROZEN_S:
            silent = [worker for worker, silence in self._asked.items() if silence.silent_s > 2 * POLL_S]
            return severed(self._group.progress, silent=silent, unheard_s=FROZEN_S)
        return found

    def _cut_off(self) -> frozenset[Worker]:
        """Silent workers of other machines whose machines are silent, too."""
        least_s = FROZEN_S
        silent = [s.handle for s in self._asked.values() if s.statistics is None and s.silent_s >= least_s]
        return self._group.cut_off(silent) if silent else frozenset()

    def _limit_s(self) -> float:
        deadlines, phases = self._group.deadlines, {state.phase for state in self._group.progress.values()}
        longer = [
            deadlines.start_s if phase is Phase.COMPILE else deadlines.storage_s
            for phase in phases
            if phase.has_own_deadline
        ]
        return max([self._timeout_s, *longer])
