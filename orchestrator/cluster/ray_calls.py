"""Calls to Ray actors: how they are started, how they are waited for, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podembed.orchestrator.api.run_errors import Failure, FailureKind
from podembed.orchestrator.group.backend import Call, Handle, HostHandles
from podembed.orchestrator.group.worker_errors import death, failure_of, first_line
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.device.process import DeviceSpec
from podembed.workers.host.spec import HostSpec
from podembed.workers.liveness.carried_error import original
from podembed.workers.liveness.worker import Worker

# With fewer, an argument within the call arrives sooner: the object store costs milliseconds of each process.
MANY_HOSTS = 32
# A manifest of so many buckets has 100 KB, which is what Ray sends within a call.
MANY_BUCKETS = 1 << 11
# Of so many it has a megabyte, which goes through the object store in any case.
MOST_BUCKETS = 1 << 15


@dataclass(slots=True, eq=False)
class RayCall:
    """A method call of an actor under way. `reference`: Ray's, to the answer."""

    worker: Worker
    reference: Any
    handle: RayHandle
    method: str


class RayHandle:
    """One actor. `machine`: id of the node that it was placed on. `shared`: of all handles of a backend."""

    def __init__(
        self,
        worker: Worker,
        actor: Any,
        *,
        bind_address: str = "",
        compile_cache: str = "",
        machine: str | None = None,
        shared: SharedArguments | None = None,
    ) -> None:
        self.worker = worker
        self.actor = actor
        self.machine = machine
        self.bind_address = bind_address
        self._compile_cache = compile_cache
        self._shared = shared

    @property
    def where(self) -> str:
        return f"actor {self.actor._actor_id.hex()[:12]}"

    def call(self, method: str, *arguments: Any) -> Call[Any]:
        from podembed.workers.actors import in_pieces

        own = [self.localized(argument) for argument in arguments]
        shared = self._shared.of_call(own) if self._shared is not None else None
        if shared is not None:
            return RayCall(self.worker, self.actor.run_shared.remote(method, *shared), self, method)
        pieces = in_pieces(own)
        if pieces is None:
            return RayCall(self.worker, self.actor.run.remote(method, *own), self, method)
        return RayCall(self.worker, self.actor.run_with_pieces.remote(method, *pieces), self, method)

    def background(self, method: str, *arguments: Any) -> Call[Any]:
        return RayCall(self.worker, self.actor.run_in_background.remote(method, *arguments), self, method)

    def control(self, method: str, *arguments: Any) -> Call[Any]:
        return RayCall(self.worker, self.actor.run_at_once.remote(method, *arguments), self, method)

    def localized(self, argument: Any) -> Any:
        """An argument of a call. A spec gets what only its place knows: where to listen, where programs lie."""
        match argument:
            case HostSpec():
                return replace(argument, bind_address=self.bind_address)
            case DeviceSpec() if self._compile_cache:
                return replace(argument, compile_cache=self._compile_cache)
        return argument


class SharedArguments:
    """Arguments that all processes of a generation get go into Ray's object store once.

    A call takes its arguments along. The placement, the manifest's tables and the addresses of all hosts grow with the
    hosts, and so does the number of calls. With 1,024 hosts the driver would pack gigabytes. From the object store each
    machine fetches them once, from the driver or from a machine that has them already.

    Mutated by the driver's thread: the newest arguments of each kind, with references to them.

    Args:
      num_hosts: number of hosts of the generation.
      put: puts a value into the object store, and returns a reference to it.
    """

    def __init__(self, num_hosts: int, put: Callable[[Any], Any] | None = None) -> None:
        self._has_many = num_hosts >= MANY_HOSTS
        self._put = put or _put
        self._found: dict[str, tuple[Any, Any]] = {}

    def of_call(self, arguments: Sequence[Any]) -> tuple[Any, ...] | None:
        """What `Actor.run_shared` takes in place of the arguments of a call: what this process alone gets, and
        references to the rest. None where sharing is of no use.
        """
        least = MANY_BUCKETS if self._has_many else MOST_BUCKETS
        match arguments:
            case [HostSpec() as spec] if self._has_many:
                own = {"host": spec.host, "bind_address": spec.bind_address}
                # No other generation has this token, and its specs differ in nothing else.
                return own, self._reference("spec", spec.token, replace(spec, host=0, bind_address=""))
            case [[(str(), int()), *_] as addresses, *others] if self._has_many:
                return {}, self._reference("addresses", addresses, addresses), *others
            case [[TableFiles(), *_] as tables] if sum(table.num_buckets for table in tables) >= least:
                return {}, self._reference("tables", tables, tables)
        return None

    def _reference(self, kind: str, key: Any, value: Any) -> Any:
        """Ray's reference to a value, which is put into the store when its key is new."""
        known = self._found.get(kind)
        # A token is compared by value; a list that is the same object holds the same.
        if known is None or not (known[0] is key or (isinstance(key, bytes) and known[0] == key)):
            known = self._found[kind] = (key, self._put(value))
        return known[1]


def _put(value: Any) -> Any:
    import ray

    return ray.put(value)


def handles_of(
    hosts: Sequence[Any],
    devices: Sequence[Any],
    *,
    kind: type[RayHandle],
    machines: Sequence[str],
    bind_address: str,
    compile_cache: str,
) -> list[HostHandles]:
    """Handles of the actors of a generation.

    Args:
      hosts, devices: actors by host.
      kind: class of the handles.
      machines: by host, id of the node.
      bind_address: where hosts listen; empty for the address by which the cluster knows their machine.
      compile_cache: compile cache of the device processes; empty for none.
    """
    shared = SharedArguments(len(hosts))
    return [
        HostHandles(
            kind(Worker("host", rank), host, bind_address=bind_address, machine=machine, shared=shared),
            kind(Worker("device", rank), device, compile_cache=compile_cache, machine=machine),
        )
        for rank, (host, device, machine) in enumerate(zip(hosts, devices, machines, strict=True))
    ]


def of_ray(handle: Handle) -> RayHandle:
    """A handle of the Ray backend, with its actor."""
    if not isinstance(handle, RayHandle):
        raise TypeError(f"Found a {type(handle).__name__}. Expected a handle of the Ray backend.")
    return handle


def settled(calls: Sequence[Call[Any]], *, timeout_s: float) -> tuple[list[Call[Any]], list[Call[Any]]]:
    """As `Backend.settled`."""
    import ray

    if not calls:
        return [], []
    by_reference = {_ours(call).reference: call for call in calls}
    ended, running = ray.wait(list(by_reference), num_returns=len(by_reference), timeout=0)
    if not ended and timeout_s > 0:
        ended, running = ray.wait(running, num_returns=1, timeout=timeout_s)
    return [by_reference[r] for r in ended], [by_reference[r] for r in running]


def _ours(call: Call[Any]) -> RayCall:
    if not isinstance(call, RayCall):
        raise TypeError(f"Found a {type(call).__name__}. Expected a call of the Ray backend.")
    return call


def ended_unix_s(call: Call[Any]) -> float | None:
    """When Ray's head learnt that the actor of a call was gone; None where it does not say."""
    import ray.exceptions
    from ray._private.state import state

    try:
        # Ray has no public name for this without its dashboard.
        ended_ms = state.actor_table(_ours(call).handle.actor._actor_id.hex()).get("EndTime", 0)
    except (ray.exceptions.RayError, ConnectionError, TimeoutError):
        return None
    return ended_ms / 1000 or None


def outcome(call: Call[Any]) -> Any | Failure:
    """What an ended call returned, or how it failed."""
    import ray
    import ray.exceptions

    try:
        return ray.get(_ours(call).reference)
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
