"""Calls to Ray actors: how they are started, how they are waited for, and what became of them.

Short calls of the step-by-step mode go over lines of their own (`workers.stepwise.driver_line`). Where a line breaks,
Ray says what became of the process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from podembed.orchestrator.api.errors import Failure, FailureKind
from podembed.orchestrator.cluster.connection import LOOPBACK
from podembed.orchestrator.group.backend import Call, DirectHandle, Handle, HostHandles
from podembed.orchestrator.group.worker_errors import death, failure_of, first_line
from podembed.workers.checkpoint.records import TableFiles
from podembed.workers.device.doorway import ChannelError
from podembed.workers.device.process import DeviceSpec
from podembed.workers.host.spec import HostSpec
from podembed.workers.liveness.carried_error import original
from podembed.workers.liveness.worker import Worker
from podembed.workers.stepwise.driver_line import DriverEnd, DriverLineSpec, Ticket
from podembed.workers.stepwise.host import StepwiseSpec
from podembed.workers.stepwise.line import Raised

_LOOK_S = 0.02

# With fewer, an argument within the call arrives sooner: the object store costs milliseconds of each process.
MANY_HOSTS = 32
# A manifest of so many buckets has 100 KB, which is what Ray sends within a call.
MANY_BUCKETS = 1 << 11
# Of so many it has a megabyte, which goes through the object store in any case.
MOST_BUCKETS = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class RayCall:
    """A method call of an actor under way."""

    worker: Worker
    reference: Any
    handle: RayHandle
    method: str


@dataclass(slots=True, eq=False)
class LineCall:
    """A method call over an actor's line under way. Mutated: `inquiry`, a question to Ray once the line is broken."""

    worker: Worker
    ticket: Ticket
    end: DriverEnd
    handle: RayHandle
    method: str
    inquiry: Any = None

    @property
    def has_ended(self) -> bool:
        return self.ticket.answer is not None


class RayHandle(DirectHandle):
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
        self._bind_address = bind_address
        self._compile_cache = compile_cache
        self._line: DriverEnd | None = None
        self._shared = shared

    @property
    def where(self) -> str:
        return f"actor {self.actor._actor_id.hex()[:12]}"

    def call(self, method: str, *arguments: Any) -> Call[Any]:
        from podembed.workers.actors import in_pieces

        own = [self._localized(argument) for argument in arguments]
        shared = self._shared.of_call(own) if self._shared is not None else None
        if shared is not None:
            return RayCall(self.worker, self.actor.run_shared.remote(method, *shared), self, method)
        pieces = in_pieces(own)
        if pieces is None:
            return RayCall(self.worker, self.actor.run.remote(method, *own), self, method)
        return RayCall(self.worker, self.actor.run_with_pieces.remote(method, *pieces), self, method)

    def connect(self, address: tuple[str, int], spec: DriverLineSpec) -> None:
        # Without a line calls go on by Ray.
        with suppress(ChannelError):
            self._line = DriverEnd.connect(address, spec)

    def call_directly(self, method: str, *arguments: Any) -> Call[Any]:
        from podembed.workers.stepwise.actors import RayPacking

        if self._line is None:
            return self.call(method, *arguments)
        return LineCall(self.worker, self._line.begin(RayPacking().pack((method, arguments))), self._line, self, method)

    def hang_up(self) -> None:
        """Closes the line. Safe to call twice."""
        if self._line is not None:
            self._line.close()

    def background(self, method: str, *arguments: Any) -> Call[Any]:
        return RayCall(self.worker, self.actor.run_in_background.remote(method, *arguments), self, method)

    def control(self, method: str, *arguments: Any) -> Call[Any]:
        return RayCall(self.worker, self.actor.run_at_once.remote(method, *arguments), self, method)

    def _localized(self, argument: Any) -> Any:
        """An argument of a call. A spec gets what only its place knows: where to listen, where programs lie."""
        match argument:
            case HostSpec() | StepwiseSpec():
                return replace(argument, bind_address=self._bind_address)
            case DriverLineSpec() if self.machine == _machine_of_the_driver():
                return replace(argument, bind_address=LOOPBACK)
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
      num_hosts: of the generation.
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
    hosts: Sequence[Any], devices: Sequence[Any], *, machines: Sequence[str], bind_address: str, compile_cache: str
) -> list[HostHandles]:
    """Handles of the actors of a generation.

    Args:
      hosts, devices: actors by host.
      machines: by host, id of the node.
      bind_address: where hosts listen; empty for the address by which the cluster knows their machine.
      compile_cache: of the device processes; empty for none.
    """
    shared = SharedArguments(len(hosts))
    return [
        HostHandles(
            RayHandle(Worker("host", rank), host, bind_address=bind_address, machine=machine, shared=shared),
            RayHandle(Worker("device", rank), device, compile_cache=compile_cache, machine=machine),
        )
        for rank, (host, device, machine) in enumerate(zip(hosts, devices, machines, strict=True))
    ]


def of_ray(handle: Handle) -> RayHandle:
    """A handle of the Ray backend, with its actor."""
    if not isinstance(handle, RayHandle):
        raise TypeError(f"Found a {type(handle).__name__}. Expected a handle of the Ray backend.")
    return handle


def _machine_of_the_driver() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def settled(calls: Sequence[Call[Any]], *, timeout_s: float) -> tuple[list[Call[Any]], list[Call[Any]]]:
    """As `Backend.settled`, for calls by Ray and over lines."""
    lines = [call for call in calls if isinstance(call, LineCall)]
    if not lines:
        return _settled_by_ray(calls, timeout_s)
    for end in dict.fromkeys(call.end for call in lines):
        end.advance()
    ended, running = _looked_at(calls)
    if ended or timeout_s <= 0:
        return ended, running
    others = [call for call in running if not _is_by_line(call)]
    # Two ways cannot be waited for at once. Both are in use only while a line is broken.
    wait_s = min(timeout_s, _LOOK_S) if others else timeout_s
    ends = {call.end for call in running if isinstance(call, LineCall) and _is_by_line(call)}
    DriverEnd.advance_all(ends, timeout_s=wait_s) if ends else _settled_by_ray(others, wait_s)
    return _looked_at(calls)


def _looked_at(calls: Sequence[Call[Any]]) -> tuple[list[Call[Any]], list[Call[Any]]]:
    """(ended, running), without waiting. Of a line that is broken Ray is asked what became of the process."""
    for call in calls:
        if isinstance(call, LineCall) and call.end.is_broken and not call.has_ended and call.inquiry is None:
            call.inquiry = call.handle.actor.identity.remote()
    by_ray = _settled_by_ray([call for call in calls if not _is_by_line(call)], 0.0)[0]
    ended = {id(call) for call in by_ray} | {id(c) for c in calls if isinstance(c, LineCall) and c.has_ended}
    return [call for call in calls if id(call) in ended], [call for call in calls if id(call) not in ended]


def _is_by_line(call: Call[Any]) -> bool:
    """Whether its line will say when it has ended."""
    return isinstance(call, LineCall) and call.inquiry is None


def _settled_by_ray(calls: Sequence[Call[Any]], timeout_s: float) -> tuple[list[Call[Any]], list[Call[Any]]]:
    import ray

    if not calls:
        return [], []
    by_reference = {_reference_of(call): call for call in calls}
    ended, running = ray.wait(list(by_reference), num_returns=len(by_reference), timeout=0)
    if not ended and timeout_s > 0:
        ended, running = ray.wait(running, num_returns=1, timeout=timeout_s)
    return [by_reference[r] for r in ended], [by_reference[r] for r in running]


def _reference_of(call: Call[Any]) -> Any:
    """Ray's reference to the answer of a call."""
    call = _ours(call)
    return call.inquiry if isinstance(call, LineCall) else call.reference


def _ours(call: Call[Any]) -> RayCall | LineCall:
    if not isinstance(call, RayCall | LineCall):
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

    if isinstance(call, LineCall) and call.ticket.answer is not None:
        return _of_answer(call, call.ticket.answer)
    try:
        found = ray.get(_reference_of(call))
        return _cut(call.worker, call.end.why) if isinstance(call, LineCall) else found
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


def _of_answer(call: LineCall, content: bytearray) -> Any | Failure:
    """What came over a line."""
    from podembed.workers.stepwise.actors import RayPacking

    try:
        found = RayPacking().unpack(content)
    except Exception as error:
        # Made of classes that only the worker has, or that cannot be copied.
        return replace(failure_of(call.worker, error, details=traceback.format_exc()), error=error)
    if not isinstance(found, Raised):
        return found
    error = found.as_raised()
    return replace(failure_of(call.worker, error, details=found.report), error=error)


def _cut(worker: Worker, why: str) -> Failure:
    """Of a process that lives, though its line is broken. What it does with the call under way is not known."""
    said = f"the connection to its driver broke ({why or 'the process hung up'}), though the process lives"
    return Failure(worker=worker, kind=FailureKind.PEER, message=said)
