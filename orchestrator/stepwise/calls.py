"""What a strategy asks of worker processes: one method a call, as `orchestrator.group.calls` has them for runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.tf.engine.engine import EngineMetrics, EngineSpec, Share
from podembed.embedding.tf.replicas.kept import Kept
from podembed.orchestrator.group.backend import Call
from podembed.orchestrator.group.calls import WorkerCalls
from podembed.orchestrator.stepwise.line_calls import LineHandle
from podembed.workers.stepwise.asking import UserQuestion
from podembed.workers.stepwise.device import Ran
from podembed.workers.stepwise.driver_line import DriverLineSpec
from podembed.workers.stepwise.host import StepwiseSpec
from podembed.workers.stepwise.saved_embedding import HostReceipt
from podembed.workers.stepwise.shared_values import EnginePlace


@dataclass(frozen=True, slots=True)
class StepwiseCalls(WorkerCalls):
    """What both processes of a strategy answer."""

    def open_line(self, spec: DriverLineSpec) -> Call[tuple[str, int]]:
        return self.handle.call("open_line", spec)

    def directly(self, method: str, *arguments: Any) -> Call[Any]:
        """A call that is made in every step."""
        if isinstance(self.handle, LineHandle):
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
    """Calls to a device process of a strategy: `workers.stepwise.device.StepwiseDevice`."""

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
    ) -> Call[Ran | UserQuestion]:
        return self.directly("run_function", function, arguments, keywords, after)

    def go_on(self, answer: Any) -> Call[Ran | UserQuestion]:
        return self.directly("go_on", answer)

    def give_up(self) -> Call[None]:
        return self.directly("give_up")
