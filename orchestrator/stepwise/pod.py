"""`Pod`: the processes of a `PodStrategy`, and calls to all of them at once.

A host process and a device process for each host, started when they are first needed. They are a `ProcessGroup`, as in
training, so a process that died, froze or was cut off is found in the same way. No generation follows here: the pod is
lost then, and so it is when a call fails on one host while others wait for it. Its processes are ended, later calls say
why, and what helps is a new strategy and `TPUEmbedding.restore`.

All calls leave from one thread (`orchestrator.stepwise.request_thread`), whichever thread of the program asks.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure, cause, is_host_fault, listed
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.group.backend import Backend, Call, HostHandles
from podembed.orchestrator.group.calls import Process, answers_within, status
from podembed.orchestrator.group.process_group import ProcessGroup
from podembed.orchestrator.group.watch import Deadlines
from podembed.orchestrator.stepwise.line_calls import LineHandle, StepwiseCalls
from podembed.orchestrator.stepwise.request_thread import RequestThread
from podembed.workers.stepwise.device import StepwiseDevice
from podembed.workers.stepwise.driver_line import DriverLineSpec
from podembed.workers.stepwise.host import StepwiseHost, StepwiseSpec

Answer = TypeVar("Answer")
HostCalls = StepwiseCalls[StepwiseHost]
DeviceCalls = StepwiseCalls[StepwiseDevice]

FUNCTION_GRACE_S = 20.0
LEAVE_S = 10.0
_CLOSED = "The strategy is closed. Expected an open one. Make a new strategy."
# For Ray to say of a process whose connections are cut that it is gone.
DEATH_S = 1.0


class PodLost(RuntimeError):
    """A process of the strategy is gone or hangs; its tables are lost."""


class Pod:
    """All processes of a strategy.

    Args:
      cluster: entered before the processes start, left after they end.
      lost: why the cluster is gone; None while it is there.
      shares_memory: flag of `PodStrategy`.
      threads: threads of a host's kernels.
      clock: time, replaced in tests.
    """

    def __init__(
        self,
        backend: Backend,
        cluster: ExitStack,
        *,
        num_hosts: int,
        start_timeout_s: float,
        step_timeout_s: float,
        lost: Callable[[], str | None] = lambda: None,
        shares_memory: bool = True,
        threads: int = 1,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._cluster, self._cluster_lost = cluster, lost
        # A host waits for its peers up to the step's deadline, and then has to say so.
        self.call_timeout_s = step_timeout_s + 10.0
        self._id, self._token = secrets.token_hex(8), secrets.token_bytes(32)
        self._lost: str | None = None
        self._has_gang = False
        self._is_closed = False
        # Whether what runs in the thread is to end at its next look, as it is when a pod is closed.
        self._ends_requests = False
        self._has_ended = False
        self._requests = RequestThread(f"calls of pod {self._id}")
        # Under way: calls to hosts that were not waited for, and what they are called.
        self._told: Sequence[Call[Any]] = []
        self._told_what = ""
        handles = backend.launch(num_hosts, lambda: None)
        # Not a finalizer, which would run after the hook of Ray, registered later than that of all finalizers: by then
        # the program has left its cluster, and calls would start another one.
        atexit.register(self.close)
        self._group = ProcessGroup(backend, handles, Deadlines(start_s=start_timeout_s), self._look, clock=clock)
        try:
            self.in_turn("the start", lambda: self._form(step_timeout_s, shares_memory, threads))
        except BaseException:
            self.close()
            raise

    def _form(self, step_timeout_s: float, shares_memory: bool, threads: int) -> None:
        num_hosts = len(self.handles)
        specs = [
            StepwiseSpec(
                run_id=self._id,
                generation=1,
                token=self._token,
                host=host,
                num_hosts=num_hosts,
                bind_address="",
                step_timeout_s=step_timeout_s,
                shares_memory=shares_memory,
                threads=threads,
            )
            for host in range(num_hosts)
        ]
        start_s = self._group.deadlines.start_s
        self._addresses = self.ask_hosts(lambda at, host: host.call(StepwiseHost.start, specs[at]), timeout_s=start_s)
        self.ask_hosts(lambda at, host: host.call(StepwiseHost.connect, self._addresses, start_s), timeout_s=start_s)
        # A process that answered once and then does not is not coming up any more.
        for pair, said in zip(
            self.handles, self.ask_hosts(lambda at, host: host.control(StepwiseHost.status)), strict=True
        ):
            self._group.note(pair.host.worker, said)
        self._open_lines(StepwiseHost.open_line, self._hosts)

    def _open_lines(
        self, method: Callable[[Process, DriverLineSpec], tuple[str, int]], workers: Sequence[StepwiseCalls[Process]]
    ) -> None:
        """A step's calls of these processes go over lines of their own from now on, as far as the backend can."""
        able = [worker for worker in workers if isinstance(worker.handle, LineHandle)]
        specs = [DriverLineSpec(name=f"{self._id} {worker.handle.worker}", token=self._token) for worker in able]
        calls = [worker.call(method, spec) for worker, spec in zip(able, specs, strict=True)]
        for worker, spec, address in zip(able, specs, self._gather(calls, self.call_timeout_s), strict=True):
            if isinstance(worker.handle, LineHandle):
                worker.handle.connect(address, spec)

    def in_turn(self, what: str, do: Callable[[], Answer]) -> Answer:
        """Calls a function that asks processes, in the thread of this pod, when those before it have ended.

        Args:
          what: what the program calls it, for messages.

        Raises:
          PodLost: the pod was closed meanwhile.
          Exception: what `do` raised.
        """
        return self._requests.request(what, do)

    def _look(self) -> None:
        """Called in the pod's thread, several times a second while calls are waited for."""
        if self._ends_requests:
            raise PodLost(_CLOSED)

    def join_gang(self) -> None:
        """Makes the device processes one gang, once."""
        if self._has_gang:
            return
        self._require_alive()
        start_s, num_hosts = self._group.deadlines.start_s, len(self.handles)
        (coordinator,) = self._gather(
            [self._devices[0].call(StepwiseDevice.reserve_coordinator, self._addresses[0][0])], start_s
        )
        calls = [
            device.call(StepwiseDevice.join, coordinator, num_hosts, at, start_s)
            for at, device in enumerate(self._devices)
        ]
        self._gather(calls, start_s)
        self._open_lines(StepwiseDevice.open_line, self._devices)
        self._has_gang = True

    @property
    def handles(self) -> Sequence[HostHandles]:
        return self._group.handles

    @property
    def _hosts(self) -> list[HostCalls]:
        return [StepwiseCalls(pair.host) for pair in self.handles]

    @property
    def _devices(self) -> list[DeviceCalls]:
        return [StepwiseCalls(pair.device) for pair in self.handles]

    def ask_hosts(
        self, ask: Callable[[int, HostCalls], Call[Answer]], *, timeout_s: float | None = None
    ) -> list[Answer]:
        """Asks every host process at once. Returns their answers in order.

        Args:
          ask: (number of the host, its calls) → the call under way.

        Raises:
          PodLost: a process is gone or did not answer in time.
          Exception: what a host raised.
        """

        def in_turn() -> list[Answer]:
            self._settle()
            calls = [ask(at, host) for at, host in enumerate(self._hosts)]
            return self._gather(calls, timeout_s or self.call_timeout_s)

        return self.in_turn("a call to the hosts", in_turn)

    def tell_hosts(self, what: str, ask: Callable[[int, HostCalls], Call[Any]]) -> None:
        """As `ask_hosts`, without waiting. The next call waits for the answers, too, and raises what a host raised; so
        does `close`.

        Args:
          what: the name of the call, for what it raises.
        """

        def in_turn() -> None:
            self._settle()
            self._told, self._told_what = [ask(at, host) for at, host in enumerate(self._hosts)], what
            # Calls over lines leave with the first look at them.
            self._group.backend.settled(self._told, timeout_s=0.0)

        self.in_turn(what, in_turn)

    def _settle(self) -> None:
        """Waits for the calls under way, before hosts get another one. Raises as `ask_hosts`."""
        self._require_alive()
        if self._told:
            self._gather([], self.call_timeout_s)

    def ask_devices(self, ask: Callable[[int, DeviceCalls], Call[Answer]], *, timeout_s: float) -> list[Answer]:
        """As `ask_hosts`, of the device processes, which run a function of the user. It begins beside the calls under
        way.
        """

        def in_turn() -> list[Answer]:
            self._require_alive()
            calls = [ask(at, device) for at, device in enumerate(self._devices)]
            # A function of the user may go on for a while after another replica failed, without waiting for it.
            return self._gather(calls, timeout_s, is_users_function=True, grace_s=FUNCTION_GRACE_S)

        return self.in_turn("a call to the devices", in_turn)

    def close(self) -> None:
        """Ends all processes, also those that an interrupted call still keeps busy. Safe to call twice. Raises what a
        call raised that was not waited for.
        """
        self._is_closed = True
        if self._requests.is_busy and not self._has_ended:
            self._ends_requests = True
        self._requests.request("close", self._end)

    def _end(self) -> None:
        if self._has_ended:
            return
        # What was cut short still runs there, and would not let its process leave in order.
        leaves_in_order, self._ends_requests = not self._ends_requests, False
        self._find_loss()
        try:
            if self._lost is None and leaves_in_order:
                self._gather([], LEAVE_S)
        finally:
            if self._lost is None and leaves_in_order:
                self._leave()
            self._group.stop()
            self._cluster.close()
            self._has_ended = True
            atexit.unregister(self.close)

    def _leave(self) -> None:
        """Lets processes leave in order; one that cannot is stopped all the same."""
        calls = [device.call(StepwiseDevice.close) for device in self._devices if self._has_gang]
        calls += [host.call(StepwiseHost.close) for host in self._hosts]
        answers_within(self._group.backend, calls, timeout_s=LEAVE_S, clock=self._group.clock)

    def _gather(
        self,
        calls: Sequence[Call[Any]],
        timeout_s: float,
        *,
        is_users_function: bool = False,
        grace_s: float | None = None,
    ) -> list[Any]:
        """Waits for the calls under way, and for these. Returns the answers to the latter."""
        told, self._told = self._told, []
        try:
            found = self._group.gather([*told, *calls], timeout_s, is_users_function=is_users_function, grace_s=grace_s)
            return found[len(told) :]
        except WorkerFailure as failure:
            _, running = self._group.backend.settled([*told, *calls], timeout_s=0.0)
            if is_host_fault(failure.failures):
                self._lose(cause([*self._deaths(failure.failures), *failure.failures]))
                raise self._loss() from failure
            if running:
                self._lose(f"{cause(failure.failures)}, while {listed([call.worker for call in running])} went on")
            # What devices raise follows from what a host raised in a call before.
            first = min(failure.failures, key=_place_in_order)
            error = first.error or failure
            if first.worker in {call.worker for call in told}:
                error.add_note(f"It was raised by {self._told_what}, before this call, which did not wait for its end.")
            raise error from (first.error and first.error.__cause__)

    def _deaths(self, failures: Sequence[Failure]) -> list[Failure]:
        """Processes that are gone and had no call, where others only report that they miss one."""
        if any(failure.kind is not FailureKind.PEER for failure in failures):
            return []
        calls = [status(handle) for pair in self.handles for handle in (pair.host, pair.device)]
        found = answers_within(self._group.backend, calls, timeout_s=DEATH_S, clock=self._group.clock).values()
        return [one for one in found if isinstance(one, Failure) and one.kind is FailureKind.DIED]

    def _lose(self, why: str) -> None:
        self._lost = why.rstrip(".")
        # Frozen ones, and those that wait for them: what they hold cannot be used any more.
        self._group.stop()

    def _loss(self) -> PodLost:
        return PodLost(
            f"The strategy lost its tables: {self._lost}. Expected all processes to answer. Make a new strategy and "
            "restore what was saved last."
        )

    def _require_alive(self) -> None:
        if self._is_closed:
            raise PodLost(_CLOSED)
        self._find_loss()
        if self._lost is not None:
            raise self._loss()

    def _find_loss(self) -> None:
        """Notes the loss of the cluster. No call of Ray is made any more: it might start another one."""
        why = self._cluster_lost()
        if self._lost is None and why is not None:
            self._lose(why)


def _place_in_order(failure: Failure) -> tuple[bool, int]:
    worker = failure.worker
    return (False, -1) if worker is None else (not worker.is_host, worker.number)


def in_sentences(notice: Callable[[str], None] | None) -> Emit:
    """Tells a program's own function what happens."""
    return lambda event: None if notice is None else notice(event.sentence())
