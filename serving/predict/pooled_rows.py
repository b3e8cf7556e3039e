"""`PooledRows`: from a batch to the activations that a model gets, with rows from wherever they lie.

The arithmetic is that of a host that has all rows itself, so the activations have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.kernels.pool import pool
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import PaddingLevels, SequencePadding
from podembed.workers.job.tables import Bags, feature_bindings


class RowSource(Protocol):
    """Where rows of tables come from."""

    def rows(self, table: int, ids: np.ndarray) -> np.ndarray:
        """float32 `[len(ids), dim]`, the rows of a table of the job, which the caller may change.

        Args:
          table: its position in the job.
          ids: int64, distinct and rising.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FoundIds:
    """A batch, and what is looked up of it: by feature one bag for each vector, all ids within the vocabulary."""

    batch: Batch
    bags: dict[str, Ragged]


@dataclass(frozen=True, slots=True, eq=False)
class LookedUp:
    """A batch with what a model gets of its features.

    Attributes:
      activations: per feature `[n, *inner, width]`; of a sequence `[capacity, width]`.
      lengths: by sequence feature, int32 `[n]`.
      levels: levels of the room of the sequences, as a run on one host with one device has them.
    """

    batch: Batch
    activations: list[np.ndarray]
    lengths: dict[str, np.ndarray]
    levels: PaddingLevels


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of one table by their distinct ids."""

    ids: np.ndarray
    values: np.ndarray


class PooledRows:
    """The lookups of a job in rows that are fetched for a number of batches at once. Mutated by `fetch`.

    Args:
      is_padded: whether sequences have room for their longest sample, as exported programs take them.
    """

    def __init__(self, job: JobConfig, source: RowSource, *, is_padded: bool = False) -> None:
        self._job, self._source, self._bags, self._is_padded = job, source, Bags(job), is_padded
        self._bindings = feature_bindings(job)
        self._rows: list[_Rows] = []

    def find(self, batch: Batch) -> FoundIds:
        """What is looked up of a batch.

        Raises:
          ValueError: an id is outside its table.
        """
        return FoundIds(batch, dict(self._bags.of(batch.features)))

    def size_bytes(self, found: FoundIds) -> int:
        """Bytes of the rows of a batch, if no id came twice."""
        return sum(4 * found.bags[one.name].num_ids * self._job.tables[one.table].dim for one in self._bindings)

    def fetch(self, batches: Sequence[FoundIds]) -> None:
        """Gets the rows of some batches, and lets go of those before."""
        self._rows = []
        for at, table in enumerate(self._job.tables):
            names = [one.name for one in self._bindings if one.table == at]
            parts = [found.bags[name].values for found in batches for name in names]
            ids = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))
            values = self._source.rows(at, ids)
            if table.quantization_config is not None:
                table.quantization_config.apply(values)
            self._rows.append(_Rows(ids, values))

    def look_up(self, found: FoundIds) -> LookedUp:
        """The activations of a batch whose rows were fetched."""
        features = found.batch.features
        lengths = {name: self._bags.lengths(name, features[name]) for name in self._job.sequences}
        padding = SequencePadding(self._job.sequences, found.batch.num_samples)
        levels = padding.levels_for(lengths)
        blocks = []
        for binding, (name, shape) in zip(self._bindings, self._job.activation_shapes.items(), strict=True):
            bags, rows = found.bags[name], self._rows[binding.table]
            if name in lengths and not self._is_padded:
                bags = padding.laid_out(name, bags, lengths[name], levels)
            index = np.searchsorted(rows.ids, bags.values).astype(np.int32)
            out = aligned_empty((bags.num_samples, shape[-1]))
            pool(rows.values, index, bags.row_splits, bags.weights, binding.combiner, out)
            if name not in lengths:
                out = out.reshape(found.batch.num_samples, *shape)
            elif self._is_padded:
                out = _padded(out, lengths[name], shape)
            blocks.append(out)
        return LookedUp(found.batch, blocks, lengths, levels)


def _padded(positions: np.ndarray, lengths: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`[sum of lengths, width]` → `[n, *shape]`, zeros behind the positions of a sample."""
    room = np.zeros((len(lengths), *shape), np.float32)
    room[np.arange(shape[0]) < lengths[:, None]] = positions
    return room
