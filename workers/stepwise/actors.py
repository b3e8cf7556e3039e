"""The Ray actors of the step-by-step mode: `StepwiseHost` and `StepwiseDevice`, and the calls from a device actor to
its host actor.

A refusal, such as a call out of order, comes back as a value and is raised where the call was made, so that it has the
same type with and without Ray. Everything else leaves as Ray reports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate

import ray

from podembed.embedding.engine.order import OrderError
from podembed.workers.actors import _leave_signals_to_the_driver
from podembed.workers.liveness.progress import machine_identity
from podembed.workers.stepwise.host import Answer, Arguments, StepwiseDevice, StepwiseHost, StepwiseSpec
from podembed.workers.storage.errors import StorageError

_REFUSALS: dict[str, type[Exception]] = {
    "order": OrderError,
    "storage": StorageError,
    "type": TypeError,
    "value": ValueError,
}


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that a host refused without having changed anything."""

    kind: str
    message: str

    def error(self) -> Exception:
        return _REFUSALS[self.kind](self.message)


def _refusal_of(error: Exception) -> Refused | None:
    kind = next((kind for kind, one in _REFUSALS.items() if isinstance(error, one)), None)
    return None if kind is None else Refused(kind, str(error))


class _StepwiseHostActor:
    """One host of a strategy: its shard of the tables."""

    def __init__(self) -> None:
        _leave_signals_to_the_driver()
        self._worker = StepwiseHost()

    def run(self, method: str, *arguments: Any) -> Any:
        """Any working method of `StepwiseHost`; a `Refused` in place of an error that is the caller's."""
        try:
            return getattr(self._worker, method)(*(_arrived(argument) for argument in arguments))
        except Exception as error:
            refused = _refusal_of(error)
            if refused is None:
                raise
            return refused

    @ray.method(concurrency_group="control")
    def identity(self) -> tuple[str, int]:
        """Which process this is: machine and process id."""
        return machine_identity(), os.getpid()

    @ray.method(concurrency_group="control")
    def run_at_once(self, method: str, *arguments: Any) -> Any:
        """A method of `StepwiseHost` that answers while another one works."""
        return getattr(self._worker, method)(*arguments)


def _arrived(argument: Any) -> Any:
    """An argument of a call; a spec gets the address by which the cluster knows this machine."""
    if not isinstance(argument, StepwiseSpec):
        return argument
    return replace(argument, bind_address=argument.bind_address or ray.util.get_node_ip_address())


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
        answer: Any = ray.get(self.actor.run.remote(method.__name__, *arguments), timeout=self.timeout_s)
        if isinstance(answer, Refused):
            raise answer.error()
        return answer


class _StepwiseDeviceActor:
    """One host's member of the JAX gang; runs the functions of a strategy."""

    def __init__(self) -> None:
        _leave_signals_to_the_driver()
        self._device = StepwiseDevice()

    def run(self, method: str, *arguments: Any) -> Any:
        """Any working method of `StepwiseDevice`."""
        return getattr(self._device, method)(*arguments)

    @ray.method(concurrency_group="control")
    def identity(self) -> tuple[str, int]:
        """Which process this is: machine and process id."""
        return machine_identity(), os.getpid()


# Ray's annotations do not know the options of `remote` in this form.
_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"control": 1}}
StepwiseHostActor: Any = ray.remote(**_OPTIONS)(_StepwiseHostActor)
StepwiseDeviceActor: Any = ray.remote(**_OPTIONS)(_StepwiseDeviceActor)
