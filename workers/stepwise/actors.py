"""The Ray actors of the step-by-step mode: `StepwiseHost` and `StepwiseDevice`, and how functions and values travel
between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.cloudpickle as ray_pickle

from podembed.workers.actors import Actor
from podembed.workers.search_path import missing_module
from podembed.workers.stepwise.device import StepwiseDevice
from podembed.workers.stepwise.driver_line import DriverLineSpec
from podembed.workers.stepwise.host import StepwiseHost, StepwiseSpec


class RayPacking:
    """Values of the calls over lines, in the form in which Ray sends them."""

    def pack(self, value: Any) -> bytes:
        return ray_pickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]

    def unpack(self, content: bytes | bytearray) -> Any:
        return ray_pickle.loads(content)


class _StepwiseHostActor(Actor):
    """One host of a strategy: its shard of the tables."""

    def __init__(self, **named: Any) -> None:
        super().__init__(lambda: StepwiseHost(RayPacking()), **named)

    def run(self, method: str, *arguments: Any) -> Any:
        """A call of the driver by Ray, in its turn: others come over lines."""
        with self._worker.turns.one():
            return super().run(method, *arguments)

    def _arrived(self, argument: Any) -> Any:
        return _with_address(argument)


def _with_address(argument: Any) -> Any:
    """A spec gets the address by which the cluster knows this machine."""
    if not isinstance(argument, StepwiseSpec | DriverLineSpec):
        return argument
    return replace(argument, bind_address=argument.bind_address or ray.util.get_node_ip_address())


@dataclass(frozen=True, slots=True)
class PackedFunction:
    """A function of the user in the form in which it travels. Every call unpacks it, with what it refers to, anew."""

    content: bytes

    @staticmethod
    def of(function: Callable[..., Any]) -> PackedFunction:
        """Raises TypeError for a function that refers to what cannot travel."""
        return PackedFunction(ray_pickle.dumps(function))  # pyright: ignore[reportPrivateImportUsage]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            function = ray_pickle.loads(self.content)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(missing_module(str(error.name)), name=error.name) from error
        return function(*arguments, **named)


class _StepwiseDeviceActor(Actor):
    """One host's member of the JAX gang; runs the functions of a strategy."""

    def __init__(self, **named: Any) -> None:
        super().__init__(lambda: StepwiseDevice(RayPacking()), **named)

    def _arrived(self, argument: Any) -> Any:
        return _with_address(argument)


# Ray's annotations do not know the options of `remote` in this form.
_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"control": 1, "background": 1},
}
StepwiseHostActor: Any = ray.remote(**_OPTIONS)(_StepwiseHostActor)
StepwiseDeviceActor: Any = ray.remote(**_OPTIONS)(_StepwiseDeviceActor)
