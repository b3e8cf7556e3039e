"""One host inside the driver's own process, without Ray: for laptops, notebooks and tests.

Threads: one works for the host and one for the device, and beside each another one writes checkpoints. Each has a queue
and a pool of its own. Control calls run in the caller's thread. The pools are shut down by `stop`, which first aborts
the wait that a thread may be in.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.errors import Failure
from podembed.orchestrator.cluster.ray_backend import LOOPBACK
from podembed.orchestrator.group.worker_errors import failure_of
from podembed.orchestrator.group.worker_group import Call, Handle, HostHandles
from podembed.workers.device.process import DeviceProcess
from podembed.workers.host.host import HostWorker
from podembed.workers.liveness.process_signs import ProcessSigns
from podembed.workers.liveness.worker import Worker


@dataclass(frozen=True, slots=True, eq=False)
class ThreadCall:
    """A method call of a worker under way."""

    worker: Worker
    future: Future[Any]


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

    def call(self, method: str, *arguments: Any) -> Call:
        if method == "start" and isinstance(self.target, HostWorker):
            arguments = (replace(arguments[0], bind_address=LOOPBACK),)
        return ThreadCall(self.worker, self.pool.submit(getattr(self.target, method), *arguments))

    def background(self, method: str, *arguments: Any) -> Call:
        return ThreadCall(self.worker, self.background_pool.submit(getattr(self.target, method), *arguments))

    def control(self, method: str, *arguments: Any) -> Call:
        done: Future[Any] = Future()
        done.set_result(getattr(self.target, method)(*arguments))
        return ThreadCall(self.worker, done)


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

    def settled(self, calls: Sequence[Call], *, timeout_s: float) -> tuple[list[Call], list[Call]]:
        futures = {call.future: call for call in calls}  # type: ignore[attr-defined]
        done, running = wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return [call for f, call in futures.items() if f in done], [call for f, call in futures.items() if f in running]

    def result(self, call: Call) -> Any | Failure:
        error = call.future.exception()  # type: ignore[attr-defined]
        if error is None:
            return call.future.result()  # type: ignore[attr-defined]
        return failure_of(call.worker, error, details="".join(traceback.format_exception(error)))

    def signs(self, handle: Handle) -> ProcessSigns | None:
        """None: threads of this process do not freeze alone."""
        return None

    def stop(self, handles: Sequence[HostHandles]) -> None:
        for pair in handles:
            for handle in (pair.device, pair.host):
                handle.target.abort("the driver stopped it")  # type: ignore[attr-defined]
                for pool in (handle.pool, handle.background_pool):  # type: ignore[attr-defined]
                    pool.shutdown(wait=True, cancel_futures=True)
                handle.target.close()  # type: ignore[attr-defined]
