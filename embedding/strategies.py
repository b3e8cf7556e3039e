"""Where a `TPUEmbedding` runs: the strategy whose scope it was made in, and the values and context of functions that a strategy runs.

`LocalStrategy` is one engine in this process, without Ray; `orchestrator.strategy.PodStrategy` is one over many hosts. Outside any scope
there is no engine, only tables to read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from embedding.bags import share_ends, split_bags
from embedding.engine import Engine, EngineSpec, InProcessEngine
from embedding.ragged import Ragged
from embedding.structures import flatten, pack_like

_scopes: ContextVar[tuple[Strategy, ...]] = ContextVar("_scopes", default=())
_replica: ContextVar[ReplicaContext | None] = ContextVar("_replica", default=None)


# Strategies that have started an engine, for calls that name an engine by its configuration.
_started: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class PerReplica:
    """One value for each replica of a strategy, in the order of the replicas."""

    values: tuple[Any, ...]


@dataclass(slots=True)
class ReplicaContext:
    """Where a function that a strategy runs finds itself.

    Attributes:
      replica_id_in_sync_group: number of this replica, from 0.
      num_replicas_in_sync: how many there are.
      engine: this replica's side of the strategy's engine; None before one was built.
      state: stays on this replica from one run to the next; for parameters and the like.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int
    engine: Engine | None
    state: dict[str, Any] = field(default_factory=dict)


class Strategy(Protocol):
    """What a `TPUEmbedding` asks of the strategy in whose scope it was made."""

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def num_hosts(self) -> int: ...

    @property
    def seed(self) -> int:
        """Of the first values of the rows."""
        ...

    @property
    def running(self) -> Engine | None:
        """The engine, if one is running."""
        ...

    def start_engine(self, spec: EngineSpec, *, restore_from: str | None) -> Engine:
        """Makes the strategy's engine, with first values or those of a saved embedding. There is at most one at a time."""
        ...

    def stop_engine(self) -> None:
        """Frees the engine's tables. Safe to call twice."""
        ...


@contextmanager
def entered(strategy: Strategy) -> Iterator[None]:
    """Makes `strategy` the current one for the length of the block."""
    token = _scopes.set((*_scopes.get(), strategy))
    try:
        yield
    finally:
        _scopes.reset(token)


def current_strategy() -> Strategy | None:
    """The strategy of the innermost scope, None outside any."""
    scopes = _scopes.get()
    return scopes[-1] if scopes else None


def register(strategy: Strategy) -> None:
    """Lets `running_engines` find the engines of a strategy, as long as the strategy lives."""
    _started.add(strategy)


def running_engines() -> list[Engine]:
    """The engines that calls without an embedding may mean: the replica's own, or all of this process, that of the current scope first."""
    context = _replica.get()
    if context is not None:
        return [] if context.engine is None else [context.engine]
    current = current_strategy()
    strategies = sorted(_started, key=lambda strategy: strategy is not current)
    return [strategy.running for strategy in strategies if strategy.running is not None]


@contextmanager
def in_replica(context: ReplicaContext) -> Iterator[None]:
    """Makes `context` that of the code in the block."""
    token = _replica.set(context)
    try:
        yield
    finally:
        _replica.reset(token)


def get_replica_context() -> ReplicaContext | None:
    """The context of the function that a strategy runs, None outside of one."""
    return _replica.get()


@dataclass(frozen=True, slots=True)
class RemoteStrategy:
    """What a replica knows of the driver's strategy."""

    num_replicas_in_sync: int
    num_hosts: int
    seed: int

    @staticmethod
    def of(strategy: Strategy) -> RemoteStrategy:
        return RemoteStrategy(strategy.num_replicas_in_sync, strategy.num_hosts, strategy.seed)

    @property
    def running(self) -> Engine | None:
        return None

    def start_engine(self, spec: EngineSpec, *, restore_from: str | None) -> Engine:
        raise RuntimeError("An engine is started from the driver. Expected to be outside strategy.run. Build there.")

    def stop_engine(self) -> None:
        """The driver stops its engine."""


class LocalStrategy:
    """One engine inside this process: for notebooks, tests and single machines.

    ```python
    strategy = LocalStrategy()
    with strategy.scope():
        embedding = TPUEmbedding(features, batch_size=1024, optimizer=Adagrad(0.05))
    ```
    """

    num_replicas_in_sync = 1
    num_hosts = 1

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self.running: Engine | None = None
        self._state: dict[str, Any] = {}

    @contextmanager
    def scope(self) -> Iterator[LocalStrategy]:
        """Objects made inside the block belong to this strategy."""
        with entered(self):
            yield self

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `fn` as the only replica; `PerReplica` arguments are unpacked. Returns what it returns."""
        context = ReplicaContext(0, 1, self.running, self._state)
        with in_replica(context):
            return fn(
                *(local_value(arg, 0) for arg in args),
                **{name: local_value(value, 0) for name, value in (kwargs or {}).items()},
            )

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of all replicas."""
        return value.values if isinstance(value, PerReplica) else (value,)

    def split(self, batch: Any) -> Any:
        """As `split_over`, for the replicas of this strategy."""
        return split_over(batch, self.num_replicas_in_sync)

    def start_engine(self, spec: EngineSpec, *, restore_from: str | None) -> Engine:
        self.running = InProcessEngine(spec, restore_from=restore_from)
        register(self)
        return self.running

    def stop_engine(self) -> None:
        if self.running is not None:
            self.running.close()
            self.running = None


def split_over(value: Any, num_replicas: int) -> Any:
    """A batch as `PerReplica` values, cut as the driver's `enqueue` cuts features: along the first axis, first shares one longer.

    Args:
      value: arrays with a first axis, or `Ragged`, in any nesting.

    Raises:
      ValueError: a leaf has no first axis.
    """

    def one(leaf: Any) -> PerReplica:
        if isinstance(leaf, Ragged):
            return PerReplica(tuple(split_bags(leaf, leaf.num_samples, num_replicas)))
        if not getattr(leaf, "shape", ()):
            raise ValueError(
                f"Found {type(leaf)} in a batch to be split. Expected arrays with a first axis, or Ragged. Pass other values as they are."
            )
        ends = share_ends(len(leaf), len(leaf), num_replicas)
        return PerReplica(tuple(leaf[start:stop] for start, stop in pairwise(ends)))

    return pack_like(value, [one(leaf) for leaf in flatten(value)])


def local_value(value: Any, replica: int) -> Any:
    """What one replica sees of a value: its own part of a `PerReplica`, also inside dicts, lists and tuples, otherwise the value."""
    if isinstance(value, PerReplica):
        return value.values[replica]
    if isinstance(value, Mapping):
        return type(value)({key: local_value(child, replica) for key, child in value.items()})  # pyright: ignore[reportCallIssue]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(local_value(child, replica) for child in value))
    if isinstance(value, list | tuple):
        return type(value)([local_value(child, replica) for child in value])
    return value
