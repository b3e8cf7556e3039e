from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.features.column_shape import ColumnShape
from podembed.embedding.ragged import Ragged
from podembed.workers.columns.gather import Block, LaneRows, WindowShape, interleave
from podembed.workers.data.batch import PADDING_SAMPLE_ID, Batch
from tests.batches import joined
from tests.workers.formats.parquet_sets import assert_same

NUM_DENSE = 2
COLUMNS = {"buy": ColumnShape(), "pair": ColumnShape((2,), "int32")}


def block_of(bags: list[list[int]], *, first: int, is_single: bool = True) -> Block:
    """Rows `first` onwards, with two features of one id a row and one of bags."""
    numbers = np.arange(first, first + len(bags))
    singles = np.stack([numbers * 3, numbers * 5]).astype(np.int64)
    one_each = np.arange(len(bags) + 1)
    features = {"a": Ragged(singles[0], one_each), "bag": Ragged.of_lists(bags), "b": Ragged(singles[1], one_each)}
    rows = Batch(
        dense=np.stack([numbers / 2, -numbers], axis=1).astype(np.float32),
        labels=(numbers % 2).astype(np.float32),
        weights=(1 + numbers).astype(np.float32),
        features=features,
        sample_ids=numbers,
        columns={"buy": (numbers / 4).astype(np.float32), "pair": np.stack([numbers, -numbers], 1).astype(np.int32)},
    )
    if is_single:
        return Block(rows=rows, single_names=("a", "b"), singles=singles)
    return Block(rows=rows, single_names=(), singles=singles[:0])


def expected(parts: list[LaneRows], shape: WindowShape, like: Batch) -> Batch:
    """The same from slices, row after row."""
    rows = [like.padded(1)] * shape.num_samples
    for part in parts:
        for k in range(part.num_rows):
            step, within = divmod(part.lane_row + k, shape.rows_per_step)
            place = (step * shape.num_lanes + part.lane) * shape.rows_per_step + within
            rows[place] = part.block.rows.slice(part.first_row + k, part.first_row + k + 1)
    return joined([like, *rows])


bags = st.lists(st.lists(st.integers(0, 2**62), max_size=4), min_size=1, max_size=9)


@settings(deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.lists(st.lists(bags, max_size=4), max_size=3), st.data()
)
def test_rows_come_to_their_step_and_what_is_missing_is_padding(
    num_steps: int, num_lanes: int, rows_per_step: int, lanes: list[list[list[list[int]]]], data: st.DataObject
) -> None:
    shape = WindowShape(num_steps=num_steps, num_lanes=num_lanes, rows_per_step=rows_per_step)
    parts, first = [], 0
    for lane, blocks in enumerate(lanes[:num_lanes]):
        lane_row = 0
        for block_bags in blocks:
            block = block_of(block_bags, first=first, is_single=data.draw(st.booleans()))
            first += len(block_bags)
            first_row = data.draw(st.integers(0, len(block_bags) - 1))
            num_rows = min(len(block_bags) - first_row, shape.rows_per_lane - lane_row)
            if num_rows:
                parts.append(
                    LaneRows(block=block, first_row=first_row, num_rows=num_rows, lane=lane, lane_row=lane_row)
                )
            lane_row += num_rows
    like = Batch.empty(["a", "bag", "b"], num_dense=NUM_DENSE, columns=COLUMNS)
    assert_same(interleave(parts, shape=shape, like=like), expected(parts, shape, like))


@pytest.mark.parametrize("num_rows", [6, 5])
def test_features_with_one_id_a_row_share_their_offsets_with_and_without_padding(num_rows: int) -> None:
    shape = WindowShape(num_steps=3, num_lanes=1, rows_per_step=2)
    part = LaneRows(block=block_of([[1]] * 6, first=0), first_row=0, num_rows=num_rows, lane=0, lane_row=0)
    gathered = interleave(
        [part], shape=shape, like=Batch.empty(["b", "bag", "a"], num_dense=NUM_DENSE, columns=COLUMNS)
    )
    assert list(gathered.features) == ["b", "bag", "a"]
    assert gathered.features["a"].row_splits is gathered.features["b"].row_splits
    sliced = gathered.slice(2, 4)
    assert sliced.features["a"].row_splits is sliced.features["b"].row_splits
    assert sliced.features["b"].to_lists() == [[10], [15]]


def test_a_window_of_no_lanes_and_rows_without_dense_numbers() -> None:
    like = Batch.empty(["a"], num_dense=0)
    nothing = interleave([], shape=WindowShape(num_steps=2, num_lanes=0, rows_per_step=3), like=like)
    assert nothing.num_samples == 0
    padding = interleave([], shape=WindowShape(num_steps=2, num_lanes=1, rows_per_step=3), like=like)
    assert padding.sample_ids.tolist() == [PADDING_SAMPLE_ID] * 6
    assert padding.dense.shape == (6, 0)
