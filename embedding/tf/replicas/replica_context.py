"""Where a function that a strategy runs finds itself: its replica's number, its side of the engine, and a state that
stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from podembed.embedding.tf.engine.engine import Engine

_replica: ContextVar[ReplicaContext | None] = ContextVar("_replica", default=None)


@dataclass(slots=True)
class ReplicaContext:
    """Where a function that a strategy runs finds itself.

    Attributes:
      replica_id_in_sync_group: number of this replica, from 0.
      num_replicas_in_sync: how many there are.
      engine: this replica's side of the strategy's engine; None before one was built.
      state: stays on this replica from one run to the next; for parameters and the like.
      ask_driver: a `RatesQuestion` to the driver's one answer, the same on all replicas; None where the driver is this
        process.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int
    engine: Engine | None
    state: dict[str, Any] = field(default_factory=dict)
    ask_driver: Callable[[Any], Sequence[float]] | None = None


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
