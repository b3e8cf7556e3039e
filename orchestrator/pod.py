"""`Pod`: the processes of a `PodStrategy`, and calls to all of them at once.

A host process and a device process for each host, started when they are first needed. Every call has a deadline. When a
process dies, or one fails while others wait for it, the pod is lost: the hosts' waits are ended, later calls say so,
and the way back is a new strategy and `TPUEmbedding.restore`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.api.errors import WorkerFailure, listed
from podembed.orchestrator.group.backend import Backend, Call, HostHandles
from podembed.orchestrator.group.calls import StepwiseDeviceCalls, StepwiseHostCalls, answers_within, looks
from podembed.workers.stepwise.host import StepwiseSpec

Answer = TypeVar("Answer")

GRACE_S = 2.0
FUNCTION_GRACE_S = 20.0
LEAVE_S = 10.0


class PodLost(RuntimeError):
    """A process of the strategy is gone or hangs; its tables are lost."""


class Outcomes(Protocol):
    """What ended calls returned."""

    def __call__(self, call: Call[Any]) -> Any | BaseException:
        """The value, or the error as the worker raised it."""
        ...


class Pod:
    """All processes of a strategy.

    Args:
      cluster: entered before the processes start, left after they end.
      outcome: value or error of an ended call.
    """

    def __init__(
        self,
        backend: Backend,
        outcome: Outcomes,
        cluster: ExitStack,
        *,
        num_hosts: int,
        start_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._outcome = outcome
        self._cluster = cluster
        self._start_timeout_s = start_timeout_s
        # A host waits for its peers up to the step's deadline, and then has to say so.
        self.call_timeout_s = step_timeout_s + 10.0
        self._lost: str | None = None
        self._has_gang = False
        self._is_closed = False
        self.handles: Sequence[HostHandles] = backend.launch(num_hosts, lambda: None)
        try:
            self._form(step_timeout_s)
        except BaseException:
            self.close()
            raise

    def _form(self, step_timeout_s: float) -> None:
        run_id, token = secrets.token_hex(8), secrets.token_bytes(32)
        num_hosts = len(self.handles)
        specs = [
            StepwiseSpec(
                run_id=run_id,
                generation=1,
                token=token,
                host=host,
                num_hosts=num_hosts,
                bind_address="",
                step_timeout_s=step_timeout_s,
            )
            for host in range(num_hosts)
        ]
        start_s = self._start_timeout_s
        self._addresses = self.ask_hosts(lambda at, host: host.start(specs[at]), timeout_s=start_s)
        self.ask_hosts(lambda at, host: host.connect(self._addresses, start_s), timeout_s=start_s)

    def join_gang(self) -> None:
        """Makes the device processes one gang, once."""
        if self._has_gang:
            return
        first = self._devices[0].reserve_coordinator(self._addresses[0][0])
        (coordinator,) = self._gather([first], self._start_timeout_s)
        num_hosts, timeout_s = len(self.handles), self._start_timeout_s
        calls = [device.join(coordinator, num_hosts, at, timeout_s) for at, device in enumerate(self._devices)]
        self._gather(calls, timeout_s)
        self._has_gang = True

    @property
    def _hosts(self) -> list[StepwiseHostCalls]:
        return [StepwiseHostCalls(pair.host) for pair in self.handles]

    @property
    def _devices(self) -> list[StepwiseDeviceCalls]:
        return [StepwiseDeviceCalls(pair.device) for pair in self.handles]

    def ask_hosts(
        self, ask: Callable[[int, StepwiseHostCalls], Call[Answer]], *, timeout_s: float | None = None
    ) -> list[Answer]:
        """Asks every host process at once. Returns their answers in order.

        Args:
          ask: (number of the host, its calls) → the call under way.

        Raises:
          PodLost: a process is gone or did not answer in time.
          Exception: what a host raised.
        """
        self._require_alive()
        calls = [ask(at, host) for at, host in enumerate(self._hosts)]
        return self._gather(calls, timeout_s or self.call_timeout_s)

    def ask_devices(self, ask: Callable[[int, StepwiseDeviceCalls], Call[Answer]], *, timeout_s: float) -> list[Answer]:
        """As `ask_hosts`, of the device processes."""
        self._require_alive()
        calls = [ask(at, device) for at, device in enumerate(self._devices)]
        # A function of the user may go on for a while after another replica failed, without waiting for it.
        return self._gather(calls, timeout_s, grace_s=FUNCTION_GRACE_S)

    def close(self) -> None:
        """Ends all processes. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._lost is None:
                self._leave()
        finally:
            self._backend.stop(self.handles)
            self._cluster.close()

    def _leave(self) -> None:
        """Lets processes leave in order; one that cannot is stopped all the same."""
        calls = [device.close() for device in self._devices] if self._has_gang else []
        calls += [host.close() for host in self._hosts]
        answers_within(self._backend, calls, timeout_s=LEAVE_S, clock=SYSTEM_CLOCK)

    def _gather(self, calls: Sequence[Call[Any]], timeout_s: float, *, grace_s: float = GRACE_S) -> list[Any]:
        outcomes: dict[int, Any] = {}
        number = {id(call): at for at, call in enumerate(calls)}
        deadline, failed_at = time.monotonic() + timeout_s, None
        for ended, running in looks(self._backend, calls, clock=SYSTEM_CLOCK):
            for call in ended:
                outcomes[number[id(call)]] = self._outcome(call)
            if failed_at is None and any(isinstance(one, BaseException) for one in outcomes.values()):
                failed_at = time.monotonic()
            if running and failed_at is not None and time.monotonic() - failed_at > grace_s:
                self._lose("a process failed while others waited for it", running)
                break
            if running and time.monotonic() > deadline:
                self._lose(f"no answer from {listed([c.worker for c in running])} within {timeout_s:.0f} s", running)
                break
        errors = [one for _, one in sorted(outcomes.items()) if isinstance(one, BaseException)]
        if errors:
            raise self._worst(errors)
        self._require_alive()
        return [outcomes[at] for at in range(len(calls))]

    def _worst(self, errors: Sequence[BaseException]) -> BaseException:
        """The error to report: a lost process before what others say of it, otherwise the first."""
        failure = next((error for error in errors if isinstance(error, WorkerFailure)), None)
        if failure is None:
            return errors[0]
        self._lose(str(failure), ())
        return self._loss(failure)

    def _lose(self, why: str, running: Sequence[Call[Any]]) -> None:
        self._lost = self._lost or why
        for host in self._hosts:
            host.abort(why)
        # What was aborted answers at once; a frozen process does not, and is ended by `close`.
        answers_within(self._backend, running, timeout_s=GRACE_S, clock=SYSTEM_CLOCK)

    def _loss(self, cause: BaseException | None = None) -> PodLost:
        error = PodLost(
            f"The strategy lost its tables: {self._lost}. Expected all hosts to answer. Make a new strategy and "
            "restore what was saved last."
        )
        error.__cause__ = cause
        return error

    def _require_alive(self) -> None:
        if self._is_closed:
            raise PodLost("The strategy is closed. Expected an open one. Make a new strategy.")
        if self._lost is not None:
            raise self._loss()
