"""Rows of several decoded row groups, put together in a new order: the one copy between decoding and a batch.

A step takes rows from many lanes, each in the middle of a shuffled row group. `gather_rows` writes every row straight to its place in the
result, so shuffling, joining lanes and padding cost one pass over the ids. The bag copy is a numba kernel (without the interpreter lock,
so a reading thread does not slow the step down); `Batch.concatenate` and plain indexing are its oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np

from embedding.ragged import Ragged
from workers.batch import PADDING_SAMPLE_ID, Batch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """Some rows of one block and where they go.

    Attributes:
      block: decoded rows.
      rows: int64 `[n]`, the rows to take from it.
      destinations: int64 `[n]`, the row of the result that each becomes; no two rows of a result share one.
    """

    block: Batch
    rows: np.ndarray
    destinations: np.ndarray


def gather_rows(parts: Sequence[Part], *, num_samples: int, like: Batch) -> Batch:
    """A batch of `num_samples` rows; those that are nobody's destination are padding.

    Args:
      parts: of blocks with the features and dense columns of `like`.
      num_samples: rows of the result.
      like: any batch of that declaration, also an empty one.
    """
    dense = np.zeros((num_samples, like.num_dense), np.float32)
    labels = np.zeros(num_samples, np.float32)
    weights = np.zeros(num_samples, np.float32)
    sample_ids = np.full(num_samples, PADDING_SAMPLE_ID, np.int64)
    for part in parts:
        dense[part.destinations] = part.block.dense[part.rows]
        labels[part.destinations] = part.block.labels[part.rows]
        weights[part.destinations] = part.block.weights[part.rows]
        sample_ids[part.destinations] = part.block.sample_ids[part.rows]
    # Features whose blocks share their offsets share them in the result, and the work on them is done once.
    layouts: dict[tuple[int, ...], _Layout] = {}
    features = {}
    for name in like.features:
        blocks = [part.block.features[name] for part in parts]
        key = tuple(id(block.row_splits) for block in blocks)
        if key not in layouts:
            layouts[key] = _lay_out(blocks, parts, num_samples)
        features[name] = _gather_bags(blocks, parts, layouts[key])
    return Batch(dense=dense, labels=labels, weights=weights, features=features, sample_ids=sample_ids)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Layout:
    """Where the bags of one or more features go.

    Attributes:
      splits: int64 `[num_samples + 1]`, offsets of the result.
      singles: if every bag taken holds one id, per part the positions of these ids in the block and in the result; else None.
    """

    splits: np.ndarray
    singles: list[tuple[np.ndarray, np.ndarray]] | None


def _lay_out(blocks: Sequence[Ragged], parts: Sequence[Part], num_samples: int) -> _Layout:
    """Offsets of the result: the lengths of all bags at their destinations, summed up."""
    splits = np.zeros(num_samples + 1, np.int64)
    all_starts = []
    is_single = True
    for block, part in zip(blocks, parts, strict=True):
        starts = block.row_splits[part.rows]
        lengths = block.row_splits[part.rows + 1] - starts
        splits[part.destinations + 1] = lengths
        all_starts.append(starts)
        is_single = is_single and bool((lengths == 1).all())
    np.cumsum(splits, out=splits)
    if not is_single:
        return _Layout(splits=splits, singles=None)
    targets = [splits[part.destinations] for part in parts]
    return _Layout(splits=splits, singles=list(zip(all_starts, targets, strict=True)))


def _gather_bags(blocks: Sequence[Ragged], parts: Sequence[Part], layout: _Layout) -> Ragged:
    values = np.empty(int(layout.splits[-1]), np.int64)
    has_weights = any(block.weights is not None for block in blocks)
    weights = np.ones(len(values), np.float32) if has_weights else None
    for at, (block, part) in enumerate(zip(blocks, parts, strict=True)):
        pairs: list[tuple[np.ndarray, np.ndarray]] = [(block.values, values)]
        if weights is not None and block.weights is not None:
            pairs.append((block.weights, weights))
        for source, target in pairs:
            if layout.singles is not None:
                _copy_singles(source, layout.singles[at][0], target, layout.singles[at][1])
            else:
                _copy_bags(source, block.row_splits, part.rows, target, layout.splits, part.destinations)
    return Ragged(values, layout.splits, weights)


@numba.njit(nogil=True, cache=True)
def _copy_singles(source: np.ndarray, starts: np.ndarray, target: np.ndarray, target_starts: np.ndarray) -> None:
    """Copies one id for each pair of positions."""
    for i in range(len(starts)):
        # Unsigned positions spare the branch for negative ones.
        target[np.uint64(target_starts[i])] = source[np.uint64(starts[i])]


@numba.njit(nogil=True, cache=True)
def _copy_bags(
    source: np.ndarray,
    source_splits: np.ndarray,
    rows: np.ndarray,
    target: np.ndarray,
    target_splits: np.ndarray,
    destinations: np.ndarray,
) -> None:
    """Copies the bag of `rows[i]` to the bag of `destinations[i]`, which has its length."""
    for i in range(len(rows)):
        row, destination = np.uint64(rows[i]), np.uint64(destinations[i])
        start = source_splits[row]
        length = source_splits[row + np.uint64(1)] - start
        into = target_splits[destination]
        for k in range(length):
            target[np.uint64(into + k)] = source[np.uint64(start + k)]
