"""The backend of a simulated driver: calls that travel over links which may be cut, and the processes of one generation
after another.

A process does its working calls one at a time, and so those in the background; control calls are answered at once
unless it is frozen. What the calls do is `workers`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from podembed.orchestrator.api.run_errors import Failure, FailureKind
from podembed.orchestrator.group.worker_errors import failure_of
from podembed.orchestrator.group.worker_group import HostHandles
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.liveness.worker import Worker
from tests.simulation.workers import Mesh, Shared, SimulatedDevice, SimulatedHost, Surroundings
from tests.simulation.world import FakeClock, Fiber, Process, World

CALL_S = 0.002
DEATH_NOTICED_S = 0.02
SELF_FENCE_S = 30.0
KILL_FROZEN_S = 5.0
GIVE_UP_STOPPING_S = 10.0
LEAVING_SHARE = 0.05


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """A call under way. Mutated: how it ended, and who waits for it."""

    worker: Worker
    method: str
    answer: Any = None
    is_done: bool = False
    waiter: Fiber | None = None


@dataclass(slots=True, eq=False)
class Link:
    """Between a driver and one of its workers. While it is cut, what is sent waits."""

    world: World
    heals_s: float = 0.0

    @property
    def is_cut(self) -> bool:
        return self.world.now_s < self.heals_s

    def cut(self, seconds: float) -> None:
        self.heals_s = max(self.heals_s, self.world.now_s + seconds)

    def send(self, delay_s: float, deliver: Callable[[], Any]) -> None:
        self.world.at(max(self.world.now_s, self.heals_s) + delay_s, deliver)


@dataclass(slots=True, eq=False)
class Lane:
    """Calls that a process does one at a time."""

    around: Surroundings
    process: Process
    _waiting: list[Callable[[], None]] = field(default_factory=list)
    _is_busy: bool = False

    def put(self, work: Callable[[], None]) -> None:
        if self._is_busy:
            self._waiting.append(work)
            return
        self._is_busy = True
        self.around.world.fiber(self.process, partial(self._do, work))

    def _do(self, work: Callable[[], None]) -> None:
        work()
        while self._waiting:
            self._waiting.pop(0)()
        self._is_busy = False


def lanes_of(process: Process, around: Surroundings) -> tuple[Lane, Lane]:
    """For calls that work and for those in the background; the same for all handles of a process."""
    if process not in around.lanes:
        around.lanes[process] = (Lane(around, process), Lane(around, process))
    return around.lanes[process]


class SimulatedHandle:
    """One worker process and the calls to it that have not been answered."""

    def __init__(
        self,
        worker: Worker,
        target: SimulatedHost | SimulatedDevice,
        process: Process,
        link: Link,
        around: Surroundings,
    ) -> None:
        self.worker = worker
        self.target = target
        self.process = process
        self.link = link
        self._around = around
        self._open: list[SimulatedCall] = []
        self._lanes = lanes_of(process, around)
        process.at_death(self._all_lost)

    @property
    def where(self) -> str:
        return "a simulation"

    def call(self, method: str, *arguments: Any) -> SimulatedCall:
        return self._queue(0, method, arguments)

    def background(self, method: str, *arguments: Any) -> SimulatedCall:
        return self._queue(1, method, arguments)

    def _queue(self, lane: int, method: str, arguments: Sequence[Any]) -> SimulatedCall:
        work = partial(getattr(self.target, method), *arguments)
        return self._send(method, lambda call: self._lanes[lane].put(partial(self._work, call, work)))

    def control(self, method: str, *arguments: Any) -> SimulatedCall:
        answer = partial(getattr(self.target, method), *arguments)
        return self._send(method, lambda call: self.process.when_thawed(lambda: self._finish(call, answer())))

    def _send(self, method: str, deliver: Callable[[SimulatedCall], Any]) -> SimulatedCall:
        self._around.world.touch()
        call = SimulatedCall(self.worker, method)
        self._open.append(call)

        def arrive() -> None:
            if self.process.is_alive:
                deliver(call)
            else:
                self._finish(call, self._lost())

        self.link.send(CALL_S, arrive)
        return call

    def _work(self, call: SimulatedCall, work: Callable[[], Any]) -> None:
        try:
            answer = work()
        except Exception as error:
            answer = failure_of(self.worker, error)
        self._finish(call, answer)

    def _finish(self, call: SimulatedCall, answer: Any) -> None:
        if call in self._open:
            self._open.remove(call)
            self.link.send(CALL_S, partial(self._settle, call, answer))

    def _settle(self, call: SimulatedCall, answer: Any) -> None:
        call.answer, call.is_done = answer, True
        if call.waiter is not None:
            call.waiter.wake()

    def _all_lost(self) -> None:
        lost, self._open = self._open, []
        for call in lost:
            self.link.send(DEATH_NOTICED_S, partial(self._settle, call, self._lost()))

    def _lost(self) -> Failure:
        return Failure(worker=self.worker, kind=FailureKind.DIED, message="its process is gone")


class SimulatedBackend:
    """Worker processes of one driver.

    Attributes:
      handles: of all groups that were started, the newest last.
      abandoned: processes that could not be reached when they were to be ended.
    """

    def __init__(self, driver: Process, clock: FakeClock, around: Surroundings) -> None:
        self.handles: list[HostHandles] = []
        self.meshes: list[Mesh] = []
        self.abandoned: set[Process] = set()
        self._driver = driver
        self._clock = clock
        self._around = around
        self._num_groups = 0
        driver.at_death(self._orphaned)

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        return self._launched([None] * num_hosts)

    def _launched(self, kept: Sequence[SimulatedHandle | None]) -> Sequence[HostHandles]:
        """A group of new processes, but for the hosts that are given."""
        self._around.world.touch()
        self._num_groups += 1
        mesh = Mesh(self._around.world, len(kept))
        self.meshes.append(mesh)
        group = [self._host(at, mesh, old) for at, old in enumerate(kept)]
        self.handles = [*self.handles, *group]
        return group

    def _host(self, at: int, mesh: Mesh, kept: SimulatedHandle | None) -> HostHandles:
        world, around = self._around.world, self._around
        shared, label = Shared(), f"{self._driver.name}.{self._num_groups}"
        if kept is None:
            process, link = world.process("host", f"host {at} of {label}"), Link(world)
            host = SimulatedHost(process, self._clock, around)
        else:
            process, link, host = kept.process, kept.link, kept.target
        device_process = world.process("device", f"device {at} of {label}")
        device = SimulatedDevice(device_process, self._clock, around, shared, process)
        host.generation_of = mesh, shared, device  # type: ignore[union-attr]
        # The members of a gang abort when one of them is gone.
        device_process.at_death(partial(world.after, 0.3, partial(self._abort_gang, self._num_groups)))
        return HostHandles(
            SimulatedHandle(Worker("host", at), host, process, link, around),
            SimulatedHandle(Worker("device", at), device, device_process, link, around),
        )

    def _abort_gang(self, group: int) -> None:
        mark = f" of {self._driver.name}.{group}"
        for pair in self.handles:
            if pair.device.process.name.endswith(mark):  # type: ignore[attr-defined]
                pair.device.process.kill()  # type: ignore[attr-defined]

    def settled(self, calls: Sequence[Any], *, timeout_s: float) -> tuple[list[Any], list[Any]]:
        self._around.world.touch()
        fiber = self._around.world.current
        if timeout_s > 0 and calls and fiber is not None and not any(call.is_done for call in calls):
            for call in calls:
                call.waiter = fiber
            fiber.block(timeout_s)
            for call in calls:
                call.waiter = None
        return [call for call in calls if call.is_done], [call for call in calls if not call.is_done]

    def result(self, call: Any) -> Any:
        return call.answer

    def statistics(self, handle: Any) -> ProcessStatistics | None:
        """Hosts of even number share the driver's machine, where a process can be looked at; of the others nothing is
        known.
        """
        process: Process = handle.process
        if not process.is_alive or handle.worker.number % 2:
            return None
        if process.is_frozen:
            return ProcessStatistics(process=1, started=1, cpu_s=-1.0, state="T")
        return ProcessStatistics(process=1, started=1, cpu_s=self._around.world.now_s, state="R")

    def stop(self, handles: Sequence[HostHandles]) -> None:
        self._end([handle for pair in handles for handle in (pair.host, pair.device)])

    def _end(self, workers: Sequence[Any]) -> None:
        """Kills what can be reached; a frozen process takes longer, and one behind a cut link lives on until it fences
        itself.
        """
        world = self._around.world
        unreachable = False
        for handle in workers:
            process: Process = handle.process
            if handle.link.is_cut and process.is_alive:
                unreachable = True
                self.abandoned.add(process)
                world.after(SELF_FENCE_S, process.kill)
                continue
            if process.is_frozen:
                world.sleep(KILL_FROZEN_S)
            process.kill()
        world.sleep(GIVE_UP_STOPPING_S if unreachable else 0.05)

    def fence(self) -> None:
        """The workers that still live have not heard of their driver for too long, and leave."""
        for pair in self.handles:
            for handle in (pair.host, pair.device):
                handle.process.kill()  # type: ignore[attr-defined]

    def _orphaned(self) -> None:
        """The driver is gone: its workers follow at once, but those that it could not reach only when their own lease
        on it ends.
        """
        for pair in self.handles:
            for handle in (pair.host, pair.device):
                process, link = handle.process, handle.link  # type: ignore[attr-defined]
                self._around.world.after(SELF_FENCE_S if link.is_cut else 0.05, process.kill)


class RejoiningBackend(SimulatedBackend):
    """Keeps host processes from one generation to the next. Processes that stand by are not simulated: they save time
    and nothing else.
    """

    def end(self, workers: Sequence[Any]) -> None:
        self._end(workers)

    def fit(self, handles: Sequence[HostHandles]) -> frozenset[int]:
        """Now and then a machine is told to go just then."""
        return frozenset(rank for rank, _ in enumerate(handles) if self._around.noise.random() > LEAVING_SHARE)

    def relaunch(
        self, handles: Sequence[HostHandles], kept: Sequence[int | None], on_wait: Callable[[], None]
    ) -> Sequence[HostHandles]:
        on_wait()
        hosts: list[Any] = [None if old is None else handles[old].host for old in kept]
        return self._launched(hosts)

    def stand_by(
        self, handles: Sequence[HostHandles], job: Any, table_buckets: tuple[int, ...], lease: Any = None
    ) -> None: ...
