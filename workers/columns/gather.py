"""Rows of several lanes, put into the order of steps: the last copy before a batch.

Every lane has its rows in the order in which it reads them (`Block`); a window of steps takes the next ones of each
lane. `interleave` writes them to their places in runs, as long as a step takes rows from a lane. Joining lanes and
padding thus cost one pass over the ids at the speed of memory. The copies are in `workers.columns.run_kernels` (without
the interpreter lock, so a reading thread does not slow the step down). `Batch.concatenate` and slices are their oracle
in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.workers.columns.run_kernels import (
    copy_bag_weights,
    copy_bags,
    copy_columns,
    copy_ids,
    copy_runs,
    lay_out_bags,
    plan_runs,
)
from podembed.workers.data.batch import PADDING_SAMPLE_ID, Batch

# The arrays of a block by their place in `Block.addresses`. Behind them lie the offsets and the ids of each feature,
# then the named columns, then the weights of ids.
_LABELS, _WEIGHTS, _SAMPLE_IDS, _DENSE, _SINGLES, _FEATURES = range(6)
_NOWHERE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Block:
    """Decoded rows.

    Attributes:
      rows: in the order in which they are read. Ids may be int32, which is widened on the way to a batch, and dense
        numbers lie best column after column.
      single_names: features with exactly one id in every row.
      singles: int32 or int64 `[len(single_names), rows]`, the ids of these features. The values of `rows.features` are
        views of it, so that all of them can be copied at once.
      dense: `rows.dense` column after column, float32 `[columns, rows]`.
      columns: columns of `rows.columns`, row after row.
      addresses: int64, of each array, see `_LABELS` and those beside it. Asking an array takes longer than copying a
        run of it, and a block is copied from in many windows.
    """

    rows: Batch
    single_names: tuple[str, ...]
    singles: np.ndarray
    dense: np.ndarray = field(init=False)
    columns: list[np.ndarray] = field(init=False)
    addresses: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        dense = np.asfortranarray(self.rows.dense).T
        arrays = [self.rows.labels, self.rows.weights, self.rows.sample_ids, dense, self.singles]
        for bags in self.rows.features.values():
            arrays += [bags.row_splits, bags.values]
        # Runs of rows are copied as they lie.
        columns = [np.ascontiguousarray(values) for values in self.rows.columns.values()]
        arrays += columns + [bags.weights for bags in self.rows.features.values() if bags.weights is not None]
        object.__setattr__(self, "dense", dense)
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "addresses", np.array([array.ctypes.data for array in arrays], np.int64))


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
class LaneRows:
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


def interleave(parts: Sequence[LaneRows], *, shape: WindowShape, like: Batch) -> Batch:
    """The rows of a window, step after step; rows that no part gives are padding.

    Args:
      parts: parts of blocks with the features, weights of ids and columns of `like`. Named columns have its order. No
        two give the same row of a lane.
      like: any batch of that declaration, also an empty one.
    """
    num_samples = shape.num_samples
    runs = _runs(parts, shape)
    blocks = [part.block for part in parts]
    dense = np.zeros((num_samples, like.num_dense), np.float32)
    labels, weights = np.zeros(num_samples, np.float32), np.zeros(num_samples, np.float32)
    sample_ids = np.full(num_samples, PADDING_SAMPLE_ID, np.int64)
    columns = {name: np.zeros((num_samples, *values.shape[1:]), values.dtype) for name, values in like.columns.items()}
    # A row for each array, with its address in every part.
    addresses = (
        np.array([block.addresses for block in blocks], np.int64).reshape(len(blocks), _num_arrays(like)).T.copy()
    )
    if blocks:
        copy_runs(runs, addresses[_LABELS], labels.ctypes.data, 4)
        copy_runs(runs, addresses[_WEIGHTS], weights.ctypes.data, 4)
        copy_runs(runs, addresses[_SAMPLE_IDS], sample_ids.ctypes.data, 8)
        for at, values in enumerate(columns.values(), _FEATURES + 2 * len(like.features)):
            copy_runs(runs, addresses[at], values.ctypes.data, values[:1].nbytes)
        copy_columns(runs, addresses[_DENSE], _column_bytes([block.dense for block in blocks]), dense)
    is_full = sum(part.num_rows for part in parts) == num_samples
    features = _gather_singles(blocks, runs, addresses, num_samples) if is_full else {}
    layouts: dict[tuple[int, ...], np.ndarray] = {}
    given = blocks[0].rows.features if blocks else {}
    places = {name: at for at, name in enumerate(given)}
    weighted = [name for name, bags in given.items() if bags.weights is not None]
    for name in like.features:
        if name not in features:
            at = _FEATURES + 2 * places.get(name, 0)
            bags = _gather_bags(
                [block.rows.features[name] for block in blocks],
                runs,
                addresses[at : at + 2],
                num_samples,
                layouts,
            )
            if like.features[name].weights is not None:
                own = np.empty(bags.num_ids, np.float32)
                if weighted:
                    at_weights = _FEATURES + 2 * len(given) + len(columns) + weighted.index(name)
                    copy_bag_weights(runs, addresses[at], addresses[at_weights], bags.row_splits, own)
                bags = Ragged(bags.values, bags.row_splits, own)
            features[name] = bags
    ordered = {name: features[name] for name in like.features}
    return Batch(dense=dense, labels=labels, weights=weights, features=ordered, sample_ids=sample_ids, columns=columns)


def _num_arrays(like: Batch) -> int:
    weighted = sum(bags.weights is not None for bags in like.features.values())
    return _FEATURES + 2 * len(like.features) + len(like.columns) + weighted


def _runs(parts: Sequence[LaneRows], shape: WindowShape) -> np.ndarray:
    """int64 `[runs, 4]`, as `plan_runs` writes them."""
    places = [(part.first_row, part.num_rows, part.lane_row, part.lane * shape.rows_per_step) for part in parts]
    # Each part begins and ends within a step.
    runs = np.empty((sum(part.num_rows // shape.rows_per_step + 2 for part in parts), 4), np.int64)
    count = plan_runs(
        np.array(places, np.int64).reshape(-1, 4), shape.rows_per_step, shape.num_lanes * shape.rows_per_step, runs
    )
    return runs[:count]


def _column_bytes(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Bytes from one column to the next of arrays `[columns, rows]`."""
    return np.array([array.strides[0] for array in columns], np.int64)


def _gather_singles(
    blocks: Sequence[Block], runs: np.ndarray, addresses: np.ndarray, num_samples: int
) -> dict[str, Ragged]:
    """The features with one id in every row of a window without padding; none unless all blocks agree about them."""
    names = {block.single_names for block in blocks}
    if len(names) != 1:
        return {}
    (common,) = names
    values = np.empty((len(common), num_samples), np.int64)
    singles = [block.singles for block in blocks]
    copy_ids(runs, addresses[_SINGLES], _column_bytes(singles), _width(singles), values)
    # One array of offsets for all of them: see the comment in workers/data/batch.py.
    splits = np.arange(num_samples + 1)
    return {name: Ragged(values[at], splits) for at, name in enumerate(common)}


def _gather_bags(
    bags: Sequence[Ragged],
    runs: np.ndarray,
    addresses: np.ndarray,
    num_samples: int,
    layouts: dict[tuple[int, ...], np.ndarray],
) -> Ragged:
    """One feature, whose offsets and ids lie at the two rows of addresses. `layouts` keeps the offsets of features
    whose blocks share theirs, so that they share them again.
    """
    key = tuple(id(bag.row_splits) for bag in bags)
    splits_of_parts, values_of_parts = addresses if len(bags) else (_NOWHERE, _NOWHERE)
    if key not in layouts:
        layouts[key] = np.empty(num_samples + 1, np.int64)
        lay_out_bags(runs, splits_of_parts, layouts[key])
    splits = layouts[key]
    values = np.empty(int(splits[-1]), np.int64)
    copy_bags(runs, splits_of_parts, values_of_parts, _width([bag.values for bag in bags]), splits, values)
    return Ragged(values, splits)


def _width(ids: Sequence[np.ndarray]) -> int:
    """Bytes of an id; blocks of one decoder have ids of one width."""
    return ids[0].itemsize if ids else 8
