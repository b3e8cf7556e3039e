"""Engines: what stands behind a `TPUEmbedding`. It holds tables, looks batches up and updates rows; ids come to it
checked.

`HostEngine` is one host's part, the same in one process and on many hosts; `InProcessEngine` is a whole engine of one
such part. An engine over hosts cuts every batch into as many shares as it has hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.engine.order import StepOrder
from podembed.embedding.lookup.feature_lookup import Alone, Exchange, FeatureLookup, LookupFeature, Prepared
from podembed.embedding.ragged import Ragged
from podembed.embedding.table import table_storage
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """All that an engine must know, as a value that travels to the hosts.

    Attributes:
      tables: in the order of first use; learning rates come with each step, so those in here are never read.
      features: in flat order.
      quantization: per table, or None.
      is_pipelined: one step of staleness.
      positions: per feature, places that one sample has in TensorFlow 2.3's tensor of its table: the length of a
        sequence, otherwise 1.
      paths: of the features, in flat order.
      output_shapes: of a whole batch, per feature; empty if they are not known.
      learning_rates: per table the rate, None for a callable; only to be compared.
      invalid_ids: per table what is done with ids outside the vocabulary.
      configs: serialized configurations of this engine, by which `send_tpu_embedding_gradients` finds it; none if it
        cannot be expressed.
    """

    tables: tuple[TableSpec, ...]
    features: tuple[LookupFeature, ...]
    quantization: tuple[QuantizationConfig | None, ...]
    is_pipelined: bool
    positions: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    output_shapes: tuple[tuple[int | None, ...], ...] = ()
    learning_rates: tuple[float | None, ...] = ()
    invalid_ids: tuple[str, ...] = ()
    configs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """One host's part of a batch.

    Attributes:
      features: bags of each feature.
      altered_ids: per table, ids that its policy dropped, clipped or hashed.
    """

    features: tuple[Ragged, ...]
    is_training: bool
    name: str | None = None
    altered_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """What an engine has done.

    Attributes:
      num_steps: batches whose gradients were given.
      learning_rates: per table, that of the last step; empty before the first.
      altered_ids: per table, ids outside the vocabulary that its policy let pass.
    """

    num_steps: int
    learning_rates: tuple[float, ...]
    altered_ids: tuple[int, ...]


LearningRates = Callable[[int], Sequence[float]]
"""Step, from 0 → one rate a table."""


class Engine(Protocol):
    """Tables behind one `TPUEmbedding`. Every method that may have to wait has a deadline."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def num_shares(self) -> int:
        """Into how many shares a batch is cut that is handed in here."""
        ...

    def enqueue(self, shares: Sequence[Share]) -> None:
        """Looks a batch up. Raises OrderError where it would wait for ever."""
        ...

    def dequeue(self, name: str | None) -> list[list[np.ndarray]]:
        """Per share and feature the activations, float32 `[num_bags, dim]`."""
        ...

    def apply_gradients(
        self, gradients: Sequence[Sequence[np.ndarray]], learning_rates: LearningRates, name: str | None
    ) -> None:
        """Per share and feature the gradients of the activations."""
        ...

    def discard(self) -> None:
        """Forgets batches in flight."""
        ...

    def drain(self) -> None:
        """Applies gradients that wait for the next forward."""
        ...

    def metrics(self) -> EngineMetrics: ...

    def read_tables(self) -> list[dict[str, np.ndarray]]:
        """Per table copies of "rows" and of each slot, `[num_rows, width]`, after a drain."""
        ...

    def save(self, path: str) -> None:
        """Writes rows and slots, after a drain."""
        ...

    def write(self, path: str) -> table_storage.WrittenTables:
        """The files of `save`, without the index that makes them a saved embedding."""
        ...

    def restore(self, path: str) -> None:
        """Fills rows and slots."""
        ...

    def close(self) -> None:
        """Frees the tables. Safe to call twice."""
        ...


@dataclass(slots=True, eq=False)
class _Counters:
    learning_rates: tuple[float, ...] = ()
    altered_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


class HostEngine:
    """One host's part of an engine. Mutable.

    Args:
      placement: per table, the owner of each bucket.
      exchange: to the other hosts.
    """

    def __init__(
        self, spec: EngineSpec, placement: Sequence[np.ndarray], *, host: int, num_hosts: int, exchange: Exchange
    ) -> None:
        self.spec = spec
        self._lookup = FeatureLookup(
            [
                Table(table, np.flatnonzero(owners == host))
                for table, owners in zip(spec.tables, placement, strict=True)
            ],
            spec.features,
            placement,
            quantization=spec.quantization,
            num_hosts=num_hosts,
            exchange=exchange,
        )
        self._order: StepOrder[Sequence[Ragged], Prepared] = StepOrder(
            self._lookup.forward, self._lookup.backward, is_pipelined=spec.is_pipelined
        )
        self._counters = _Counters(altered_ids=np.zeros(len(spec.tables), np.int64))

    @property
    def tables(self) -> tuple[Table, ...]:
        return self._lookup.tables

    @property
    def num_steps(self) -> int:
        return self._order.num_applied

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        self._order.num_applied = count

    def initialize(self) -> None:
        """Gives all rows and slots of this host their first values."""
        for table in self.tables:
            table.initialize()

    def enqueue(self, share: Share) -> None:
        self._order.enqueue(share.features, is_training=share.is_training, name=share.name)
        if share.altered_ids:
            self._counters.altered_ids += np.asarray(share.altered_ids, np.int64)

    def dequeue(self, name: str | None) -> list[np.ndarray]:
        return self._order.dequeue(name)

    def apply_gradients(self, gradients: Sequence[np.ndarray], learning_rates: LearningRates, name: str | None) -> None:
        self._counters.learning_rates = tuple(self._order.apply(gradients, learning_rates, name))

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


class InProcessEngine:
    """A whole engine inside this process, without Ray."""

    num_shares = 1

    def __init__(self, spec: EngineSpec, *, restore_from: str | None = None) -> None:
        self.spec = spec
        placement = [np.zeros(table.layout.num_buckets, np.int32) for table in spec.tables]
        self._host = HostEngine(spec, placement, host=0, num_hosts=1, exchange=Alone())
        if restore_from is None:
            self._host.initialize()
        else:
            self.restore(restore_from)

    def enqueue(self, shares: Sequence[Share]) -> None:
        (share,) = shares
        self._host.enqueue(share)

    def dequeue(self, name: str | None) -> list[list[np.ndarray]]:
        return [self._host.dequeue(name)]

    def apply_gradients(
        self, gradients: Sequence[Sequence[np.ndarray]], learning_rates: LearningRates, name: str | None
    ) -> None:
        (own,) = gradients
        self._host.apply_gradients(own, learning_rates, name)

    def discard(self) -> None:
        self._host.discard()

    def drain(self) -> None:
        self._host.drain()

    def metrics(self) -> EngineMetrics:
        return self._host.metrics()

    def read_tables(self) -> list[dict[str, np.ndarray]]:
        self.drain()
        return [whole_table(table) for table in self._host.tables]

    def save(self, path: str) -> None:
        self.drain()
        table_storage.storage().save(path, self._host.tables, num_steps=self._host.num_steps)

    def write(self, path: str) -> table_storage.WrittenTables:
        self.drain()
        return table_storage.storage().write(path, self._host.tables, num_steps=self._host.num_steps)

    def restore(self, path: str) -> None:
        self.drain()
        self._host.num_steps = table_storage.storage().restore(path, self._host.tables)

    def close(self) -> None:
        pass


def whole_table(table: Table) -> dict[str, np.ndarray]:
    """Rows and slots of a table that is held here whole, in the order of the ids, without padding; copies."""
    return table.store.read(table.index.rows_of(np.arange(table.spec.num_rows)))
