"""Rows of several lanes, put into the order of steps: the last copy before a batch.

Every lane has its rows in the order in which it reads them (`Block`); a window of steps takes the next ones of each lane. `interleave`
writes them to their places in runs, as long as a step takes rows from a lane, so joining lanes and padding cost one pass over the ids at
the speed of memory. The copies are in `workers.run_kernels` (without the interpreter lock, so a reading thread does not slow the step
down); `Batch.concatenate` and slices are their oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedding.ragged import Ragged
from workers.batch import PADDING_SAMPLE_ID, Batch
from workers.run_kernels import copy_bags, copy_runs, lay_out_bags, plan_runs


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Block:
    """Decoded rows.

    Attributes:
      rows: in the order in which they are read.
      single_names: features with exactly one id in every row.
      singles: int64 `[len(single_names), rows]`, the ids of these features; the values of `rows.features` are views of it, so that all of
        them can be copied at once.
    """

    rows: Batch
    single_names: tuple[str, ...]
    singles: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowShape:
    """Consecutive steps, each of `rows_per_step` rows of every lane, lane after lane."""

    num_steps: int
    num_lanes: int
    rows_per_step: int

    @property
    def rows_per_lane(self) -> int:
        return self.num_steps * self.rows_per_step

    @property
    def num_samples(self) -> int:
        return self.num_lanes * self.rows_per_lane


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """Consecutive rows of one lane.

    Attributes:
      block: holds them.
      first_row, num_rows: where in the block.
      lane: the place of the lane among those of the window.
      lane_row: the row of the lane, counted from the window's first, that the first of them becomes.
    """

    block: Block
    first_row: int
    num_rows: int
    lane: int
    lane_row: int


def interleave(parts: Sequence[Part], *, shape: WindowShape, like: Batch) -> Batch:
    """The rows of a window, step after step; rows that no part gives are padding.

    Args:
      parts: of blocks with the features and dense columns of `like`, without weights of ids; no two give the same row of a lane.
      like: any batch of that declaration, also an empty one.
    """
    num_samples = shape.num_samples
    runs = _runs(parts, shape)
    blocks = [part.block for part in parts]
    dense = np.zeros((num_samples, like.num_dense), np.float32)
    labels, weights = np.zeros(num_samples, np.float32), np.zeros(num_samples, np.float32)
    sample_ids = np.full(num_samples, PADDING_SAMPLE_ID, np.int64)
    # A row of dense numbers is one item of the memory.
    _copy(runs, [block.rows.dense for block in blocks], dense, width=4 * like.num_dense)
    _copy(runs, [block.rows.labels for block in blocks], labels, width=4)
    _copy(runs, [block.rows.weights for block in blocks], weights, width=4)
    _copy(runs, [block.rows.sample_ids for block in blocks], sample_ids, width=8)
    is_full = sum(part.num_rows for part in parts) == num_samples
    features = _gather_singles(blocks, runs, num_samples) if is_full else {}
    layouts: dict[tuple[int, ...], np.ndarray] = {}
    for name in like.features:
        if name not in features:
            features[name] = _gather_bags([block.rows.features[name] for block in blocks], runs, num_samples, layouts)
    ordered = {name: features[name] for name in like.features}
    return Batch(dense=dense, labels=labels, weights=weights, features=ordered, sample_ids=sample_ids)


def _runs(parts: Sequence[Part], shape: WindowShape) -> np.ndarray:
    """int64 `[runs, 4]`, as `plan_runs` writes them."""
    places = [(part.first_row, part.num_rows, part.lane_row, part.lane * shape.rows_per_step) for part in parts]
    # Each part begins and ends within a step.
    runs = np.empty((sum(part.num_rows // shape.rows_per_step + 2 for part in parts), 4), np.int64)
    count = plan_runs(
        np.array(places, np.int64).reshape(-1, 4), shape.rows_per_step, shape.num_lanes * shape.rows_per_step, runs
    )
    return runs[:count]


def _copy(
    runs: np.ndarray, sources: Sequence[np.ndarray], target: np.ndarray, *, width: int, num_columns: int = 1
) -> None:
    """Rows of `width` bytes; arrays with several columns are `[columns, rows]`."""
    column_bytes = np.array([source.strides[0] if num_columns > 1 else 0 for source in sources], np.int64)
    target_bytes = target.strides[0] if num_columns > 1 else 0
    copy_runs(runs, _addresses(sources), column_bytes, target.ctypes.data, target_bytes, num_columns, width)


def _addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    # A quarter of the time of `ctypes.data`, which counts here.
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)


def _gather_singles(blocks: Sequence[Block], runs: np.ndarray, num_samples: int) -> dict[str, Ragged]:
    """The features with one id in every row of a window without padding; none unless all blocks agree about them."""
    names = {block.single_names for block in blocks}
    if len(names) != 1:
        return {}
    (common,) = names
    values = np.empty((len(common), num_samples), np.int64)
    _copy(runs, [block.singles for block in blocks], values, width=8, num_columns=len(common))
    # One array of offsets for all of them: see the comment in workers/batch.py.
    splits = np.arange(num_samples + 1)
    return {name: Ragged(values[at], splits) for at, name in enumerate(common)}


def _gather_bags(
    bags: Sequence[Ragged], runs: np.ndarray, num_samples: int, layouts: dict[tuple[int, ...], np.ndarray]
) -> Ragged:
    """One feature. `layouts` keeps the offsets of features whose blocks share theirs, so that they share them again."""
    key = tuple(id(bag.row_splits) for bag in bags)
    splits_of_parts = _addresses([bag.row_splits for bag in bags])
    if key not in layouts:
        layouts[key] = np.empty(num_samples + 1, np.int64)
        lay_out_bags(runs, splits_of_parts, layouts[key])
    splits = layouts[key]
    values = np.empty(int(splits[-1]), np.int64)
    copy_bags(runs, splits_of_parts, _addresses([bag.values for bag in bags]), splits, values.ctypes.data)
    return Ragged(values, splits)
