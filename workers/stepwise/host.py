"""The step-by-step mode on hosts: `StepwiseHost` holds a shard of every table and is told one call of a step at a time.

In a run, hosts are told windows of steps and read their own input (`workers.host.host`). Here ids come from outside,
from the driver or from the function that a strategy runs on the device process of the host; either way all hosts get
the same calls in the same order, and the exchange between them is the barrier. Plain classes; `workers.stepwise.actors`
wraps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from podembed.embedding.engine.engine import EngineMetrics, EngineSpec, HostEngine, LearningRates, Share
from podembed.embedding.lookup.compiled import compile_kernels
from podembed.embedding.lookup.feature_lookup import Pieces
from podembed.embedding.replicas.replica_context import ReplicaContext, in_replica
from podembed.embedding.table.table_storage import WrittenTables
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.handshake import MeshIdentity
from podembed.workers.mesh.mesh import Mesh, MeshOptions
from podembed.workers.stepwise.saved_embedding import HostReceipt, restore_tables, write_host

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepwiseSpec:
    """All that a host needs to join its peers.

    Attributes:
      run_id, generation, token: what peers must agree on.
      host, num_hosts: this host's number, from 0, and how many there are.
      bind_address: where the mesh listens; an actor replaces an empty one by its machine's address.
      step_timeout_s: longest wait for a peer within a call.
    """

    run_id: str
    generation: int
    token: bytes
    host: int
    num_hosts: int
    bind_address: str
    step_timeout_s: float


class MeshExchange:
    """The exchange of a lookup over a mesh. Counts its exchanges, so that hosts that fall out of step are noticed."""

    def __init__(self, mesh: Mesh, *, timeout_s: float) -> None:
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._number = 0

    def ids(self, asked: Pieces) -> Pieces:
        num_tables = len(asked[0])
        lengths = [np.array([len(part) for part in parts], np.int64) for parts in asked]
        frames: dict[int, np.ndarray] = {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            if num_bytes % 8 or num_bytes < 8 * num_tables:
                raise ValueError(
                    f"Host {host} sent {num_bytes} bytes of ids. Expected whole int64 with {num_tables} in front."
                )
            frames[host] = np.empty(num_bytes // 8, np.int64)
            return frames[host]

        self._swap(Tag.IDS, [[length, *parts] for length, parts in zip(lengths, asked, strict=True)], receive)
        wanted = list(asked)
        for host, frame in frames.items():
            counts = frame[:num_tables]
            if (counts < 0).any() or int(counts.sum()) != len(frame) - num_tables:
                raise ValueError(
                    f"Host {host} announced {counts.tolist()} ids and sent {len(frame) - num_tables}. Expected the "
                    "same number of each."
                )
            wanted[host] = np.split(frame[num_tables:], np.cumsum(counts)[:-1])
        return wanted

    def rows(self, send: Pieces, shapes: Sequence[Sequence[tuple[int, int]]]) -> Pieces:
        frames: dict[int, np.ndarray] = {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            expected = sum(rows * columns for rows, columns in shapes[host])
            if num_bytes != 4 * expected:
                raise ValueError(f"Host {host} sent {num_bytes} bytes of rows. Expected {4 * expected}, as agreed on.")
            frames[host] = np.empty(expected, np.float32)
            return frames[host]

        self._swap(Tag.ROWS, [list(parts) for parts in send], receive)
        received = list(send)
        for host, frame in frames.items():
            ends = np.cumsum([rows * columns for rows, columns in shapes[host]])
            parts = np.split(frame, ends[:-1])
            received[host] = [part.reshape(shape) for part, shape in zip(parts, shapes[host], strict=True)]
        return received

    def _swap(self, tag: Tag, send: list[list[np.ndarray]], receive: Callable[[int, int], np.ndarray]) -> None:
        self._number += 1
        self._mesh.exchange(tag=tag, step=self._number, send=send, receive=receive, timeout_s=self._timeout_s)


class StepwiseHost:
    """One host of a strategy. One thread works; `abort` may be called from another one."""

    def __init__(self) -> None:
        self._mesh: Mesh | None = None
        self._engine: HostEngine | None = None
        self._abort_reason: str | None = None

    def start(self, spec: StepwiseSpec) -> tuple[str, int]:
        """Listens for peers. Returns the address."""
        self._spec = spec
        identity = MeshIdentity(
            run_id=spec.run_id,
            generation=spec.generation,
            token=spec.token,
            rank=spec.host,
            num_ranks=spec.num_hosts,
            # What is placed where is told to all hosts by the driver with each engine; only the number of hosts is
            # fixed here.
            plan_hash=spec.num_hosts.to_bytes(32, "big"),
        )
        self._mesh = Mesh.listen(identity, bind_address=spec.bind_address, options=MeshOptions())
        return self._mesh.address

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> None:
        """Joins the mesh.

        Raises:
          MeshError: a peer is missing or refused us.
        """
        if self._mesh is None:
            raise RuntimeError("connect was called before start. Expected start first.")
        self._mesh.connect(addresses, timeout_s=timeout_s)
        self._exchange = MeshExchange(self._mesh, timeout_s=self._spec.step_timeout_s)

    def start_engine(self, spec: EngineSpec, placement: Sequence[np.ndarray], restore_from: str | None) -> None:
        """Compiles the kernels and allocates this host's shard, with first values or those of a saved embedding."""
        # Here, so that no step of a peer has to wait for it.
        compile_kernels(spec.tables)
        self._engine = HostEngine(
            spec, placement, host=self._spec.host, num_hosts=self._spec.num_hosts, exchange=self._exchange
        )
        if restore_from is None:
            self._engine.initialize()
        else:
            self.restore(restore_from)

    def stop_engine(self) -> None:
        """Frees the shard."""
        self._engine = None

    def enqueue(self, share: Share) -> None:
        """As `Engine.enqueue`, for this host's share."""
        self._running.enqueue(share)

    def dequeue(self, name: str | None) -> list[np.ndarray]:
        """This host's activations, one array per feature."""
        return self._running.dequeue(name)

    def apply_gradients(
        self, gradients: Sequence[np.ndarray], learning_rates: Sequence[float], name: str | None
    ) -> None:
        """As `Engine.apply_gradients`, for this host's samples, with the rates of the step."""
        self._running.apply_gradients(gradients, lambda step: learning_rates, name)

    def num_steps(self) -> int:
        """Calls of `apply_gradients` so far, which is the number of the next step."""
        return self._running.num_steps

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
        """Fills this host's buckets."""
        self._running.num_steps = restore_tables(path, self._running.tables)

    def abort(self, reason: str) -> None:
        """Ends a wait for peers at once. From any thread."""
        if self._mesh is not None:
            self._mesh.abort(reason)

    def close(self) -> None:
        """Frees sockets and tables. Safe to call twice."""
        self._engine = None
        if self._mesh is not None:
            self._mesh.close()

    @property
    def _running(self) -> HostEngine:
        if self._engine is None:
            raise RuntimeError(
                "The host has no engine. Expected a TPUEmbedding that was built. Build it on the driver."
            )
        return self._engine


class HostLink(Protocol):
    """How a device process calls its host process."""

    def call(
        self,
        method: Callable[Concatenate[StepwiseHost, Arguments], Answer],
        *arguments: Arguments.args,
        **unused: Arguments.kwargs,
    ) -> Answer:
        """Calls a method of the host; raises what it raised."""
        ...


class ReplicaEngine:
    """A replica's side of the engine: its own share, handed to the host process beside it."""

    num_shares = 1

    def __init__(self, spec: EngineSpec, link: HostLink) -> None:
        self.spec = spec
        self._link = link

    def enqueue(self, shares: Sequence[Share]) -> None:
        (share,) = shares
        self._link.call(StepwiseHost.enqueue, share)

    def dequeue(self, name: str | None) -> list[list[np.ndarray]]:
        return [self._link.call(StepwiseHost.dequeue, name)]

    def apply_gradients(
        self, gradients: Sequence[Sequence[np.ndarray]], learning_rates: LearningRates, name: str | None
    ) -> None:
        (own,) = gradients
        rates = list(learning_rates(self._link.call(StepwiseHost.num_steps)))
        self._link.call(StepwiseHost.apply_gradients, list(own), rates, name)

    def discard(self) -> None:
        self._link.call(StepwiseHost.discard)

    def drain(self) -> None:
        self._link.call(StepwiseHost.drain)

    def metrics(self) -> EngineMetrics:
        return self._link.call(StepwiseHost.metrics)

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


def _only_on_driver(method: str) -> RuntimeError:
    return RuntimeError(
        f"{method} was called inside a function that the strategy runs. Expected a call on the driver, which reaches "
        "all hosts. Move it there."
    )


class StepwiseDevice:
    """The JAX half of one host: runs the functions of a strategy, with a state that stays from one to the next.

    JAX is imported when the gang is joined, so that an actor's environment is complete before JAX reads it.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._is_in_gang = False

    def reserve_coordinator(self, address: str) -> str:
        """As `DeviceProcess.reserve_coordinator`."""
        from podembed.workers.device.process import DeviceProcess

        return DeviceProcess().reserve_coordinator(address)

    def join(self, coordinator: str, num_hosts: int, host: int, timeout_s: float) -> None:
        """Becomes a member of the gang of JAX processes."""
        from podembed.workers.device.model_step import join_gang

        join_gang(coordinator=coordinator, num_processes=num_hosts, process=host, timeout_s=int(timeout_s))
        self._host, self._num_hosts = host, num_hosts
        self._is_in_gang = True

    def run_function(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        spec: EngineSpec | None,
        link: HostLink,
    ) -> Any:
        """Calls `function` as this host's replica. Returns what it returns."""
        engine = None if spec is None else ReplicaEngine(spec, link)
        context = ReplicaContext(self._host, self._num_hosts, engine, self._state)
        with in_replica(context):
            return function(*arguments, **keywords)

    def close(self) -> None:
        """Leaves the gang. All members must leave within its deadline."""
        if self._is_in_gang:
            from podembed.workers.device.model_step import leave_gang

            leave_gang()
            self._is_in_gang = False
