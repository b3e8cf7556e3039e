"""`LineBackend`: the actors of a strategy. Their short calls go over lines of their own
(`workers.stepwise.driver_line`). Where a line breaks, Ray says what became of the process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.api.run_errors import Failure, FailureKind
from podembed.orchestrator.cluster.connection import LOOPBACK
from podembed.orchestrator.cluster.places import this_node
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.cluster.ray_calls import RayCall, RayHandle
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.group.backend import Call, HostHandles
from podembed.orchestrator.group.calls import Answer, Args, Calls, Method, Process
from podembed.orchestrator.group.worker_errors import failure_of
from podembed.workers.device.doorway import ChannelError
from podembed.workers.liveness.worker import Worker
from podembed.workers.stepwise.driver_line import DriverEnd, DriverLineSpec, Ticket
from podembed.workers.stepwise.host import StepwiseSpec
from podembed.workers.stepwise.line import Raised

_LOOK_S = 0.02


@dataclass(slots=True, eq=False, kw_only=True)
class LineCall(RayCall):
    """A method call over an actor's line under way. Mutated: `reference`, to the answer of a question that Ray is asked
    once the line is broken; None before.
    """

    ticket: Ticket
    end: DriverEnd
    reference: Any = None

    @property
    def has_ended(self) -> bool:
        return self.ticket.answer is not None

    @property
    def is_by_line(self) -> bool:
        """Whether its line will say when it has ended."""
        return self.reference is None


class LineHandle(RayHandle):
    """One actor, with a line once it is connected."""

    _line: DriverEnd | None = None

    def connect(self, address: tuple[str, int], spec: DriverLineSpec) -> None:
        """Opens the short way to a process that answers there, if it can be reached from here."""
        # Without a line calls go on by Ray.
        with suppress(ChannelError):
            self._line = DriverEnd.connect(address, spec)

    def call_directly(self, method: str, *arguments: Any) -> Call[Any]:
        """As `call`, by the line where there is one. The process may be in no other call but control calls."""
        from podembed.workers.stepwise.actors import RayPacking

        if self._line is None:
            return self.call(method, *arguments)
        ticket = self._line.begin(RayPacking().pack((method, arguments)))
        return LineCall(worker=self.worker, ticket=ticket, end=self._line, handle=self, method=method)

    def hang_up(self) -> None:
        """Closes the line. Safe to call twice."""
        if self._line is not None:
            self._line.close()

    def localized(self, argument: Any) -> Any:
        match argument:
            case StepwiseSpec():
                return replace(argument, bind_address=self.bind_address)
            case DriverLineSpec() if self.machine == this_node():
                return replace(argument, bind_address=LOOPBACK)
        return super().localized(argument)


@dataclass(frozen=True, slots=True)
class StepwiseCalls(Calls[Process]):
    """Calls to a `StepwiseHost` or a `StepwiseDevice` of `workers.stepwise`."""

    def directly(self, method: Method[Process, Args, Answer], *given: Args.args, **unused: Args.kwargs) -> Call[Answer]:
        """A call that is made in every step."""
        ask = self.handle.call_directly if isinstance(self.handle, LineHandle) else self.handle.call
        return ask(method.__name__, *given)


class LineBackend(RayBackend):
    """As `RayBackend`, for the processes of a strategy.

    Args:
      scaling, emit, lost, answers: of `RayBackend`.
    """

    handle_class = LineHandle

    def __init__(
        self, scaling: ScalingConfig, emit: Emit, *, lost: Callable[[], str | None], answers: Callable[[], bool]
    ) -> None:
        from podembed.workers.stepwise.actors import StepwiseDeviceActor, StepwiseHostActor

        super().__init__(scaling, emit, (StepwiseHostActor, StepwiseDeviceActor), lost=lost, answers=answers)

    def _settled(self, calls: Sequence[Call[Any]], timeout_s: float) -> tuple[list[Call[Any]], list[Call[Any]]]:
        lines = [call for call in calls if isinstance(call, LineCall)]
        if not lines:
            return super()._settled(calls, timeout_s)
        for end in dict.fromkeys(call.end for call in lines):
            end.advance()
        ended, running = self._looked_at(calls)
        if ended or timeout_s <= 0:
            return ended, running
        others = [call for call in running if not _is_by_line(call)]
        # Two ways cannot be waited for at once. Both are in use only while a line is broken.
        wait_s = min(timeout_s, _LOOK_S) if others else timeout_s
        ends = {call.end for call in running if isinstance(call, LineCall) and call.is_by_line}
        DriverEnd.advance_all(ends, timeout_s=wait_s) if ends else super()._settled(others, wait_s)
        return self._looked_at(calls)

    def _looked_at(self, calls: Sequence[Call[Any]]) -> tuple[list[Call[Any]], list[Call[Any]]]:
        """(ended, running), without waiting. Of a line that is broken Ray is asked what became of the process."""
        for call in calls:
            if isinstance(call, LineCall) and call.end.is_broken and not call.has_ended and call.is_by_line:
                call.reference = call.handle.actor.identity.remote()
        by_ray = super()._settled([call for call in calls if not _is_by_line(call)], 0.0)[0]
        ended = {id(call) for call in by_ray} | {id(c) for c in calls if isinstance(c, LineCall) and c.has_ended}
        return [call for call in calls if id(call) in ended], [call for call in calls if id(call) not in ended]

    def _outcome(self, call: Call[Any]) -> Any | Failure:
        if isinstance(call, LineCall) and call.ticket.answer is not None:
            return of_answer(call.worker, call.ticket.answer)
        found = super()._outcome(call)
        if isinstance(call, LineCall) and not isinstance(found, Failure):
            return _cut(call.worker, call.end.why)
        return found

    def stop(self, handles: Sequence[HostHandles]) -> None:
        for handle in [handle for pair in handles for handle in (pair.host, pair.device)]:
            if isinstance(handle, LineHandle):
                handle.hang_up()
        super().stop(handles)


def _is_by_line(call: Call[Any]) -> bool:
    return isinstance(call, LineCall) and call.is_by_line


def of_answer(worker: Worker, content: bytearray) -> Any | Failure:
    """What came over a line."""
    from podembed.workers.stepwise.actors import RayPacking

    try:
        found = RayPacking().unpack(content)
    except Exception as error:
        # Made of classes that only the worker has, or that cannot be copied.
        return replace(failure_of(worker, error, details=traceback.format_exc()), error=error)
    if not isinstance(found, Raised):
        return found
    error = found.as_raised()
    return replace(failure_of(worker, error, details=found.report), error=error)


def _cut(worker: Worker, why: str) -> Failure:
    """The failure of a process that lives, but whose line is broken. Whether it makes the call under way is unknown."""
    said = f"the connection to its driver broke ({why or 'the process hung up'}), though the process lives"
    return Failure(worker=worker, kind=FailureKind.PEER, message=said)
