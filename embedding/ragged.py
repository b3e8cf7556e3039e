"""`Ragged`: the one inner form of dense, sparse and ragged feature input.

A feature of a batch is a list of ids per sample. It travels through input, deduplication, lookup and pooling as one
flat id array and the offsets at which each sample's ids begin. This module owns the form and its checks; it does not
know vocabularies or tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


class RaggedError(ValueError):
    """The parts of a ragged value do not fit together."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Ids of one feature for a run of samples.

    Attributes:
      values: int64 `[num_ids]`, the ids of all samples, sample after sample.
      row_splits: int64 `[num_samples + 1]`, sample `b` holds `values[row_splits[b]:row_splits[b + 1]]`.
      weights: float32 `[num_ids]` or None, which stands for all ones.
    """

    values: np.ndarray
    row_splits: np.ndarray
    weights: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        return len(self.row_splits) - 1

    @property
    def num_ids(self) -> int:
        return len(self.values)

    @staticmethod
    def of(values: ArrayLike, row_splits: ArrayLike, weights: ArrayLike | None = None) -> Ragged:
        """Builds a checked value from anything numpy reads as integers.

        Raises:
          RaggedError: ids are not integers, a weight is missing, or splits do not start at 0, fall, or miss the number
          of ids.
        """
        ids = np.asarray(values)
        if ids.size == 0:
            ids = ids.astype(np.int64)
        splits = np.asarray(row_splits)
        _check(ids, splits)
        checked_weights = None if weights is None else np.ascontiguousarray(weights, np.float32)
        if checked_weights is not None and checked_weights.shape != ids.shape:
            raise RaggedError(
                f"Found {checked_weights.shape} weights for {ids.shape} ids. Expected one weight per id. Pass weights "
                "with the ids' shape."
            )
        return Ragged(_as_int64(ids), np.ascontiguousarray(splits, np.int64), checked_weights)

    @staticmethod
    def of_lists(lists: list[list[int]]) -> Ragged:
        """One sample per inner list.

        Raises:
          RaggedError: an id is no integer.
        """
        lengths = np.fromiter((len(row) for row in lists), np.int64, len(lists))
        values = np.fromiter((_whole(i) for row in lists for i in row), np.int64, int(lengths.sum()))
        return Ragged(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    @staticmethod
    def of_dense(ids: np.ndarray) -> Ragged:
        """One id a sample for shape `[B]`, `L` ids a sample for `[B, L]`.

        Raises:
          RaggedError: ids are not integers, or of another number of axes.
        """
        if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
            raise RaggedError(
                f"Found ids of dtype {ids.dtype} and shape {ids.shape}. Expected integers of shape [B] or [B, L]. Cast "
                "ids to int64."
            )
        width = 1 if ids.ndim == 1 else ids.shape[1]
        return Ragged(_as_int64(ids.reshape(-1)), np.arange(ids.shape[0] + 1, dtype=np.int64) * width)

    def padded(self, num_samples: int) -> Ragged:
        """The same samples followed by empty ones up to `num_samples`.

        Raises:
          RaggedError: there are more already.
        """
        missing = num_samples - self.num_samples
        if missing == 0:
            return self
        if missing < 0:
            raise RaggedError(
                f"Found {self.num_samples} samples to pad to {num_samples}. Expected at most {num_samples}. Pad to the "
                "largest share."
            )
        tail = np.full(missing, self.row_splits[-1], np.int64)
        return Ragged(self.values, np.concatenate([self.row_splits, tail]), self.weights)

    def to_lists(self) -> list[list[int]]:
        """The ids as Python lists, for tests and messages."""
        return [self.values[a:b].tolist() for a, b in zip(self.row_splits[:-1], self.row_splits[1:], strict=True)]


def _whole(value: object) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise RaggedError(f"Found id {value!r}. Expected integers. Cast ids to int.")
    return int(value)


def _as_int64(ids: np.ndarray) -> np.ndarray:
    """Contiguous int64. An unsigned id above int64 would come out negative."""
    if ids.dtype == np.uint64 and len(ids) and ids.max() > np.iinfo(np.int64).max:
        raise RaggedError(f"Found id {ids.max()}. Expected ids below 2**63. Hash larger keys into a table first.")
    return np.ascontiguousarray(ids, np.int64)


def _check(ids: np.ndarray, splits: np.ndarray) -> None:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise RaggedError(
            f"Found ids of dtype {ids.dtype} and shape {ids.shape}. Expected a flat integer array. Cast ids to int64."
        )
    if splits.ndim != 1 or len(splits) == 0 or not np.issubdtype(splits.dtype, np.integer):
        raise RaggedError(
            f"Found row_splits of dtype {splits.dtype} and shape {splits.shape}. Expected at least one integer. Pass "
            "[0] for no samples."
        )
    if splits[0] != 0 or splits[-1] != len(ids):
        raise RaggedError(
            f"Found row_splits from {splits[0]} to {splits[-1]} over {len(ids)} ids. Expected them to run from 0 to "
            "the number of ids."
        )
    if (np.diff(splits) < 0).any():
        at = int(np.argmax(np.diff(splits) < 0))
        raise RaggedError(
            f"Found row_splits falling from {splits[at]} to {splits[at + 1]} at sample {at}. Expected them never to "
            "fall. Sort the samples."
        )


def by_position(rows: Ragged, positions: int, *, columns: np.ndarray | None = None) -> Ragged:
    """Cuts every row into bags, one for each position; ids beyond the last position are left out.

    Args:
      columns: int64 `[num_ids]`, the position of each id in its row, rising; None where they count from 0.
    """
    splits = rows.row_splits
    row = np.repeat(np.arange(rows.num_samples), np.diff(splits))
    position = np.arange(rows.num_ids) - splits[row] if columns is None else columns
    kept = position < positions
    # Rows come in order and columns within a row do too, so bags never fall.
    bag = row[kept] * positions + position[kept]
    bag_splits = np.zeros(rows.num_samples * positions + 1, np.int64)
    np.cumsum(np.bincount(bag, minlength=len(bag_splits) - 1), out=bag_splits[1:])
    return Ragged(rows.values[kept], bag_splits, None if rows.weights is None else rows.weights[kept])
