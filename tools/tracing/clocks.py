"""The clocks of processes against the driver's.

The driver notes its clock, asks for a process's, and notes its own again. The process answered in between, most likely
in the middle. The answer that came back soonest says the most: half of its round trip bounds the error, since no
process answers before the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from podembed.orchestrator.api.run_errors import Failure
from podembed.orchestrator.group.backend import Handle
from podembed.orchestrator.group.calls import Calls, answers_within
from podembed.orchestrator.group.process_group import ProcessGroup
from podembed.workers.liveness.worker import Worker
from podembed.workers.tracing.recorder import Recorded

ROUNDS = 5
ANSWER_S = 2.0
"""Between two windows a process says its clock within milliseconds."""
BUDGET_S = 4.0
"""For the questions to all processes; the first round is always finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """A process's clock against the driver's.

    Attributes:
      offset_s: what it shows when the driver's shows 0.
      uncertainty_s: the true offset differs by at most so much.
    """

    offset_s: float
    uncertainty_s: float

    @staticmethod
    def of(asked_s: float, found_s: float, answered_s: float) -> ClockOffset:
        """The offset by one question.

        Args:
          asked_s, answered_s: the driver's clock before and after.
          found_s: the process's clock.
        """
        return ClockOffset(
            offset_s=found_s - (asked_s + answered_s) / 2, uncertainty_s=max(0.0, answered_s - asked_s) / 2
        )


class Recording(Protocol):
    """What both processes of a host answer for a trace, while they work."""

    def trace_clock_s(self) -> float: ...

    def end_trace(self) -> Recorded: ...


def best(offsets: Iterable[ClockOffset]) -> ClockOffset | None:
    """The surest; None of none."""
    return min(offsets, key=lambda one: one.uncertainty_s, default=None)


def asked(group: ProcessGroup, processes: Sequence[Handle]) -> dict[Worker, list[ClockOffset]]:
    """Asks every process for its clock, several times. Those that do not answer are missing.

    One is asked at a time, so that no answer waits for another one.
    """
    found: dict[Worker, list[ClockOffset]] = {}
    began_s = group.clock.monotonic_s()
    left = list(processes)
    for round_number in range(ROUNDS):
        for process in [*left]:
            if round_number and group.clock.monotonic_s() - began_s > BUDGET_S:
                return found
            offset = _asked(group, process, group.clock.monotonic_s)
            if offset is None:
                left.remove(process)
            else:
                found.setdefault(process.worker, []).append(offset)
    return found


def _asked(group: ProcessGroup, process: Handle, now_s: Callable[[], float]) -> ClockOffset | None:
    asked_s = now_s()
    call = Calls(process).control(Recording.trace_clock_s)
    answers = answers_within(group.backend, [call], timeout_s=ANSWER_S, clock=group.clock)
    answered_s = now_s()
    found_s = answers.get(0)
    return None if found_s is None or isinstance(found_s, Failure) else ClockOffset.of(asked_s, found_s, answered_s)
