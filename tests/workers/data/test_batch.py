from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch, BatchError
from podembed.workers.data.input_errors import InputError
from tests.batches import joined


def batch_of(bags: list[list[int]], *, first_id: int = 0, weighted: bool = False) -> Batch:
    count = len(bags)
    ids = Ragged.of_lists(bags)
    weights = np.arange(ids.num_ids, dtype=np.float32) if weighted else None
    return Batch(
        dense=np.arange(count * 2, dtype=np.float32).reshape(count, 2),
        labels=np.arange(count, dtype=np.float32) % 2,
        weights=np.ones(count, np.float32),
        features={"one": Ragged.of_dense(np.arange(count)), "bag": Ragged(ids.values, ids.row_splits, weights)},
        sample_ids=np.arange(first_id, first_id + count),
        columns={"buy": np.arange(count, dtype=np.float32), "pair": np.ones((count, 2), np.int32)},
    )


def test_padding_rows_count_for_nothing() -> None:
    padded = batch_of([[1, 2], []]).padded(4)
    assert padded.num_samples == 4
    assert padded.weights.tolist() == [1, 1, 0, 0]
    assert padded.sample_ids.tolist() == [0, 1, -1, -1]
    assert padded.is_padding.tolist() == [False, False, True, True]
    assert padded.features["bag"].to_lists() == [[1, 2], [], [], []]
    assert padded.features["one"].to_lists() == [[0], [1], [], []]
    assert not padded.dense[2:].any()
    assert padded.columns["buy"].tolist() == [0, 1, 0, 0]
    assert padded.columns["pair"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert padded.columns["pair"].dtype == np.int32


def test_padding_to_fewer_rows_is_refused() -> None:
    with pytest.raises(BatchError, match="2 samples to pad to 1"):
        batch_of([[1], [2]]).padded(1)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"features": {"bag": Ragged.of_lists([[1]])}}, "1 samples in feature 'bag'"),
        ({"columns": {"buy": np.zeros(3, np.float32)}}, "3 samples in column 'buy'"),
    ],
)
def test_parts_of_different_lengths_are_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        replace(batch_of([[1], [2]]), **part)


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 2), (3, 3), (1, 3)])
def test_slices_are_all_rows_together(start: int, stop: int) -> None:
    whole = batch_of([[1, 2], [], [3]], weighted=True)
    parts = [whole.slice(0, start), whole.slice(start, stop), whole.slice(stop, 3)]
    assert parts[1].features["bag"].to_lists() == [[1, 2], [], [3]][start:stop]
    together = joined(parts)
    assert together.features["bag"].to_lists() == [[1, 2], [], [3]]
    assert together.features["bag"].weights is not None
    assert together.features["bag"].weights.tolist() == [0, 1, 2]
    assert together.columns["buy"].tolist() == [0, 1, 2]
    assert together.columns["pair"].shape == (3, 2)
    assert together.features["one"].to_lists() == [[0], [1], [2]]
    assert together.sample_ids.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(together.dense, whole.dense)


def test_the_only_id_of_samples() -> None:
    batch = batch_of([[3], [], [5, 6], [7]])
    assert batch.only_ids("one", np.array([0, 3])).tolist() == [0, 3]
    assert batch.only_ids("bag", np.array([3, 0])).tolist() == [7, 3]
    with pytest.raises(InputError, match="0 ids of feature 'bag' in sample 1"):
        batch.only_ids("bag", np.array([0, 1]))
    with pytest.raises(InputError, match="2 ids of feature 'bag' in sample 2"):
        batch.only_ids("bag", np.array([0, 2]))
