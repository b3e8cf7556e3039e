"""The device process of a host in the step-by-step mode: it runs the functions of the user. They reach the tables
through the host process beside it, over a line of their own (`workers.stepwise.line`).

Plain classes; `workers.stepwise.actors` wraps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from podembed.embedding.tf.engine.engine import EngineMetrics, EngineSpec, LearningRates, Share, rates_at
from podembed.embedding.tf.engine.table_storage import WrittenTables
from podembed.embedding.tf.replicas.kept import Kept, forget_kept, keep
from podembed.embedding.tf.replicas.replica_context import ReplicaContext, in_replica
from podembed.workers.liveness.progress import Phase, Progress, Tracker
from podembed.workers.liveness.worker import Worker
from podembed.workers.stepwise.asking import AskingFunction, UserQuestion
from podembed.workers.stepwise.driver_line import DriverDoor, DriverLineSpec
from podembed.workers.stepwise.host import StepwiseHost
from podembed.workers.stepwise.line import Answered, LineEnd, LineServer, Packing
from podembed.workers.stepwise.shared_values import DeviceValues, EnginePlace, Placed, SharedValues

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class HostLink(Protocol):
    """How a device process calls its host process: `workers.stepwise.line.LineEnd`."""

    def begin(self, after: int, method: Callable[..., Any], *arguments: Any) -> Callable[[], Answered]:
        """Calls a method of the host, without waiting. Returns a function that waits for the answer, and raises what
        the host raised.

        Args:
          after: number of the last `enqueue` of the driver that must have ended before.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What a function of the user returned.

    Attributes:
      has_room: whether the host would accept another batch after it; None if the function did not call the host.
    """

    value: Any
    has_room: bool | None


class HostLinkCalls:
    """Typed calls to the host. During a call, the status of this process says that it waits for its host. Mutable.

    Attributes:
      has_room: flag of `Ran`.
    """

    def __init__(self, link: HostLink, tracker: Tracker, after: int) -> None:
        self._link, self._tracker, self._after = link, tracker, after
        self.has_room: bool | None = None

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
        answer = self._link.begin(self._after, method, *arguments, **unused)
        # Only an answer of the host says that it has room.
        self.has_room = False

        def wait() -> Answer:
            with self._tracker.phase(Phase.WAIT_FOR_HOST):
                found = answer()
            self.has_room = found.has_room
            return found.value

        return wait


class ReplicaEngine:
    """A replica's side of the engine: its own share, handed to the host process beside it.

    An update that cannot be refused runs while the function of the user goes on. Every later call waits for it first,
    and so does `finish`. Mutable.
    """

    num_shares = 1

    def __init__(self, spec: EngineSpec, host: HostLinkCalls, values: DeviceValues | None = None) -> None:
        self.spec = spec
        self._host = host
        self._values = values
        # What the last dequeue said, as long as no other process can have given gradients in between.
        self._dequeued: tuple[Placed, str | None] | None = None
        self._update: Callable[[], None] | None = None

    def finish(self) -> None:
        """Waits for the update under way. Raises what the host raised."""
        update, self._update = self._update, None
        if update is not None:
            update()

    def _call(
        self,
        method: Callable[Concatenate[StepwiseHost, Arguments], Answer],
        *arguments: Arguments.args,
        **unused: Arguments.kwargs,
    ) -> Answer:
        self.finish()
        return self._host.call(method, *arguments, **unused)

    def enqueue(self, shares: Sequence[Share]) -> None:
        (share,) = shares
        if self._dequeued is not None and self._dequeued[1] is not None:
            # With a name, an enqueue can turn the batch into one of inference.
            self._dequeued = None
        self._call(StepwiseHost.enqueue, share)

    def dequeue(self, name: str | None) -> list[list[np.ndarray]]:
        self._dequeued = None
        if self._values is None:
            return [self._call(StepwiseHost.dequeue, name)]
        found = self._call(StepwiseHost.dequeue_placed, name, self._values.lent())
        if not isinstance(found, Placed):
            return [found]
        self._dequeued = found, name
        return [self._values.taken(found)]

    def apply_gradients(
        self, gradients: Sequence[Sequence[np.ndarray]], learning_rates: LearningRates, name: str | None
    ) -> None:
        (own,) = gradients
        rates = list(rates_at(learning_rates, lambda: self._call(StepwiseHost.next_step, name)))
        dequeued, self._dequeued = self._dequeued, None
        slot = None if dequeued is None else dequeued[0].slot_of_gradients
        if slot is None and self._values is not None:
            slot = self._call(StepwiseHost.slot_of_gradients)
        placed = None if slot is None or self._values is None else self._values.put(own, slot)
        if placed is None or self._values is None:
            self._call(StepwiseHost.apply_gradients, list(own), rates, name)
            return
        arguments = placed, rates, name, self._values.lent()
        if dequeued is not None and (dequeued[0].slot, dequeued[0].vectors, dequeued[1]) == (
            slot,
            placed.vectors,
            name,
        ):
            # The host has said that it waits for just these, so it refuses nothing.
            self.finish()
            self._update = self._host.begin(StepwiseHost.apply_placed, *arguments)
        else:
            self._call(StepwiseHost.apply_placed, *arguments)

    def sizes_to_update(self, name: str | None) -> list[list[int]]:
        if self._dequeued is not None and self._dequeued[1] == name and self._dequeued[0].vectors_of_gradients:
            return [list(self._dequeued[0].vectors_of_gradients)]
        return [self._call(StepwiseHost.sizes_to_update, name)]

    def discard(self) -> None:
        self._dequeued = None
        self._call(StepwiseHost.discard)

    def drain(self) -> None:
        self._call(StepwiseHost.drain)

    def metrics(self) -> EngineMetrics:
        return self._call(StepwiseHost.metrics)

    def read_tables(self) -> list[dict[str, np.ndarray]]:
        raise _only_on_driver("read_tables")

    def save(self, path: str) -> None:
        raise _only_on_driver("save")

    def write(self, path: str) -> WrittenTables:
        raise _only_on_driver("write")

    def restore(self, path: str) -> None:
        raise _only_on_driver("restore")

    def close(self) -> None:
        raise _only_on_driver("close")


def _finish(engine: ReplicaEngine | None) -> None:
    """Waits for the engine's update. Otherwise the next call of the driver could reach the host before it."""
    if engine is not None:
        engine.finish()


def _only_on_driver(method: str) -> RuntimeError:
    return RuntimeError(
        f"{method} was called inside a function that the strategy runs. Expected a call on the driver, which reaches "
        "all hosts. Move it there."
    )


class StepwiseDevice:
    """The JAX half of one host: runs the functions of a strategy, with a state that stays from one to the next. One
    thread works; `status` may be called from another one.

    JAX is imported when the gang is joined, so that an actor's environment is complete before JAX reads it.

    Args:
      packing: packing of the calls to its host process.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._state: dict[str, Any] = {}
        self._line: LineEnd | None = None
        self._driver_line: LineServer | None = None
        self._attached: Callable[[HostLinkCalls], ReplicaEngine] | None = None
        # Whether a function may have to ask the driver for learning rates, and the one that waits for an answer.
        self._may_ask = False
        self._asking: AskingFunction | None = None
        self._tracker = Tracker()
        self._is_in_gang = False

    def reserve_coordinator(self, address: str) -> str:
        """As `DeviceProcess.reserve_coordinator`."""
        from podembed.workers.device.process import DeviceProcess

        return DeviceProcess().reserve_coordinator(address)

    def join(self, coordinator: str, num_hosts: int, host: int, timeout_s: float) -> None:
        """Becomes a member of the gang of JAX processes."""
        with self._tracker.phase(Phase.JOIN):
            from podembed.workers.device.gang import join_gang

            join_gang(coordinator=coordinator, num_processes=num_hosts, process=host, timeout_s=int(timeout_s))
        self._host, self._num_hosts = host, num_hosts
        self._is_in_gang = True

    def open_line(self, spec: DriverLineSpec) -> tuple[str, int]:
        """Opens the driver's line. Returns its address."""
        door = DriverDoor(spec)
        self._driver_line = LineServer(self.answer_driver, self._packing, door, name="calls of the driver")
        return door.address

    def answer_driver(self, method: str, arguments: Sequence[Any]) -> Any:
        """A call of the driver over its line."""
        return getattr(self, method)(*arguments)

    def attach(self, spec: EngineSpec, place: EnginePlace, timeout_s: float) -> None:
        """Takes the engine that functions find from now on.

        Args:
          timeout_s: longest wait for an answer of the host process.

        Raises:
          ChannelError: the host process is gone or silent.
        """
        self.detach()
        self._line = line = LineEnd(place.door, self._packing, timeout_s=timeout_s)
        self.attach_to(spec, line, SharedValues.open(place.memory))

    def attach_to(self, spec: EngineSpec, link: HostLink, values: SharedValues | None) -> None:
        """The same over a given link; without memory, values travel in the calls."""
        own_values = None if values is None else DeviceValues(values)
        self._link = link
        self._attached = lambda host: ReplicaEngine(spec, host, own_values)
        self._may_ask = None in spec.learning_rates

    def detach(self) -> None:
        """Detaches the engine from functions."""
        self.give_up()
        self._attached = None
        self._may_ask = False
        forget_kept()
        if self._line is not None:
            self._line.close()
            self._line = None

    def keep(self, values: Sequence[Kept[Any]]) -> None:
        """Holds values to which functions refer by their keys, until another engine is attached."""
        keep(values)

    def run_function(
        self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], after: int = 0
    ) -> Ran | UserQuestion:
        """Calls `function` as this host's replica. It goes on with `go_on` if it asks something.

        Args:
          after: number of the last `enqueue` of the driver that must have ended before the host answers this function.
        """
        self.give_up()
        if self._attached is None:
            return Ran(self._run(function, arguments, keywords, None), None)
        host = HostLinkCalls(self._link, self._tracker, after)
        engine = self._attached(host)
        if not self._may_ask:
            return Ran(self._run(function, arguments, keywords, engine), host.has_room)
        self._asking = AskingFunction(
            lambda ask: Ran(self._run(function, arguments, keywords, engine, ask), host.has_room)
        )
        return self._until_asked(self._asking.start)

    def go_on(self, answer: Any) -> Ran | UserQuestion:
        """Answers what the function asked; the rest as `run_function`."""
        asking = self._asking
        if asking is None:
            raise RuntimeError("Found go_on, but no function has asked. Call it with the answer to a UserQuestion.")
        return self._until_asked(lambda: asking.go_on(answer))

    def _until_asked(self, work: Callable[[], Ran | UserQuestion]) -> Ran | UserQuestion:
        found = None
        try:
            found = work()
            return found
        finally:
            if not isinstance(found, UserQuestion):
                self._asking = None

    def give_up(self) -> None:
        """Ends a function that waits for an answer, if there is one: none will come."""
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.give_up()

    def _run(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        engine: ReplicaEngine | None,
        ask: Callable[[Any], Any] | None = None,
    ) -> Any:
        context = ReplicaContext(self._host, self._num_hosts, engine, self._state, ask)
        with self._tracker.phase(Phase.USER_FUNCTION), in_replica(context):
            try:
                found = function(*arguments, **keywords)
            except BaseException:
                # What the function raised says more than what follows from it.
                with suppress(Exception):
                    _finish(engine)
                raise
            _finish(engine)
            return found

    def status(self) -> Progress:
        """Whether the function of the user runs, or waits for the host process. From any thread."""
        progress = self._tracker.progress()
        is_waiting = progress.phase is Phase.WAIT_FOR_HOST
        return replace(progress, waits_for=(Worker("host", self._host),)) if is_waiting else progress

    def close(self) -> None:
        """Leaves the gang. All members must leave within its deadline."""
        self.detach()
        if self._is_in_gang:
            from podembed.workers.device.gang import leave_gang

            leave_gang()
            self._is_in_gang = False
        if self._driver_line is not None:
            self._driver_line.close()
