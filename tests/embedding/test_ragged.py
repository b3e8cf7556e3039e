from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.ragged import Ragged, RaggedError

LISTS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=8)


@given(lists=LISTS)
def test_lists_come_back(lists: list[list[int]]) -> None:
    ragged = Ragged.of_lists(lists)
    assert ragged.to_lists() == lists
    assert ragged.values.dtype == ragged.row_splits.dtype == np.int64
    assert (ragged.num_samples, ragged.num_ids) == (len(lists), sum(map(len, lists)))


@given(lists=LISTS, extra=st.integers(0, 4))
def test_padding_adds_empty_samples(lists: list[list[int]], extra: int) -> None:
    ragged = Ragged.of_lists(lists)
    assert ragged.padded(len(lists) + extra).to_lists() == lists + [[]] * extra


@given(lists=LISTS, extra=st.integers(0, 2))
def test_checked_construction_takes_what_the_other_constructors_make(lists: list[list[int]], extra: int) -> None:
    ragged = Ragged.of_lists(lists).padded(len(lists) + extra)
    again = Ragged.of(ragged.values, ragged.row_splits, np.ones(ragged.num_ids))
    assert again.to_lists() == ragged.to_lists()
    assert again.weights is not None
    assert again.weights.dtype == np.float32


def test_dense_ids_are_one_or_several_a_sample() -> None:
    assert Ragged.of_dense(np.array([4, 5, 6], np.int32)).to_lists() == [[4], [5], [6]]
    assert Ragged.of_dense(np.arange(6).reshape(2, 3)).to_lists() == [[0, 1, 2], [3, 4, 5]]
    assert Ragged.of_dense(np.zeros((0, 3), np.int64)).to_lists() == []
    assert Ragged.of_dense(np.zeros((3, 0), np.int64)).to_lists() == [[], [], []]


def test_dense_ids_may_be_a_view_with_gaps() -> None:
    wide = np.arange(12).reshape(3, 4)
    ragged = Ragged.of_dense(wide[:, ::2])
    assert ragged.to_lists() == [[0, 2], [4, 6], [8, 10]]
    assert ragged.values.flags.c_contiguous


@pytest.mark.parametrize(
    ("values", "splits", "weights", "words"),
    [
        ([1.5, 2.0], [0, 2], None, "float64"),
        ([[1, 2]], [0, 2], None, "shape (1, 2)"),
        ([True, False], [0, 2], None, "bool"),
        ([1, 2], [], None, "at least one integer"),
        ([1, 2], [0.0, 2.0], None, "float64"),
        ([1, 2], [[0, 2]], None, "shape (1, 2)"),
        ([1, 2], [1, 2], None, "from 1 to 2"),
        ([1, 2], [0, 1], None, "from 0 to 1 over 2 ids"),
        ([1, 2], [0, 2, 1, 2], None, "falling from 2 to 1 at sample 1"),
        ([1, 2], [0, 2], [1.0], "(1,) weights for (2,) ids"),
        ([2**63], [0, 1], None, "9223372036854775808"),
    ],
)
def test_parts_that_do_not_fit_are_named(values: object, splits: object, weights: object, words: str) -> None:
    with pytest.raises(RaggedError) as caught:
        Ragged.of(values, splits, weights)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "Expected" in str(caught.value)


def test_ids_that_are_no_integers_are_refused_everywhere() -> None:
    with pytest.raises(RaggedError, match="float64"):
        Ragged.of_dense(np.array([1.5]))
    with pytest.raises(RaggedError, match=r"1\.5"):
        Ragged.of_lists([[1], [1.5]])  # type: ignore[list-item]


def test_padding_to_fewer_samples_is_refused() -> None:
    with pytest.raises(RaggedError, match="2 samples"):
        Ragged.of_lists([[1], [2]]).padded(1)


def test_no_ids_and_no_samples() -> None:
    assert Ragged.of([], [0]).num_samples == 0
    assert Ragged.of([], [0, 0, 0]).to_lists() == [[], []]
    assert Ragged.of([], [0, 0], []).num_ids == 0
