"""What the driver asks of worker processes: one method a call, with the types of its arguments and of its answer.

This is the one place that knows the names of the workers' methods as text; a backend carries them and reads none.
`looks` is the one loop that waits for calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.tf.engine.engine import EngineMetrics, EngineSpec, Share
from podembed.embedding.tf.replicas.kept import Kept
from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.errors import Failure
from podembed.orchestrator.group.backend import Backend, Call, DirectHandle, Handle
from podembed.workers.checkpoint.shard import DenseFile, ShardReceipt, TableFiles
from podembed.workers.device.process import DenseReceipt, DeviceReady, DeviceSpec, DeviceWindow
from podembed.workers.host.spec import HostReady, HostSpec, HostWindow, ScoredSamples
from podembed.workers.host.survivors.surviving_shard import Restored
from podembed.workers.liveness.progress import Progress, Recorded
from podembed.workers.stepwise.asking import Asked
from podembed.workers.stepwise.device import Ran
from podembed.workers.stepwise.driver_line import DriverLineSpec
from podembed.workers.stepwise.host import StepwiseSpec
from podembed.workers.stepwise.saved_embedding import HostReceipt
from podembed.workers.stepwise.shared_values import EnginePlace

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
    """What every worker process answers."""

    handle: Handle

    def status(self) -> Call[Progress]:
        """Answers while the process works."""
        return self.handle.control("status")

    def close(self) -> Call[None]:
        return self.handle.call("close")


@dataclass(frozen=True, slots=True)
class TracedCalls(WorkerCalls):
    """What both processes of a host answer while they work, for a trace."""

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


@dataclass(frozen=True, slots=True)
class StepwiseCalls(WorkerCalls):
    """What both processes of a strategy answer."""

    def open_line(self, spec: DriverLineSpec) -> Call[tuple[str, int]]:
        return self.handle.call("open_line", spec)

    def directly(self, method: str, *arguments: Any) -> Call[Any]:
        """A call that is made in every step."""
        if isinstance(self.handle, DirectHandle):
            return self.handle.call_directly(method, *arguments)
        return self.handle.call(method, *arguments)


@dataclass(frozen=True, slots=True)
class StepwiseHostCalls(StepwiseCalls):
    """Calls to a host process of a strategy: `workers.stepwise.host.StepwiseHost`."""

    def start(self, spec: StepwiseSpec) -> Call[tuple[str, int]]:
        return self.handle.call("start", spec)

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> Call[None]:
        return self.handle.call("connect", addresses, timeout_s)

    def start_engine(
        self, spec: EngineSpec, placement: Sequence[np.ndarray], restore_from: str | None
    ) -> Call[EnginePlace]:
        return self.handle.call("start_engine", spec, placement, restore_from)

    def share_memory(self) -> Call[tuple[int, ...]]:
        return self.handle.call("share_memory")

    def stop_engine(self) -> Call[None]:
        return self.handle.call("stop_engine")

    def enqueue(self, share: Share, number: int) -> Call[None]:
        return self.directly("enqueue", share, number)

    def dequeue_sized(self, name: str | None) -> Call[tuple[list[np.ndarray], list[int]]]:
        return self.directly("dequeue_sized", name)

    def sizes_to_update(self, name: str | None) -> Call[list[int]]:
        return self.directly("sizes_to_update", name)

    def apply_gradients(
        self, gradients: Sequence[np.ndarray], learning_rates: Sequence[float], name: str | None
    ) -> Call[None]:
        return self.directly("apply_gradients", gradients, learning_rates, name)

    def next_step(self, name: str | None) -> Call[int]:
        return self.directly("next_step", name)

    def discard(self) -> Call[None]:
        return self.handle.call("discard")

    def drain(self) -> Call[None]:
        return self.handle.call("drain")

    def metrics(self) -> Call[EngineMetrics]:
        return self.handle.call("metrics")

    def read_buckets(self, table: int) -> Call[dict[int, dict[str, np.ndarray]]]:
        return self.handle.call("read_buckets", table)

    def save(self, path: str, attempt: str) -> Call[tuple[HostReceipt, int]]:
        return self.handle.call("save", path, attempt)

    def restore(self, path: str) -> Call[None]:
        return self.handle.call("restore", path)


@dataclass(frozen=True, slots=True)
class StepwiseDeviceCalls(StepwiseCalls):
    """Calls to a device process of a strategy: `workers.stepwise.host.StepwiseDevice`."""

    def reserve_coordinator(self, address: str) -> Call[str]:
        return self.handle.call("reserve_coordinator", address)

    def join(self, coordinator: str, num_hosts: int, host: int, timeout_s: float) -> Call[None]:
        return self.handle.call("join", coordinator, num_hosts, host, timeout_s)

    def attach(self, spec: EngineSpec, place: EnginePlace, timeout_s: float) -> Call[None]:
        return self.handle.call("attach", spec, place, timeout_s)

    def detach(self) -> Call[None]:
        return self.handle.call("detach")

    def keep(self, values: Sequence[Kept[Any]]) -> Call[None]:
        return self.handle.call("keep", values)

    def run_function(
        self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], after: int
    ) -> Call[Ran | Asked]:
        return self.directly("run_function", function, arguments, keywords, after)

    def go_on(self, answer: Any) -> Call[Ran | Asked]:
        return self.directly("go_on", answer)

    def give_up(self) -> Call[None]:
        return self.directly("give_up")
