"""`Backend`: how a group of processes is reached. Ray actors (`orchestrator.cluster.ray_backend`), threads of this
process (`orchestrator.cluster.in_process`) and the tests' simulation are such.

A backend carries calls and knows nothing of what they mean. `orchestrator.group.calls` gives them names and types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from podembed.orchestrator.api.run_errors import Failure
from podembed.workers.host.spec import HostSpec
from podembed.workers.job.reference import AnyJob
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.liveness.worker import Worker

Answer = TypeVar("Answer", covariant=True)


class Call(Protocol[Answer]):
    """A call under way, which ends with an `Answer`."""

    @property
    def worker(self) -> Worker: ...

    @property
    def method(self) -> str: ...


class Handle(Protocol):
    """One worker process."""

    @property
    def worker(self) -> Worker:
        """The worker that this process is."""
        ...

    @property
    def where(self) -> str:
        """Process id and address, for messages."""
        ...

    def call(self, method: str, *arguments: Any) -> Call[Any]:
        """Starts a method that works: one at a time per process."""
        ...

    def background(self, method: str, *arguments: Any) -> Call[Any]:
        """Starts a long method beside those that work: one at a time per process."""
        ...

    def control(self, method: str, *arguments: Any) -> Call[Any]:
        """Starts a method that answers while another one works."""
        ...


@dataclass(frozen=True, slots=True)
class HostHandles:
    """The two processes of a host."""

    host: Handle
    device: Handle


class Backend(Protocol):
    """Starts worker processes, waits for them and stops them."""

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        """Starts the processes of all hosts, without waiting for them. While it waits for room, it calls `on_wait` at
        least once a second.
        """
        ...

    def settled(self, calls: Sequence[Call[Any]], *, timeout_s: float) -> tuple[list[Call[Any]], list[Call[Any]]]:
        """Waits up to `timeout_s` for at least one call to end. Returns (ended, still running)."""
        ...

    def result(self, call: Call[Any]) -> Any | Failure:
        """The return value of a call that has ended, or its failure."""
        ...

    def statistics(self, handle: Handle) -> ProcessStatistics | None:
        """What the kernel says of a worker's process; None where it is on another machine, or cannot be found."""
        ...

    def stop(self, handles: Sequence[HostHandles]) -> None:
        """Ends all processes and waits until they are gone."""
        ...


@runtime_checkable
class Locating(Backend, Protocol):
    """A backend whose processes are on several machines."""

    def cut_off(self, workers: Sequence[Handle]) -> frozenset[Worker]:
        """Workers whose machine does not answer, not even with a refusal. Takes a second or two; asked of
        silent ones only.
        """
        ...


@runtime_checkable
class Rejoining(Backend, Protocol):
    """A backend that can keep host processes while it replaces the others. Without that, a fault costs all
    processes.
    """

    def end(self, workers: Sequence[Handle]) -> None:
        """Ends single processes and waits until they are gone, frozen ones too."""
        ...

    def fit(self, handles: Sequence[HostHandles]) -> frozenset[int]:
        """Hosts of a generation whose machine is there and may be used by the next one."""
        ...

    def relaunch(
        self, handles: Sequence[HostHandles], kept: Sequence[int | None], on_wait: Callable[[], None]
    ) -> Sequence[HostHandles]:
        """The processes of another generation: host processes that live on, and new ones for all else, without waiting
        for those.

        Args:
          handles: processes of the generation before; only the host processes that are kept still live. They belong to
            the answer from now on.
          kept: per host of the new generation, which host of the one before it was; None for a new process.
          on_wait: callback as for `launch`.
        """
        ...

    def stand_by(
        self,
        handles: Sequence[HostHandles],
        job: AnyJob,
        table_buckets: tuple[int, ...],
        spec: HostSpec | None = None,
    ) -> None:
        """Starts processes that wait to take the place of lost ones, as far as there are none. Does not wait; `stop`
        ends them, too.

        Args:
          spec: description of a host of the generation, whose lease they follow: without a driver they end themselves.
        """
        ...


@runtime_checkable
class Seating(Rejoining, Protocol):
    """A backend in which a host's number follows from its machine."""

    def seats(self, handles: Sequence[HostHandles], alive: frozenset[int], num_hosts: int) -> Sequence[int | None]:
        """Per host of the next generation, which of the living hosts of the one before it is; None for a new process.

        Args:
          handles: processes of the generation before.
        """
        ...
