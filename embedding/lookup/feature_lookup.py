"""`FeatureLookup`: forward and backward of one host for batches that come step by step, with one array of activations
per feature.

Forward: distinct ids of each table → grouped by owner → owners gather rows → rows come back → bags are pooled.
Backward: gradients of each row are summed → to the owners → one update of each touched row, adding what the hosts sent
in host order. Features may differ in their number of bags, tables in their width and in whether gradients are
accumulated. Bytes are moved by an `Exchange`; a host that is alone pools from the table itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.lookup import compiled as kernels
from podembed.embedding.lookup.recycled_buffers import RecycledBuffers
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.key_index import DenseIndex, KeyIndex
from podembed.embedding.table.table import Table

Pieces = Sequence[Sequence[np.ndarray]]
"""Per host and table an array."""


class Exchange(Protocol):
    """Swaps arrays with the other hosts. All hosts make the same calls in the same order."""

    def ids(self, asked: Pieces) -> Pieces:
        """Sends int64 arrays of any length, returns those of the others; the own entry comes back as it is."""
        ...

    def rows(self, send: Pieces, shapes: Sequence[Sequence[tuple[int, int]]]) -> Pieces:
        """Sends float32 matrices, returns those of the others, which have the given shapes; the own entry comes back as
        it is.
        """
        ...


class Alone:
    """The exchange of a single host: nobody to talk to."""

    def ids(self, asked: Pieces) -> Pieces:
        return asked

    def rows(self, send: Pieces, shapes: Sequence[Sequence[tuple[int, int]]]) -> Pieces:
        return send


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupFeature:
    """One feature: the position of its table, and how the rows of a bag become one vector ("sum", "mean" or
    "sqrtn").
    """

    table: int
    combiner: str


@dataclass(slots=True, kw_only=True, eq=False)
class _TableStep:
    """One table in one step.

    Attributes:
      index: int32 `[num_ids]`, the place of each id's row among the rows asked for.
      asked: int64, the local rows asked for at their owners, owner after owner.
      counts: int64 `[num_hosts]`, how many at each owner.
      wanted: per host, the local rows that it asks of this one.
    """

    index: np.ndarray
    asked: np.ndarray
    counts: np.ndarray
    wanted: list[np.ndarray] = field(default_factory=list)

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def piece(self, array: np.ndarray, host: int) -> np.ndarray:
        """The part of an array over the rows asked for that belongs to one owner."""
        stop = int(self.ends[host])
        return array[stop - int(self.counts[host]) : stop]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A batch after its forward: all that its backward needs."""

    features: tuple[Ragged, ...]
    steps: tuple[_TableStep, ...]


class FeatureLookup:
    """One host's shard of every table, and the way there and back. Mutated: the tables' rows and slots.

    Args:
      tables: this host's shards.
      features: in the order of the batch.
      placement: per table, the owner of each bucket.
      quantization: per table, or None.
      exchange: with the other hosts.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[LookupFeature],
        placement: Sequence[np.ndarray],
        *,
        quantization: Sequence[QuantizationConfig | None],
        num_hosts: int,
        exchange: Exchange,
    ) -> None:
        self.tables = tuple(tables)
        self._features = tuple(features)
        self._features_of = [[at for at, f in enumerate(features) if f.table == table] for table in range(len(tables))]
        self._indexes: list[KeyIndex] = [
            DenseIndex(table.spec.layout, owners) for table, owners in zip(tables, placement, strict=True)
        ]
        self._quantization = tuple(quantization)
        self._num_hosts = num_hosts
        self._exchange = exchange
        self._seats = np.zeros((kernels.num_seats(0), 2), np.int64)
        self._buffers = [RecycledBuffers() for _ in features]
        self._sums = [np.empty((0, table.spec.dim), np.float32) for table in tables]

    def forward(self, features: Sequence[Ragged]) -> tuple[Prepared, list[np.ndarray]]:
        """Looks up one batch.

        Returns:
          What `backward` needs, and per feature float32 `[num_bags, dim]`.
        """
        steps = [self._asked(table, features) for table in range(len(self.tables))]
        hosts = range(self._num_hosts)
        wanted = self._exchange.ids([[step.piece(step.asked, host) for step in steps] for host in hosts])
        for table, step in enumerate(steps):
            step.wanted = [wanted[host][table] for host in hosts]
        activations: list[np.ndarray] = [np.empty(0)] * len(features)
        for table, rows_and_index in enumerate(self._rows(steps)):
            self._pool(table, *rows_and_index, features, activations)
        return Prepared(features=tuple(features), steps=tuple(steps)), activations

    def backward(self, prepared: Prepared, gradients: Sequence[np.ndarray], learning_rates: Sequence[float]) -> None:
        """Updates every touched row once, or, without accumulation, once for each time it occurs.

        Args:
          gradients: per feature float32 `[num_bags, dim]`.
          learning_rates: one a table.
        """
        hosts, steps = range(self._num_hosts), prepared.steps
        sums = [self._summed(table, prepared, gradients) for table in range(len(self.tables))]
        send = [[step.piece(total, host) for step, total in zip(steps, sums, strict=True)] for host in hosts]
        shapes = [
            [(len(s.wanted[host]), total.shape[1]) for s, total in zip(steps, sums, strict=True)] for host in hosts
        ]
        received = self._exchange.rows(send, shapes)
        for table, (held, step) in enumerate(zip(self.tables, steps, strict=True)):
            held.update(step.wanted, [received[host][table] for host in hosts], learning_rates[table])

    def _asked(self, table: int, features: Sequence[Ragged]) -> _TableStep:
        """Which rows of which owners this host's samples need."""
        values = [features[at].values for at in self._features_of[table]]
        ids = values[0] if len(values) == 1 else np.concatenate(values)
        unique, inverse = self._distinct(ids, table)
        counts = np.empty(self._num_hosts, np.int64)
        asked, position = np.empty(len(unique), np.int64), np.empty(len(unique), np.int32)
        self._indexes[table].route(unique, counts, asked, position)
        if self._num_hosts == 1:
            # One owner keeps the order of the distinct ids.
            return _TableStep(index=inverse, asked=asked, counts=counts)
        index = np.empty(len(ids), np.int32)
        kernels.row_of_each_id(position, inverse, index)
        return _TableStep(index=index, asked=asked, counts=counts)

    def _distinct(self, ids: np.ndarray, table: int) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids, and which of them each id is. Without accumulation every id counts for itself."""
        optimizer = self.tables[table].spec.optimizer
        if optimizer is not None and not optimizer.use_gradient_accumulation:
            return ids, np.arange(len(ids), dtype=np.int32)
        if len(self._seats) < kernels.num_seats(len(ids)):
            self._seats = np.zeros((kernels.num_seats(len(ids)), 2), np.int64)
        unique, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
        num_unique = kernels.unique_ids(ids, self._seats, unique, inverse)
        return unique[:num_unique], inverse

    def _rows(self, steps: Sequence[_TableStep]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per table rows to pool from, and the place among them of each id's row."""
        if self._num_hosts == 1:
            return [self._own_rows(table, step) for table, step in enumerate(steps)]
        hosts = range(self._num_hosts)
        served = [[self._gathered(table, step.wanted[host]) for table, step in enumerate(steps)] for host in hosts]
        shapes = [
            [(int(step.counts[host]), self.tables[table].spec.dim) for table, step in enumerate(steps)]
            for host in hosts
        ]
        pieces = self._exchange.rows(served, shapes)
        found = []
        for table, step in enumerate(steps):
            rows = np.concatenate([pieces[host][table] for host in hosts])
            found.append((self._quantized(table, rows), step.index))
        return found

    def _own_rows(self, table: int, step: _TableStep) -> tuple[np.ndarray, np.ndarray]:
        if self._quantization[table] is not None:
            return self._quantized(table, self._gathered(table, step.asked)), step.index
        index = np.empty(len(step.index), np.int32)
        kernels.row_of_each_id(step.asked.astype(np.int32), step.index, index)
        return self.tables[table].rows, index

    def _gathered(self, table: int, local_rows: np.ndarray) -> np.ndarray:
        rows = np.empty((len(local_rows), self.tables[table].spec.dim), np.float32)
        self.tables[table].gather(local_rows, rows)
        return rows

    def _quantized(self, table: int, rows: np.ndarray) -> np.ndarray:
        """Rounds rows that belong to this step alone; the table keeps its own."""
        quantization = self._quantization[table]
        if quantization is not None:
            quantization.apply(rows)
        return rows

    def _pool(
        self,
        table: int,
        rows: np.ndarray,
        index: np.ndarray,
        features: Sequence[Ragged],
        activations: list[np.ndarray],
    ) -> None:
        first = 0
        for at in self._features_of[table]:
            bags = features[at]
            own = index[first : first + bags.num_ids]
            first += bags.num_ids
            activations[at] = self._buffers[at].take((bags.num_samples, rows.shape[1]))
            kernels.pool(rows, own, bags.row_splits, bags.weights, self._features[at].combiner, activations[at])

    def _summed(self, table: int, prepared: Prepared, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """The gradient of each row asked for, over this host's samples and the features of the table. Valid until the
        next call.
        """
        step, dim = prepared.steps[table], self.tables[table].spec.dim
        if len(self._sums[table]) < len(step.asked):
            self._sums[table] = aligned_empty((len(step.asked) + len(step.asked) // 4, dim))
        total = self._sums[table][: len(step.asked)]
        total.fill(0.0)
        first = 0
        for at in self._features_of[table]:
            bags = prepared.features[at]
            own = step.index[first : first + bags.num_ids]
            first += bags.num_ids
            kernels.sum_gradients(gradients[at], own, bags.row_splits, bags.weights, self._features[at].combiner, total)
        return total
