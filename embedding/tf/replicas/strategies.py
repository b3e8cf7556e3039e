"""Where a `TPUEmbedding` runs: the strategy whose scope it was made in.

`LocalStrategy` is one engine in this process, without Ray; `PodStrategy` of `orchestrator.stepwise` is one over many
hosts.
Outside any scope there is no engine, only tables to read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from podembed.embedding.tf.engine.engine import Engine, EngineSpec
from podembed.embedding.tf.engine.host_engine import InProcessEngine
from podembed.embedding.tf.replicas.cross_replica import CrossReplica, check_call
from podembed.embedding.tf.replicas.per_replica import local_value
from podembed.embedding.tf.replicas.replica_context import ReplicaContext, get_replica_context, in_replica

_scopes: ContextVar[tuple[Strategy, ...]] = ContextVar("_scopes", default=())


# Strategies that have started an engine, for calls that name an engine by its configuration.
_started: weakref.WeakSet[Any] = weakref.WeakSet()


class Strategy(Protocol):
    """What a `TPUEmbedding` asks of the strategy in whose scope it was made."""

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def num_hosts(self) -> int: ...

    @property
    def seed(self) -> int:
        """The seed of the rows' first values."""
        ...

    @property
    def running(self) -> Engine | None:
        """The engine, if one is running."""
        ...

    def start_engine(self, spec: EngineSpec, *, restore_from: str | None) -> Engine:
        """Makes the strategy's engine, with first values or those of a saved embedding. There is at most one at a
        time.
        """
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
    """The engines that calls without an embedding may mean: the replica's own, or all of this process, that of the
    current scope first.
    """
    context = get_replica_context()
    if context is not None:
        return [] if context.engine is None else [context.engine]
    current = current_strategy()
    strategies = sorted(_started, key=lambda strategy: strategy is not current)
    return [strategy.running for strategy in strategies if strategy.running is not None]


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


class LocalStrategy(CrossReplica):
    """One engine inside this process: for notebooks, tests and single machines.

    ```python
    strategy = LocalStrategy()
    with strategy.scope():
        embedding = TPUEmbedding(features, batch_size=1024, optimizer=Adagrad(0.05))
    ```
    """

    num_hosts = 1

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self.running: Engine | None = None
        self._state: dict[str, Any] = {}

    def __enter__(self) -> LocalStrategy:
        """As of a strategy over hosts, so that a program may take either one."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the tables and the state of `run`. Safe to call twice. There are no processes to end, so the strategy
        may be used again, with a new embedding.
        """
        self.stop_engine()
        self._state.clear()

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @contextmanager
    def scope(self) -> Iterator[LocalStrategy]:
        """Objects made inside the block belong to this strategy."""
        with entered(self):
            yield self

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `fn` as the only replica; `PerReplica` arguments are unpacked. Returns what it returns.

        Raises:
          TypeError: as `check_call`.
        """
        check_call(fn, args, kwargs)
        context = ReplicaContext(0, 1, self.running, self._state)
        with in_replica(context):
            return fn(
                *(local_value(arg, 0) for arg in args),
                **{name: local_value(value, 0) for name, value in (kwargs or {}).items()},
            )

    def start_engine(self, spec: EngineSpec, *, restore_from: str | None) -> Engine:
        self.running = InProcessEngine(spec, restore_from=restore_from)
        register(self)
        return self.running

    def stop_engine(self) -> None:
        if self.running is not None:
            self.running.close()
            self.running = None
