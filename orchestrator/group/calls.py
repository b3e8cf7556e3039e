"""What the driver asks of worker processes: one method a call, with the types of its arguments and of its answer.

This is the one place that knows the names of the workers' methods as text; a backend carries them and reads none.
`looks` is the one loop that waits for calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.run_errors import Failure
from podembed.orchestrator.group.backend import Backend, Call, Handle
from podembed.workers.checkpoint.shard import DenseFile, ShardReceipt, TableFiles
from podembed.workers.device.process import DenseReceipt, DeviceReady, DeviceSpec, DeviceWindow
from podembed.workers.host.spec import HostReady, HostSpec, HostWindow, ScoredSamples
from podembed.workers.host.survivors.surviving_shard import Restored
from podembed.workers.liveness.progress import Progress, Recorded

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
class WorkerCalls:
    """Calls that every worker process answers."""

    handle: Handle

    def status(self) -> Call[Progress]:
        """Answers while the process works."""
        return self.handle.control("status")

    def close(self) -> Call[None]:
        return self.handle.call("close")


@dataclass(frozen=True, slots=True)
class TracedCalls(WorkerCalls):
    """Calls that both processes of a host answer while they work, for a trace."""

    def trace_clock_s(self) -> Call[float]:
        return self.handle.control("trace_clock_s")

    def begin_trace(self, *, with_jax: bool) -> Call[None]:
        # A host process has no JAX.
        own = () if self.handle.worker.is_host else (with_jax,)
        return self.handle.control("begin_trace", *own)

    def end_trace(self) -> Call[Recorded]:
        return self.handle.control("end_trace")


@dataclass(frozen=True, slots=True)
class HostCalls(WorkerCalls):
    """Calls to a host process: `workers.host.host.HostWorker`."""

    def start(self, spec: HostSpec) -> Call[HostReady]:
        return self.handle.call("start", spec)

    def rejoin(self, spec: HostSpec) -> Call[HostReady]:
        return self.handle.call("rejoin", spec)

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> Call[tuple[str, ...]]:
        return self.handle.call("connect", addresses, timeout_s)

    def restore(self, tables: Sequence[TableFiles] | None) -> Call[Restored]:
        return self.handle.call("restore", tables)

    def warm_start(self, location: str, starts: Sequence[Any]) -> Call[None]:
        return self.handle.call("warm_start", location, starts)

    def train(
        self,
        first_step: int,
        last_step: int,
        is_followed: bool,
        is_profiled: bool = False,
        is_sampled: bool = False,
    ) -> Call[HostWindow]:
        return self.handle.call("train", first_step, last_step, is_followed, is_profiled, is_sampled)

    def verify(self) -> Call[None]:
        return self.handle.call("verify")

    def evaluate(self, first_batch: int, last_batch: int | None) -> Call[ScoredSamples | None]:
        return self.handle.call("evaluate", first_batch, last_batch)

    def begin_save(self, attempt: str, before_failed: bool) -> Call[None]:
        return self.handle.call("begin_save", attempt, before_failed)

    def write_save(self, attempt: str, is_delta: bool) -> Call[ShardReceipt]:
        """Goes on beside the calls that work."""
        return self.handle.background("write_save", attempt, is_delta)

    def settle(self) -> tuple[Call[None], Call[None]]:
        """One of each kind of call: what the host was doing has ended when these have."""
        return self.handle.call("settle"), self.handle.background("settle")

    def acknowledge(self, commit: str) -> Call[None]:
        """Answers while the process works."""
        return self.handle.control("acknowledge", commit)

    def abort(self, reason: str) -> Call[None]:
        """Answers while the process works."""
        return self.handle.control("abort", reason)


@dataclass(frozen=True, slots=True)
class DeviceCalls(WorkerCalls):
    """Calls to a device process: `workers.device.process.DeviceProcess`."""

    def reserve_coordinator(self, address: str) -> Call[str]:
        return self.handle.call("reserve_coordinator", address)

    def start(self, spec: DeviceSpec) -> Call[DeviceReady]:
        return self.handle.call("start", spec)

    def restore(self, files: Sequence[DenseFile] | None) -> Call[None]:
        return self.handle.call("restore", files)

    def warm_start(self, location: str, files: Sequence[DenseFile], parts: Sequence[str]) -> Call[None]:
        return self.handle.call("warm_start", location, files, parts)

    def serve_window(self) -> Call[DeviceWindow]:
        return self.handle.call("serve_window")

    def begin_save(self) -> Call[None]:
        return self.handle.call("begin_save")

    def write_save(self, attempt: str, is_writer: bool) -> Call[DenseReceipt]:
        """Goes on beside the calls that work."""
        return self.handle.background("write_save", attempt, is_writer)
