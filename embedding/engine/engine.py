"""Engines: what stands behind a `TPUEmbedding`. It holds tables, looks batches up and updates rows; ids come to it
checked.

What one host does is in `embedding.engine.host_engine`. An engine over hosts cuts every batch into as many shares as it
has hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.kernels.crew import ONE_THREAD, Crew
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.lookup.pooling_choice import cut_way
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.ragged import Ragged
from podembed.embedding.table import table_storage
from podembed.embedding.table_spec import TableSpec


def no_first_values(*arguments: Any, **named: Any) -> np.ndarray:
    """The initializer of a table whose rows are elsewhere."""
    raise RuntimeError(
        "First values were requested inside a function that the strategy runs. Expected hosts to make them. Build the "
        "TPUEmbedding on the driver."
    )


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
    features: tuple[FeatureBinding, ...]
    quantization: tuple[QuantizationConfig | None, ...]
    is_pipelined: bool
    positions: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    output_shapes: tuple[tuple[int | None, ...], ...] = ()
    learning_rates: tuple[float | None, ...] = ()
    invalid_ids: tuple[str, ...] = ()
    configs: tuple[bytes, ...] = ()

    @property
    def needs_rows(self) -> tuple[bool, ...]:
        """Per table, whether its rows must come to the samples: to be rounded, or to stay apart as a sequence."""
        shapes = zip(self.features, self.output_shapes, strict=False)
        apart = {feature.table for feature, shape in shapes if len(shape) > 1}
        return tuple(rounding is not None or at in apart for at, rounding in enumerate(self.quantization))

    @property
    def num_features(self) -> tuple[int, ...]:
        """Per table, how many features look up in it."""
        bound = [feature.table for feature in self.features]
        return tuple(bound.count(at) for at in range(len(self.tables)))

    def vectors_of_share(self, num_hosts: int) -> tuple[int, ...]:
        """Per feature, the vectors of the largest share of a batch; empty where shapes are not known."""
        shapes = [[int(axis or 0) for axis in shape] for shape in self.output_shapes]
        return tuple(-(-shape[0] // num_hosts) * math.prod(shape[1:]) for shape in shapes)

    def lookups(
        self,
        placement: Sequence[np.ndarray],
        *,
        host: int,
        num_hosts: int,
        num_buffers: int = 1,
        crew: Crew = ONE_THREAD,
    ) -> Lookups:
        """The lookups of one host, with new tables.

        Args:
          placement: per table, the owner of each bucket.
          num_buffers: batches that may be in flight at once.
          crew: the threads of the host.
        """
        return Lookups.build(
            self.tables,
            self.features,
            placement,
            host=host,
            num_hosts=num_hosts,
            num_samples=0,
            vectors=self.vectors_of_share(num_hosts),
            needs_rows=self.needs_rows,
            pools_cut=self._pools_cut(num_hosts),
            quantization=self.quantization,
            num_buffers=num_buffers,
            crew=crew,
        )

    def _pools_cut(self, num_hosts: int) -> list[bool]:
        """Per table, whether its owners pool if it is cut. Bags are of any length, so each counts as one of unknown
        length. Where shapes are not known either, rows travel.
        """
        vectors = self.vectors_of_share(num_hosts) or (0,) * len(self.features)
        found = []
        for at, (spec, as_rows) in enumerate(zip(self.tables, self.needs_rows, strict=True)):
            bags = [count for feature, count in zip(self.features, vectors, strict=True) if feature.table == at]
            way = cut_way(spec, lengths=[None] * len(bags), num_bags=max(bags, default=0), num_hosts=num_hosts)
            found.append(way.is_pooled and not as_rows)
        return found

    def for_replicas(self) -> EngineSpec:
        """The same without what only owners of rows need and what may be slow to pack: the initializers."""
        return replace(self, tables=tuple(replace(table, initializer=no_first_values) for table in self.tables))


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels as three arrays, since each array and each byte of a message has a cost. Integers of a feature are as
        narrow as they can be, and a length that all of its bags have is there once.
        """
        ids = [_narrow(bags.values) for bags in self.features]
        lengths = [_narrow(_once_if_equal(np.diff(bags.row_splits))) for bags in self.features]
        weights = [bags.weights for bags in self.features if bags.weights is not None]
        sizes = [
            _FeatureSizes(bags.num_samples, bags.weights is not None, _kind(own), _kind(per))
            for bags, own, per in zip(self.features, ids, lengths, strict=True)
        ]
        rest = self.is_training, self.name, self.altered_ids
        return _share_of, (_bytes_of(ids), _bytes_of(lengths), _bytes_of(weights), sizes, rest)


class _FeatureSizes(NamedTuple):
    """A feature in a message. `ids`, `lengths`: type and number of elements."""

    num_samples: int
    is_weighted: bool
    ids: tuple[str, int]
    lengths: tuple[str, int]


def _kind(array: np.ndarray) -> tuple[str, int]:
    return array.dtype.char, len(array)


def _narrow(integers: np.ndarray) -> np.ndarray:
    """In the narrowest type that holds them all."""
    # Seen as unsigned, a negative one needs all 64 bits.
    return integers.astype(np.min_scalar_type(integers.view(np.uint64).max())) if len(integers) else integers


def _once_if_equal(lengths: np.ndarray) -> np.ndarray:
    return lengths[:1] if len(lengths) and (lengths == lengths[0]).all() else lengths


def _bytes_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One after another, as uint8."""
    return np.concatenate([np.empty(0, np.uint8), *(np.ascontiguousarray(part).view(np.uint8) for part in parts)])


class _Reader:
    """Takes arrays off what `_bytes_of` made. Mutable."""

    def __init__(self, content: np.ndarray) -> None:
        self._content = content
        self._at = 0

    def take(self, kind: tuple[str, int], dtype: DTypeLike) -> np.ndarray:
        """The next elements, of that type and number, as another type."""
        size = np.dtype(kind[0]).itemsize * kind[1]
        part = self._content[self._at : self._at + size]
        self._at += size
        # A copy, since the part may begin anywhere.
        return np.frombuffer(part.tobytes(), kind[0]).astype(dtype)


def _share_of(
    ids: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray,
    sizes: Sequence[_FeatureSizes],
    rest: tuple[bool, str | None, tuple[int, ...]],
) -> Share:
    """What `Share.__reduce__` took apart."""
    of_ids, of_lengths, of_weights, features = _Reader(ids), _Reader(lengths), _Reader(weights), []
    for size in sizes:
        values = of_ids.take(size.ids, np.int64)
        splits = np.zeros(size.num_samples + 1, np.int64)
        # A single length stands for all bags.
        splits[1:] = of_lengths.take(size.lengths, np.int64)
        np.cumsum(splits, out=splits)
        own = of_weights.take(("f", len(values)), np.float32) if size.is_weighted else None
        features.append(Ragged(values, splits, own))
    is_training, name, altered_ids = rest
    return Share(features=tuple(features), is_training=is_training, name=name, altered_ids=altered_ids)


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


LearningRates = Callable[[int], Sequence[float]] | Sequence[float]
"""One rate a table, or a function that gives them for a step, from 0."""


def rates_at(learning_rates: LearningRates, step: Callable[[], int]) -> Sequence[float]:
    """One rate a table.

    Args:
      step: its number; asked only where the rates depend on it, since the answer may lie in another process.
    """
    return learning_rates(step()) if callable(learning_rates) else learning_rates


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
