"""The step-by-step mode on hosts: `StepwiseHost` holds a shard of every table and takes one call of a step at a time.

In a run, hosts get windows of steps and read their own input (`workers.host.host`). Here ids come from outside,
from the driver or from the function that a strategy runs on the device process of the host. Either way all hosts get
the same calls in the same order, and the exchange between them is the barrier. The device process beside a host calls
it over a line of their own (`workers.stepwise.line`). Plain classes; `workers.stepwise.actors` wraps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podembed.embedding.lookup.compiled import compile_kernels
from podembed.embedding.lookup.steps import LookupPhase, LookupSteps
from podembed.embedding.tf.engine.engine import EngineMetrics, EngineSpec, Share
from podembed.embedding.tf.engine.host_engine import HostEngine
from podembed.workers.host.exchange import MeshExchange
from podembed.workers.host.same_machine import share_pooled
from podembed.workers.liveness.progress import Phase, Progress, Tracker
from podembed.workers.liveness.worker import Worker
from podembed.workers.mesh.handshake import MeshIdentity
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.stepwise.driver_line import DriverDoor, DriverLineSpec
from podembed.workers.stepwise.line import Answered, LineServer, Packing, Turns, line_for_device
from podembed.workers.stepwise.saved_embedding import HostReceipt, restore_tables, write_host
from podembed.workers.stepwise.shared_values import EnginePlace, Placed, PlacedMemory, SharedValues
from podembed.workers.thread_pool import ThreadPool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepwiseSpec:
    """All that a host needs to join its peers.

    Attributes:
      run_id, generation, token: what peers must agree on.
      host, num_hosts: this host's number, from 0, and how many there are.
      bind_address: where the mesh listens; an actor replaces an empty one by its machine's address.
      step_timeout_s: longest wait for a peer within a call.
      shares_memory: whether hosts of one machine use each other's memory; without, they exchange everything as between
        machines.
      threads: threads of the host's kernels.
    """

    run_id: str
    generation: int
    token: bytes
    host: int
    num_hosts: int
    bind_address: str
    step_timeout_s: float
    shares_memory: bool = True
    threads: int = 1


class StepwiseHost:
    """One host of a strategy. Calls of the driver and those of the device process come from two threads and take turns;
    `status` may be called from a third.

    Args:
      packing: packing of the calls of its device process.

    Attributes:
      turns: to be taken around every call of the driver by Ray but `status`.
    """

    def __init__(self, packing: Packing) -> None:
        self.turns = Turns()
        self._packing = packing
        self._line: LineServer | None = None
        self._driver_line: LineServer | None = None
        self._mesh: Mesh | None = None
        self._engine: HostEngine | None = None
        self._values: SharedValues | None = None
        self._tracker = Tracker()

    def start(self, spec: StepwiseSpec) -> tuple[str, int]:
        """Listens for peers. Returns the address."""
        self._spec = spec
        identity = MeshIdentity(
            run_id=spec.run_id,
            generation=spec.generation,
            token=spec.token,
            rank=spec.host,
            num_ranks=spec.num_hosts,
            # The driver sends a placement with each engine, so hosts only have to agree on their number here.
            plan_hash=spec.num_hosts.to_bytes(32, "big"),
        )
        self._mesh = Mesh.listen(identity, bind_address=spec.bind_address)
        return self._mesh.address

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> None:
        """Joins the mesh.

        Raises:
          MeshError: a peer is missing or refused us.
        """
        if self._mesh is None:
            raise RuntimeError("connect was called before start. Expected start first.")
        self._mesh.connect(addresses, timeout_s=timeout_s)

    def open_line(self, spec: DriverLineSpec) -> tuple[str, int]:
        """Opens the driver's line. Returns its address."""
        door = DriverDoor(spec)
        self._driver_line = LineServer(self.answer_driver, self._packing, door, name="calls of the driver")
        return door.address

    def answer_driver(self, method: str, arguments: Sequence[Any]) -> Any:
        """A call of the driver over its line, in its turn."""
        with self.turns.one():
            return getattr(self, method)(*arguments)

    def start_engine(self, spec: EngineSpec, placement: Sequence[np.ndarray], restore_from: str | None) -> EnginePlace:
        """Compiles the kernels and allocates this host's shard, with first values or those of a saved embedding.

        Returns:
          How this host's device process reaches it.
        """
        if self._mesh is None:
            raise RuntimeError("start_engine was called before start. Expected start and connect first.")
        # Compiled before the first step, in which peers would wait for this host.
        compile_kernels(spec.tables, num_threads=self._spec.threads)
        # Two batches may wait for gradients that their name announces, and twice as many where updates lag a step.
        num_slots = 4 if spec.is_pipelined else 2
        own = self._spec
        # It ends with the lookups that refer to it.
        thread_pool = ThreadPool(own.threads)
        lookups = spec.lookups(
            placement, host=own.host, num_hosts=own.num_hosts, num_buffers=num_slots, thread_pool=thread_pool
        )
        exchange = MeshExchange(self._mesh, lookups, timeout_s=self._spec.step_timeout_s)
        self._close_ways()
        self._values = values = SharedValues.create(lookups.layout, num_slots=num_slots)
        self._memory, self._lookups = PlacedMemory(values), lookups
        self._engine = HostEngine(spec, LookupSteps(lookups, exchange, phase=self._phase), self._memory)
        if restore_from is None:
            self._engine.initialize()
        else:
            self.restore(restore_from)
        self.turns.begin_anew()
        self._line, key = line_for_device(self.answer, self._packing)
        return EnginePlace(memory=values.place, door=key)

    def share_memory(self) -> tuple[int, ...]:
        """Finds the hosts on this machine; from now on lookups work in each other's memory. After `start_engine` of all
        hosts.

        Returns:
          Those hosts.

        Raises:
          MeshError: a host is gone or silent.
        """
        mesh, values = self._mesh, self._values
        if mesh is None or values is None or not (self._spec.shares_memory and values.place.layout.num_floats):
            return ()
        place, timeout_s = values.place, self._spec.step_timeout_s
        found = share_pooled(self._lookups.pooled, mesh, place.descriptor, place, timeout_s=timeout_s)
        self._memory.is_read_by_others = bool(found)
        return tuple(sorted(found))

    def _close_ways(self) -> None:
        """Cuts the device process off from the engine."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._values is not None:
            self._values.close_descriptor()
            self._values = None

    @contextmanager
    def _phase(self, phase: LookupPhase) -> Iterator[None]:
        with self._tracker.phase(Phase[phase.name]):
            yield
        self._tracker.mark()

    def stop_engine(self) -> None:
        """Frees the shard."""
        self._engine = None
        self._close_ways()

    def answer(self, after: int, method: str, arguments: Sequence[Any]) -> Answered:
        """A call of the device process, in its turn.

        Args:
          after: number of the last `enqueue` of the driver that must have ended before.

        Raises:
          ChannelTimeout: that one has not ended in time.
          Exception: what the method raised.
        """
        self.turns.wait_for(after, timeout_s=self._spec.step_timeout_s)
        with self.turns.one():
            value = getattr(self, method)(*arguments)
            return Answered(value, self._running.has_room)

    def enqueue(self, share: Share, number: int = 0) -> None:
        """As `Engine.enqueue`, for this host's share.

        Args:
          number: number of the driver's enqueues, from 1, for `answer`; 0 for those of the device process.
        """
        try:
            self._running.enqueue(share)
        finally:
            self.turns.end(number)

    def dequeue(self, name: str | None) -> list[np.ndarray]:
        """This host's activations, one array per feature."""
        return self._running.dequeue(name)

    def dequeue_sized(self, name: str | None) -> tuple[list[np.ndarray], list[int]]:
        """As `dequeue`, with `sizes_to_update`, for which the driver would have to ask otherwise."""
        return self._running.dequeue(name), self._running.sizes_to_update(name)

    def sizes_to_update(self, name: str | None) -> list[int]:
        """As `Engine.sizes_to_update`, of this host's share."""
        return self._running.sizes_to_update(name)

    def apply_gradients(
        self, gradients: Sequence[np.ndarray], learning_rates: Sequence[float], name: str | None
    ) -> None:
        """As `Engine.apply_gradients`, for this host's samples, with the rates of the step."""
        self._running.apply_gradients(gradients, learning_rates, name)

    def dequeue_placed(self, name: str | None, lent: Sequence[int]) -> Placed | list[np.ndarray]:
        """As `dequeue`, for the device process beside this one: where the activations lie, if they lie in its reach.

        Args:
          lent: slots that were dequeued before and are still read there.
        """
        self._memory.lent = frozenset(lent)
        found, values = self._running.dequeue(name), self._values
        slot = None if values is None or not found else values.slot_of(found[0])
        if slot is None:
            return found
        self._memory.lent |= {slot}
        return Placed(
            slot=slot,
            vectors=tuple(len(one) for one in found),
            slot_of_gradients=self.slot_of_gradients(),
            vectors_of_gradients=tuple(self._running.sizes_to_update(name)),
        )

    def slot_of_gradients(self) -> int | None:
        """The slot of the gradients that come next; None if no training batch waits for any."""
        number = self._running.next_lookup_to_update
        return None if number is None or self._values is None else number % self._values.place.num_slots

    def apply_placed(
        self, placed: Placed, learning_rates: Sequence[float], name: str | None, lent: Sequence[int]
    ) -> None:
        """As `apply_gradients`, with gradients that the device process has left in a slot. `lent`: as of
        `dequeue_placed`.
        """
        self._memory.lent = frozenset(lent)
        if self._values is None:
            raise RuntimeError("Found gradients in memory that is not shared any more. Expected a running engine.")
        layout = self._values.layout_of(placed.vectors)
        gradients = layout.blocks(self._values.gradients(placed.slot, layout.num_floats))
        self._running.apply_gradients(gradients, learning_rates, name)

    def next_step(self, name: str | None) -> int:
        """The number of the step whose gradients come next, from 0.

        Raises:
          OrderError: as `apply_gradients`, so that rates are asked for no step that is refused.
        """
        return self._running.next_step(name)

    def discard(self) -> None:
        """Forgets batches in flight."""
        self._running.discard()

    def drain(self) -> None:
        """Applies gradients that wait for the next forward."""
        self._running.drain()

    def metrics(self) -> EngineMetrics:
        return self._running.metrics()

    def read_buckets(self, table: int) -> dict[int, dict[str, np.ndarray]]:
        """Rows and slots of this host's buckets of one table."""
        held = self._running.tables[table]
        return {int(bucket): held.bucket(int(bucket)) for bucket in held.buckets}

    def save(self, path: str, attempt: str) -> tuple[HostReceipt, int]:
        """Writes this host's buckets; what was written, and the number of steps."""
        receipt = write_host(path, self._running.tables, attempt, is_first=self._spec.host == 0)
        return receipt, self._running.num_steps

    def restore(self, path: str) -> None:
        """Fills this host's buckets.

        Raises:
          OrderError: a batch is in flight; nothing has changed.
        """
        self._running.require_none_in_flight("restore")
        with self._tracker.phase(Phase.RESTORE):
            self._running.num_steps = restore_tables(path, self._running.tables)

    def status(self) -> Progress:
        """What the working thread does, and for whom it waits. From any thread."""
        progress, mesh = self._tracker.progress(), self._mesh
        if mesh is None:
            return progress
        waits_for = mesh.waiting_for if progress.phase.waits_for_hosts else ()
        return replace(progress, waits_for=tuple(Worker("host", r) for r in waits_for), unheard_s=mesh.unheard_s)

    def close(self) -> None:
        """Frees sockets and tables. Safe to call twice."""
        self._engine = None
        self._close_ways()
        if self._mesh is not None:
            self._mesh.close()
        if self._driver_line is not None:
            self._driver_line.close()

    @property
    def _running(self) -> HostEngine:
        if self._engine is None:
            raise RuntimeError(
                "The host has no engine. Expected a TPUEmbedding that was built. Build it on the driver."
            )
        return self._engine
