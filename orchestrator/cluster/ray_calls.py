"""Calls to Ray actors: how they are started, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from podembed.orchestrator.api.errors import Failure, FailureKind
from podembed.orchestrator.group.backend import Call, Handle
from podembed.orchestrator.group.worker_errors import death, failure_of, first_line
from podembed.workers.device.process import DeviceSpec
from podembed.workers.host.spec import HostSpec
from podembed.workers.liveness.carried_error import original
from podembed.workers.liveness.worker import Worker
from podembed.workers.stepwise.host import StepwiseSpec


@dataclass(frozen=True, slots=True, eq=False)
class RayCall:
    """A method call of an actor under way."""

    worker: Worker
    reference: Any
    handle: RayHandle


class RayHandle:
    """One actor. `machine`: id of the node that it was placed on."""

    def __init__(
        self, worker: Worker, actor: Any, *, bind_address: str = "", compile_cache: str = "", machine: str | None = None
    ) -> None:
        self.worker = worker
        self.actor = actor
        self.machine = machine
        self._bind_address = bind_address
        self._compile_cache = compile_cache

    @property
    def where(self) -> str:
        return f"actor {self.actor._actor_id.hex()[:12]}"

    def call(self, method: str, *arguments: Any) -> Call[Any]:
        from podembed.workers.actors import in_pieces

        own = [self._localized(argument) for argument in arguments]
        pieces = in_pieces(own)
        if pieces is None:
            return RayCall(self.worker, self.actor.run.remote(method, *own), self)
        return RayCall(self.worker, self.actor.run_with_pieces.remote(method, *pieces), self)

    def background(self, method: str, *arguments: Any) -> Call[Any]:
        return RayCall(self.worker, self.actor.run_in_background.remote(method, *arguments), self)

    def control(self, method: str, *arguments: Any) -> Call[Any]:
        return RayCall(self.worker, self.actor.run_at_once.remote(method, *arguments), self)

    def _localized(self, argument: Any) -> Any:
        """An argument of a call. A spec gets what only its place knows: where to listen, where programs lie."""
        match argument:
            case HostSpec() | StepwiseSpec():
                return replace(argument, bind_address=self._bind_address)
            case DeviceSpec() if self._compile_cache:
                return replace(argument, compile_cache=self._compile_cache)
        return argument


def of_ray(handle: Handle) -> RayHandle:
    """A handle of the Ray backend, with its actor."""
    if not isinstance(handle, RayHandle):
        raise TypeError(f"Found a {type(handle).__name__}. Expected a handle of the Ray backend.")
    return handle


def reference_of(call: Call[Any]) -> Any:
    """Ray's reference to the answer of a call."""
    if not isinstance(call, RayCall):
        raise TypeError(f"Found a {type(call).__name__}. Expected a call of the Ray backend.")
    return call.reference


def ended_unix_s(call: Call[Any]) -> float | None:
    """When Ray's head learnt that the actor of a call was gone; None where it does not say."""
    import ray.exceptions
    from ray._private.state import state

    if not isinstance(call, RayCall):
        raise TypeError(f"Found a {type(call).__name__}. Expected a call of the Ray backend.")
    try:
        # Ray has no public name for this without its dashboard.
        ended_ms = state.actor_table(call.handle.actor._actor_id.hex()).get("EndTime", 0)
    except (ray.exceptions.RayError, ConnectionError, TimeoutError):
        return None
    return ended_ms / 1000 or None


def outcome(call: Call[Any]) -> Any | Failure:
    """What an ended call returned, or how it failed."""
    import ray
    import ray.exceptions

    try:
        return ray.get(reference_of(call))
    except ray.exceptions.ActorDiedError as error:
        return Failure(
            worker=call.worker, kind=FailureKind.DIED, message=death(str(error)), is_preemption=error.preempted
        )
    except ray.exceptions.RayTaskError as error:
        source = original(error.cause) if isinstance(error.cause, Exception) else error
        if source is not error:
            # Ray's report has the traceback of the other process.
            source.__cause__ = error
        return replace(failure_of(call.worker, source, details=str(error)), error=source)
    except ray.exceptions.OutOfMemoryError as error:
        return Failure(worker=call.worker, kind=FailureKind.DIED, message=first_line(str(error)), memory="host")
    except ray.exceptions.RayError as error:
        return Failure(worker=call.worker, kind=FailureKind.DIED, message=first_line(str(error)))
