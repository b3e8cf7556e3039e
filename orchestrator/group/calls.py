"""What the driver asks of worker processes: a method of the worker's class, with the types of its arguments and of its
answer. `looks` is the one loop that waits for calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.run_errors import Failure
from podembed.orchestrator.group.backend import Backend, Call, Handle
from podembed.workers.liveness.progress import Progress

Process = TypeVar("Process")
Args = ParamSpec("Args")
Answer = TypeVar("Answer")
Method = Callable[Concatenate[Process, Args], Answer]

LOOK_S = 0.2


def looks(
    backend: Backend,
    calls: Sequence[Call[Any]],
    *,
    clock: Clock,
    timeout_s: float | None = None,
    look_s: Callable[[], float] = lambda: LOOK_S,
) -> Iterator[tuple[Sequence[Call[Any]], Sequence[Call[Any]]]]:
    """Waits for calls, a look at a time: (ended since the last look, still running), until all have ended or the time
    is over.

    Args:
      timeout_s: for all together; None waits as long as the caller goes on.
      look_s: the longest wait of the next look.
    """
    running, began_s = list(calls), clock.monotonic_s()
    while running:
        left_s = look_s() if timeout_s is None else min(look_s(), began_s + timeout_s - clock.monotonic_s())
        if left_s <= 0:
            return
        ended, running = backend.settled(running, timeout_s=left_s)
        yield ended, running


def answers_within(
    backend: Backend, calls: Sequence[Call[Any]], *, timeout_s: float, clock: Clock
) -> dict[int, Any | Failure]:
    """What the calls that ended in time returned, or how they failed, by their place among the calls."""
    place = {id(call): at for at, call in enumerate(calls)}
    found: dict[int, Any | Failure] = {}
    for ended, _ in looks(backend, calls, clock=clock, timeout_s=timeout_s):
        found |= {place[id(call)]: backend.result(call) for call in ended}
    return found


@dataclass(frozen=True, slots=True)
class Calls(Generic[Process]):
    """Calls to a worker process of a class. Arguments go by their places. The three kinds are those of `Handle`."""

    handle: Handle

    def call(self, method: Method[Process, Args, Answer], *given: Args.args, **unused: Args.kwargs) -> Call[Answer]:
        return self.handle.call(method.__name__, *given)

    def background(
        self, method: Method[Process, Args, Answer], *given: Args.args, **unused: Args.kwargs
    ) -> Call[Answer]:
        return self.handle.background(method.__name__, *given)

    def control(self, method: Method[Process, Args, Answer], *given: Args.args, **unused: Args.kwargs) -> Call[Answer]:
        return self.handle.control(method.__name__, *given)


class _AnyProcess(Protocol):
    def status(self) -> Progress: ...


def status(process: Handle) -> Call[Progress]:
    """Asks a process of any class what it does, which it answers while it works."""
    return Calls(process).control(_AnyProcess.status)
