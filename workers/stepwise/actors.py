"""The Ray actors of the step-by-step mode: `StepwiseHost` and `StepwiseDevice`, and the calls from a device actor to
its host actor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate

import ray
import ray.cloudpickle as ray_pickle
import ray.exceptions

from podembed.workers.actors import Actor
from podembed.workers.liveness.carried_error import original
from podembed.workers.stepwise.device import Answer, Arguments, StepwiseDevice
from podembed.workers.stepwise.host import StepwiseHost, StepwiseSpec


class _StepwiseHostActor(Actor):
    """One host of a strategy: its shard of the tables."""

    def __init__(self) -> None:
        super().__init__(StepwiseHost)

    def _arrived(self, argument: Any) -> Any:
        """A spec gets the address by which the cluster knows this machine."""
        if not isinstance(argument, StepwiseSpec):
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
        return ray_pickle.loads(self.content)(*arguments, **named)


@dataclass(frozen=True, slots=True)
class ActorLink:
    """Calls of a device actor to the host actor beside it."""

    actor: Any
    timeout_s: float

    def call(
        self,
        method: Callable[Concatenate[StepwiseHost, Arguments], Answer],
        *arguments: Arguments.args,
        **unused: Arguments.kwargs,
    ) -> Answer:
        return self.begin(method, *arguments, **unused)()

    def begin(
        self,
        method: Callable[Concatenate[StepwiseHost, Arguments], Answer],
        *arguments: Arguments.args,
        **unused: Arguments.kwargs,
    ) -> Callable[[], Answer]:
        reference = self.actor.run.remote(method.__name__, *arguments)

        def answer() -> Answer:
            try:
                return ray.get(reference, timeout=self.timeout_s)
            except ray.exceptions.RayTaskError as error:
                # As the host raised it, so that it has the same type with and without Ray.
                raise original(error.cause) if isinstance(error.cause, Exception) else error from error

        return answer


class _StepwiseDeviceActor(Actor):
    """One host's member of the JAX gang; runs the functions of a strategy."""

    def __init__(self) -> None:
        super().__init__(StepwiseDevice)


# Ray's annotations do not know the options of `remote` in this form.
_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"control": 1, "background": 1},
}
StepwiseHostActor: Any = ray.remote(**_OPTIONS)(_StepwiseHostActor)
StepwiseDeviceActor: Any = ray.remote(**_OPTIONS)(_StepwiseDeviceActor)
