"""One host inside the driver's own process, without Ray: for laptops, notebooks and tests.

Threads: one works for the host and one for the device, and beside each another one writes checkpoints. Each has a queue
and a pool of its own. Control calls run in the caller's thread. The pools are shut down by `stop`, which first aborts
the wait that a thread may be in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import Failure
from podembed.orchestrator.cluster.connection import LOOPBACK
from podembed.orchestrator.group.backend import Call, Handle, HostHandles
from podembed.orchestrator.group.worker_errors import failure_of
from podembed.workers.device.process import DeviceProcess
from podembed.workers.host.host import HostWorker
from podembed.workers.host.spec import HostSpec
from podembed.workers.liveness.carried_error import trace_of
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.liveness.worker import Worker


@dataclass(frozen=True, slots=True, eq=False)
class ThreadCall:
    """A method call of a worker under way."""

    worker: Worker
    future: Future[Any]
    method: str


class ThreadHandle:
    """One worker with a thread for its work and one for what goes on beside it."""

    def __init__(self, worker: Worker, target: HostWorker | DeviceProcess) -> None:
        self.worker = worker
        self.target = target
        name = f"{worker.kind}-{worker.number}"
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.background_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-background")

    @property
    def where(self) -> str:
        return "this process"

    def end(self, reason: str) -> None:
        """Aborts what the worker waits for, and returns when its threads have ended."""
        self.target.abort(reason)
        for pool in (self.pool, self.background_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self.target.close()

    def call(self, method: str, *arguments: Any) -> Call[Any]:
        arrived = [replace(one, bind_address=LOOPBACK) if isinstance(one, HostSpec) else one for one in arguments]
        return ThreadCall(self.worker, self.pool.submit(getattr(self.target, method), *arrived), method)

    def background(self, method: str, *arguments: Any) -> Call[Any]:
        return ThreadCall(self.worker, self.background_pool.submit(getattr(self.target, method), *arguments), method)

    def control(self, method: str, *arguments: Any) -> Call[Any]:
        done: Future[Any] = Future()
        done.set_result(getattr(self.target, method)(*arguments))
        return ThreadCall(self.worker, done, method)


class InProcessBackend:
    """A backend of one host."""

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        if num_hosts != 1:
            raise ConfigurationError(f"Found {num_hosts} hosts in one process. Expected 1. Use Ray for several.")
        return [
            HostHandles(
                ThreadHandle(Worker("host", 0), HostWorker()), ThreadHandle(Worker("device", 0), DeviceProcess())
            )
        ]

    def settled(self, calls: Sequence[Call[Any]], *, timeout_s: float) -> tuple[list[Call[Any]], list[Call[Any]]]:
        futures = {_own(call).future: call for call in calls}
        done, running = wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return [call for f, call in futures.items() if f in done], [call for f, call in futures.items() if f in running]

    def result(self, call: Call[Any]) -> Any | Failure:
        error = _own(call).future.exception()
        if error is None:
            return _own(call).future.result()
        return failure_of(call.worker, error, details=trace_of(error))

    def statistics(self, handle: Handle) -> ProcessStatistics | None:
        """None: threads of this process do not freeze alone."""
        return None

    def stop(self, handles: Sequence[HostHandles]) -> None:
        for pair in handles:
            for handle in (pair.device, pair.host):
                if isinstance(handle, ThreadHandle):
                    handle.end("the driver stopped it")


def _own(call: Call[Any]) -> ThreadCall:
    if not isinstance(call, ThreadCall):
        raise TypeError(f"Found a {type(call).__name__}. Expected a call of this backend.")
    return call
