"""From inputs to bags: rows, positions, truncation, gaps, and shares of a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.features.bags import bags_of, split_bags
from podembed.embedding.tf.features.inputs import Sparse, read_input, with_weight


def test_rows_are_bags_where_there_is_no_sequence():
    found = read_input("f", Ragged.of_lists([[1, 2], [], [3]]))
    assert bags_of(found, num_bags=3, is_sequence=False).to_lists() == [[1, 2], [], [3]]


def test_ragged_sequences_are_cut_and_filled_with_empty_bags():
    found = read_input("f", Ragged.of_lists([[1, 2, 3], [], [4]]))
    assert bags_of(found, num_bags=6, is_sequence=True).to_lists() == [[1], [2], [], [], [4], []]
    assert bags_of(found, num_bags=3, is_sequence=True).to_lists() == [[1], [], [4]]


def test_sparse_sequences_lie_at_their_columns():
    sparse = Sparse([[0, 1], [0, 4], [2, 0], [2, 2]], [7, 8, 9, 6], (3, 5))
    assert bags_of(read_input("f", sparse), num_bags=9, is_sequence=True).to_lists() == [
        [], [7], [], [], [], [], [9], [], [6],
    ]  # fmt: skip


def test_weights_follow_their_ids_into_positions():
    ids, weights = Ragged.of_lists([[1, 2, 3], [4]]), Ragged(np.array([0.1, 0.2, 0.3, 0.4]), np.array([0, 3, 4]))
    bags = bags_of(with_weight(read_input("f", ids), weights), num_bags=4, is_sequence=True)
    assert bags.to_lists() == [[1], [2], [4], []]
    np.testing.assert_allclose(bags.weights, [0.1, 0.2, 0.4])


def test_dense_ids_take_the_first_position():
    assert bags_of(read_input("f", np.array([5, 6])), num_bags=4, is_sequence=True).to_lists() == [[5], [], [6], []]


@pytest.mark.parametrize("num_bags", [4, 2, 0, 7])
def test_bags_that_are_no_multiple_of_the_rows_are_refused(num_bags):
    with pytest.raises(ValueError, match="Found 3 rows in input f"):
        bags_of(read_input("f", Ragged.of_lists([[1], [2], [3]])), num_bags=num_bags, is_sequence=False)


def test_no_rows_are_no_bags():
    empty = read_input("f", Ragged.of_lists([]))
    assert bags_of(empty, num_bags=0, is_sequence=False).num_samples == 0
    assert bags_of(empty, num_bags=0, is_sequence=True).num_samples == 0


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=9), st.integers(1, 4), st.integers(1, 3), st.booleans()
)
def test_shares_put_together_are_the_batch(rows, num_shares, positions, has_weights):
    rows = rows[: len(rows) // positions * positions]
    bags = Ragged.of_lists(rows)
    if has_weights:
        bags = Ragged(bags.values, bags.row_splits, np.arange(bags.num_ids, dtype=np.float32))
    shares = split_bags(bags, len(rows) // positions, num_shares)
    assert [row for share in shares for row in share.to_lists()] == rows
    sizes = [share.num_samples // positions for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    if has_weights:
        assert np.concatenate([share.weights for share in shares]).tolist() == bags.weights.tolist()
