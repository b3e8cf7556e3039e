"""`HostEngine`: one host's part of an engine, the same in one process and on many hosts; `InProcessEngine` is a whole
engine of one such part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from podembed.embedding.kernels.arrays import CACHE_LINE_BYTES
from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks
from podembed.embedding.lookup.exchange import SingleHost
from podembed.embedding.lookup.steps import LookupStep, LookupSteps
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.table import Table
from podembed.embedding.tf.engine import table_storage
from podembed.embedding.tf.engine.device_tables import DeviceTables, cut_for_devices, device_tables
from podembed.embedding.tf.engine.engine import EngineMetrics, EngineSpec, LearningRates, Share, rates_at
from podembed.embedding.tf.engine.order import OrderError, StepOrder
from podembed.embedding.vocabulary.dynamic_index import DynamicIndex


class StepMemory(Protocol):
    """Where the activations of a lookup lie, and their gradients."""

    def is_free(self, number: int) -> bool:
        """Whether the memory for the lookup of that number may be written to, by other hosts, too."""
        ...

    def activations(self, number: int, layout: ActivationLayout) -> np.ndarray:
        """float32 of at least `layout.memory_floats` for the lookup of that number."""
        ...

    def gradients(self, number: int, given: Blocks) -> Blocks:
        """The gradients of that lookup, where the owners of the rows look for them."""
        ...


class OwnMemory:
    """Every lookup has memory of its own, for as long as anybody keeps it. Mutable."""

    def __init__(self) -> None:
        self._buffers = RecycledBuffers()

    def is_free(self, number: int) -> bool:
        return True

    def activations(self, number: int, layout: ActivationLayout) -> np.ndarray:
        return self._buffers.take((1, layout.memory_floats))[0]

    def gradients(self, number: int, given: Blocks) -> Blocks:
        return given


@dataclass(slots=True, eq=False)
class _Counters:
    learning_rates: tuple[float, ...] = ()
    altered_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the update of a batch needs; `asked` of the tables on devices."""

    step: LookupStep
    asked: Any = None
    is_named: bool = True


class HostEngine:
    """One host's part of an engine. Mutable.

    Args:
      steps: over the lookups of `spec`.
      memory: where activations and gradients lie; None for `OwnMemory`.
      on_devices: sharded tables, if there are any. The lookups are those of the other tables then.
    """

    def __init__(
        self,
        spec: EngineSpec,
        steps: LookupSteps,
        memory: StepMemory | None = None,
        on_devices: DeviceTables | None = None,
    ) -> None:
        self.spec = spec
        self._steps = steps
        self._on_devices = on_devices
        is_sharded = [spec.tables[feature.table].is_sharded for feature in spec.features]
        self._of_hosts = [at for at, is_there in enumerate(is_sharded) if not is_there]
        self._of_devices = [at for at, is_there in enumerate(is_sharded) if is_there]
        self._layout = steps.lookups.layout
        self._memory = memory or OwnMemory()
        self._num_lookups = 0
        indexes = [table.index for table in steps.lookups.tables]
        self._dynamic = [index for index in indexes if isinstance(index, DynamicIndex)]
        # Batches enqueued for training, after those of which the tables are restored.
        self._num_named = 0
        self._order: StepOrder[Share, _Prepared] = StepOrder(
            self._forward, self._backward, is_pipelined=spec.is_pipelined
        )
        self._counters = _Counters(altered_ids=np.zeros(len(spec.tables), np.int64))

    def _forward(self, share: Share) -> tuple[_Prepared, list[Any]]:
        bags, is_training = share.features, share.is_training
        if self._on_devices is None:
            step, activations = self._forward_on_host(bags, is_training=is_training)
            return _Prepared(step, is_named=is_training), activations
        # Devices begin first: they work beside the host.
        asked, of_devices = self._on_devices.look_up([bags[at] for at in self._of_devices])
        step, of_hosts = self._forward_on_host([bags[at] for at in self._of_hosts], is_training=is_training)
        found: dict[int, Any] = dict(zip(self._of_devices, of_devices, strict=True))
        # JAX combines no arrays that lie on different devices.
        found |= zip(self._of_hosts, map(self._on_devices.placed, of_hosts), strict=True)
        return _Prepared(step, asked, is_training), [found[at] for at in range(len(bags))]

    def _forward_on_host(self, bags: Sequence[Ragged], *, is_training: bool) -> tuple[LookupStep, list[np.ndarray]]:
        # Shares of a batch may differ by a sample, and parts of replicas by more.
        self._layout = layout = self._layout.with_vectors([own.num_samples for own in bags])
        number = self._num_lookups + 1
        lookups = self._steps.lookups
        step = self._steps.find(
            lookups.by_name(bags),
            buffer=number % lookups.pooled.num_buffers,
            layout=layout,
            is_in_place=self._memory.is_free(number),
        )
        self._num_lookups = number
        self._steps.ask(step, number, training_step=self._num_named if is_training else None)
        self._num_named += is_training
        activations = Blocks.of(layout, self._memory.activations(number, layout))
        self._steps.forward(step, activations)
        return step, list(activations.arrays)

    def _backward(self, prepared: _Prepared, gradients: Sequence[Any], learning_rates: Sequence[float]) -> None:
        if self._on_devices is not None:
            self._on_devices.update(prepared.asked, [gradients[at] for at in self._of_devices], learning_rates)
        step, own = prepared.step, [np.ascontiguousarray(gradients[at], np.float32) for at in self._of_hosts]
        self._steps.backward(step, self._memory.gradients(step.number, Blocks(step.layout, own)), learning_rates)

    @property
    def next_lookup_to_update(self) -> int | None:
        """The number of the lookup whose gradients are to come next, as far as that is known now."""
        prepared = self._order.next_unapplied
        return None if prepared is None else prepared.step.number

    @property
    def has_room(self) -> bool:
        """Whether another batch would be accepted now."""
        return self._order.has_room

    @property
    def tables(self) -> tuple[Table, ...]:
        return self._steps.lookups.tables

    @property
    def num_steps(self) -> int:
        return self._order.num_applied

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        self._order.num_applied = self._num_named = count
        for index in self._dynamic:
            index.decide_again()

    def next_step(self, name: str | None) -> int:
        """The number of the step that gradients under this name would be, from 0. Raises OrderError as
        `apply_gradients`.
        """
        self._order.require_unapplied(name)
        return self._order.num_applied

    def initialize(self) -> None:
        """Gives all rows and slots of this host their first values."""
        for table in self.tables:
            table.initialize()
            table.index.rebuild()
        self.give_rows()

    def give_rows(self) -> None:
        """Brings what `tables` have of sharded tables to the devices."""
        if self._on_devices is not None:
            self._on_devices.give()

    def take_rows(self) -> None:
        """Brings the rows that devices changed back to `tables`."""
        if self._on_devices is not None:
            self._on_devices.take()

    def enqueue(self, share: Share) -> None:
        waiting = self._order.waiting
        if self._dynamic and waiting is not None and not waiting.is_named:
            # Its keys may go now: enqueued for inference, they were not named.
            self._order.drain()
        self._order.enqueue(share, is_training=share.is_training, name=share.name)
        if share.altered_ids:
            self._counters.altered_ids += np.asarray(share.altered_ids, np.int64)

    def dequeue(self, name: str | None) -> list[np.ndarray]:
        return self._order.dequeue(name)

    def apply_gradients(self, gradients: Sequence[np.ndarray], learning_rates: LearningRates, name: str | None) -> None:
        def rates(step: int) -> Sequence[float]:
            return rates_at(learning_rates, lambda: step)

        self._counters.learning_rates = tuple(self._order.apply(gradients, rates, name))

    def sizes_to_update(self, name: str | None) -> list[int]:
        """As `StepOrder.sizes_to_update`."""
        return self._order.sizes_to_update(name)

    def require_none_in_flight(self, method: str) -> None:
        """Raises OrderError if a batch still waits for its dequeue or its gradients."""
        self._order.require_none_in_flight(method)

    def discard(self) -> None:
        self._order.discard()

    def drain(self) -> None:
        self._order.drain()

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            num_steps=self.num_steps,
            learning_rates=self._counters.learning_rates,
            altered_ids=tuple(int(count) for count in self._counters.altered_ids),
        )


Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def _alone(
    method: Callable[Concatenate[InProcessEngine, Arguments], Answer],
) -> Callable[Concatenate[InProcessEngine, Arguments], Answer]:
    """A method that is refused while another one runs: two at once could lose an update without a word."""

    @wraps(method)
    def called(self: InProcessEngine, *arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        own = object()
        try:
            # Inside, so that an interrupt leaves nothing behind. It is one step for the interpreter.
            self._calls.append(own)
            if self._calls[0] is not own:
                raise OrderError(
                    f"{method.__name__} was called while another call to the same tables runs, from another thread or "
                    "from a learning rate. Expected one call at a time. Let one thread make the calls of a "
                    "LocalStrategy, put a lock around them, or use PodStrategy, where threads wait for each other."
                )
            return method(self, *arguments, **named)
        finally:
            if own in self._calls:
                self._calls.remove(own)

    return called


class InProcessEngine:
    """A whole engine inside this process, without Ray. For one thread; a step's calls raise OrderError when they come
    at once.
    """

    num_shares = 1

    def __init__(self, spec: EngineSpec, *, restore_from: str | None = None) -> None:
        self.spec = spec = cut_for_devices(spec)
        # Under way. The first one goes on.
        self._calls: list[object] = []
        placement = [np.zeros(table.layout.num_buckets, np.int32) for table in spec.tables]
        lookups = spec.of_hosts().lookups(placement, host=0, num_hosts=1)
        sharded = {at: table for at, table in enumerate(lookups.tables) if table.spec.is_sharded}
        on_devices = device_tables(spec, sharded) if sharded else None
        steps = LookupSteps(lookups, SingleHost())
        self._engine: HostEngine | None = HostEngine(spec, steps, on_devices=on_devices)
        if restore_from is None:
            self._host.initialize()
        else:
            self.restore(restore_from)

    @_alone
    def enqueue(self, shares: Sequence[Share]) -> None:
        (share,) = shares
        self._host.enqueue(share)

    @_alone
    def dequeue(self, name: str | None) -> list[list[np.ndarray]]:
        return [self._host.dequeue(name)]

    @_alone
    def apply_gradients(
        self, gradients: Sequence[Sequence[np.ndarray]], learning_rates: LearningRates, name: str | None
    ) -> None:
        (own,) = gradients
        self._host.apply_gradients(own, learning_rates, name)

    def sizes_to_update(self, name: str | None) -> list[list[int]]:
        return [self._host.sizes_to_update(name)]

    @_alone
    def discard(self) -> None:
        self._host.discard()

    @_alone
    def drain(self) -> None:
        self._host.drain()

    def metrics(self) -> EngineMetrics:
        return self._host.metrics()

    def read_tables(self) -> list[dict[str, np.ndarray]]:
        self._drain_to_host()
        return [whole_table(table) for table in self._host.tables]

    def save(self, path: str) -> None:
        self._drain_to_host()
        table_storage.storage().save(path, self._host.tables, num_steps=self._host.num_steps)

    def write(self, path: str) -> table_storage.WrittenTables:
        self._drain_to_host()
        return table_storage.storage().write(path, self._host.tables, num_steps=self._host.num_steps)

    @_alone
    def restore(self, path: str) -> None:
        self._host.require_none_in_flight("restore")
        self._host.drain()
        self._host.num_steps = table_storage.storage().restore(path, self._host.tables)
        self._host.give_rows()

    def close(self) -> None:
        self._engine = None

    def _drain_to_host(self) -> None:
        self._host.drain()
        self._host.take_rows()

    @property
    def _host(self) -> HostEngine:
        if self._engine is None:
            raise RuntimeError(
                "The tables of this TPUEmbedding are freed. Expected a strategy that is not closed. Make a new "
                "TPUEmbedding and restore what was saved."
            )
        return self._engine


def whole_table(table: Table) -> dict[str, np.ndarray]:
    """Rows and slots of a table that is held here whole, in the order of the ids, without padding; copies. Where keys
    come and go, those of all rows, with what the index keeps of them.
    """
    if table.index.is_dynamic:
        return {name: values.copy() for name, values in table.in_place().items()}
    return table.store.read(table.index.rows_of(np.arange(table.spec.num_rows)))


MAX_BUFFERS = 4


class RecycledBuffers:
    """Float32 arrays of one place in a step, used again once they are free. Mutable, for one thread. A new size forgets
    those of the old one.

    A large new array costs a page fault for every 4 KiB, several times the work of pooling into it. A buffer is free
    again when its reference count says that no view of it is left. The user may hold one through numpy or JAX, and
    until it goes the buffer is left alone.
    """

    def __init__(self) -> None:
        self._size_bytes = 0
        self._buffers: list[np.ndarray] = []
        # What the count of an unused buffer looks like from inside `_find_idle`, on this interpreter.
        self._idle_count = _count_from_inside([np.empty(1, np.uint8)])

    def take(self, shape: tuple[int, int]) -> np.ndarray:
        """A float32 array of any content, starting on a cache line. It is the caller's as long as anything refers to
        it.
        """
        size_bytes = 4 * shape[0] * shape[1]
        if size_bytes != self._size_bytes:
            self._size_bytes, self._buffers = size_bytes, []
        memory = self._find_idle(self._buffers)
        if memory is None:
            memory = np.empty(size_bytes + CACHE_LINE_BYTES, np.uint8)
            # One that is kept for longer is forgotten here, and freed by its last user.
            self._buffers = [*self._buffers[1 - MAX_BUFFERS :], memory]
        start = -memory.ctypes.data % CACHE_LINE_BYTES
        return memory[start : start + size_bytes].view(np.float32).reshape(shape)

    def _find_idle(self, held: Sequence[np.ndarray]) -> np.ndarray | None:
        for memory in held:
            if sys.getrefcount(memory) <= self._idle_count:
                return memory
        return None


def _count_from_inside(held: Sequence[np.ndarray]) -> int:
    """The reference count of a buffer that only the list holds, seen as `RecycledBuffers._find_idle` sees it."""
    for memory in held:
        return sys.getrefcount(memory)
    return 0
