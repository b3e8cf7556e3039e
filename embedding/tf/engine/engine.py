"""Engines: what stands behind a `TPUEmbedding`. It holds tables, looks batches up and updates rows; ids come to it
checked.

What one host does is in `host_engine`. An engine over hosts cuts every batch into as many shares as it has hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.kernels.threads import ONE_THREAD, Threads
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.lookup.pooling_choice import cut_way
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine import table_storage


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
      paths: paths of the features, in flat order.
      output_shapes: output shapes of a whole batch, per feature; empty if they are not known.
      learning_rates: per table the rate, None for a callable; only to be compared.
      rate_tags: per table the tag of its callable, None for a number; tables of one tag share a rate.
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
    rate_tags: tuple[int | None, ...] = ()
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
        thread_pool: Threads = ONE_THREAD,
    ) -> Lookups:
        """The lookups of one host, with new tables.

        Args:
          placement: per table, the owner of each bucket.
          num_buffers: batches that may be in flight at once.
          thread_pool: threads of the host.
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
            thread_pool=thread_pool,
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

    def of_hosts(self) -> EngineSpec:
        """The same with the features that hosts look up. Sharded tables then have none."""
        kept = [at for at, feature in enumerate(self.features) if not self.tables[feature.table].is_sharded]
        shapes = tuple(self.output_shapes[at] for at in kept) if self.output_shapes else ()
        return replace(self, features=tuple(self.features[at] for at in kept), output_shapes=shapes)

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
        """Travels as three arrays, since each array and each byte of a message has a cost. Ids are in the narrowest
        integers that hold them all. A length that all bags of a feature have is there once.
        """
        # Plain tuples: of any other class each costs a call.
        sizes = [(len(bags.values), len(bags.row_splits) - 1, bags.weights is not None) for bags in self.features]
        ids = _narrow([bags.values for bags in self.features])
        lengths, are_even = _lengths_of(self.features)
        weights = [bags.weights for bags in self.features if bags.weights is not None]
        rest = self.is_training, self.name, self.altered_ids
        return _share_of, (ids, lengths, np.concatenate([_NO_WEIGHTS, *weights]), sizes, are_even, rest)


_NO_IDS, _NO_WEIGHTS = np.empty(0, np.int64), np.empty(0, np.float32)


def _narrow(integers: Sequence[np.ndarray]) -> np.ndarray:
    """One after another, int64 arrays in the narrowest type that holds them all."""
    # First as one array: a call of numpy for each would cost more than the copy.
    whole = np.concatenate([_NO_IDS, *integers])
    # Seen as unsigned, a negative one needs all 64 bits.
    largest = int(whole.view(np.uint64).max()) if len(whole) else 0
    return whole.astype(np.min_scalar_type(largest))


def _lengths_of(features: Sequence[Ragged]) -> tuple[np.ndarray, list[bool]]:
    """The lengths of all bags, feature after feature, and per feature whether it has a single one that stands for all
    its bags.
    """
    if len({len(bags.row_splits) for bags in features}) == 1 and features[0].num_samples:
        # All features at once, for the same reason.
        table = np.diff(np.array([bags.row_splits for bags in features]))
        of_feature = (table == table[:, :1]).all(axis=1)
        if of_feature.all():
            return _narrow([table[:, 0]]), [True] * len(table)
        lengths, are_even = list(table), of_feature.tolist()
    else:
        lengths = [np.diff(bags.row_splits) for bags in features]
        are_even = [len(own) > 0 and bool((own == own[0]).all()) for own in lengths]
    return _narrow([own[:1] if is_even else own for own, is_even in zip(lengths, are_even, strict=True)]), are_even


@lru_cache(maxsize=64)
def _even_splits(num_samples: int, length: int) -> np.ndarray:
    """The row splits of bags of one length. Not to be written to."""
    return np.arange(num_samples + 1, dtype=np.int64) * length


def _share_of(
    ids: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray,
    sizes: Sequence[tuple[int, int, bool]],
    are_even: Sequence[bool],
    rest: tuple[bool, str | None, tuple[int, ...]],
) -> Share:
    """What `Share.__reduce__` took apart. `sizes`: of each feature the ids, the samples, and whether it has weights."""
    values, counts = ids.astype(np.int64), lengths.astype(np.int64)
    features, first_id, first_count, first_weight = [], 0, 0, 0
    for (num_ids, num_samples, is_weighted), is_even in zip(sizes, are_even, strict=True):
        if is_even:
            splits = _even_splits(num_samples, int(counts[first_count]))
        else:
            splits = np.zeros(num_samples + 1, np.int64)
            np.cumsum(counts[first_count : first_count + num_samples], out=splits[1:])
        own = weights[first_weight : first_weight + num_ids] if is_weighted else None
        features.append(Ragged(values[first_id : first_id + num_ids], splits, own))
        first_id += num_ids
        first_count += 1 if is_even else num_samples
        first_weight += num_ids if is_weighted else 0
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

    def sizes_to_update(self, name: str | None) -> Sequence[Sequence[int]]:
        """Per share and feature, the vectors of the batch that gradients with this name belong to: batches in flight
        may differ in how many samples each share has. A share's are empty if no such batch waits.
        """
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
        """Fills rows and slots. Raises OrderError, before it changes any, while a batch is in flight."""
        ...

    def close(self) -> None:
        """Frees the tables. Safe to call twice."""
        ...
