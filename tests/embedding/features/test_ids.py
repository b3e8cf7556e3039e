"""Ids outside a vocabulary: what each policy does with them, and that nothing wraps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.config import TableConfig
from podembed.embedding.features.id_policies import fit_ids, hashed, without
from podembed.embedding.ragged import Ragged

IDS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 8), max_size=4), max_size=5)


def table(policy, size=5):
    return TableConfig(size, 2, name="t", invalid_ids=policy)


def test_ids_inside_pass_as_they_are():
    bags = Ragged.of_lists([[0, 4], []])
    for policy in ("error", "drop", "clip", "hash"):
        fitted, count = fit_ids("f", bags, table(policy))
        assert fitted is bags
        assert count == 0
    assert fit_ids("f", Ragged.of_lists([[], []]), table("error"))[1] == 0


@pytest.mark.parametrize(
    ("ids", "text"), [([[1], [2, -1]], "id -1"), ([[5]], "id 5"), ([[0], [2**33 + 5]], "id 8589934597")]
)
def test_error_names_id_feature_sample_and_table(ids, text):
    with pytest.raises(ValueError, match=text) as caught:
        fit_ids("clicks/0", Ragged.of_lists(ids), table("error"))
    message = str(caught.value)
    assert "clicks/0" in message
    assert f"sample {len(ids) - 1}" in message
    assert "table 't'" in message
    assert "0 to 4" in message


def test_drop_takes_the_weight_along_and_keeps_samples():
    bags = Ragged.of([1, -1, 7, 2, 9], [0, 2, 3, 5], [0.1, 0.2, 0.3, 0.4, 0.5])
    fitted, count = fit_ids("f", bags, table("drop"))
    assert count == 3
    assert fitted.to_lists() == [[1], [], [2]]
    np.testing.assert_allclose(fitted.weights, [0.1, 0.4])


def test_clip_moves_to_the_nearest_end():
    fitted, count = fit_ids("f", Ragged.of_lists([[-3, 2, 99]]), table("clip"))
    assert (fitted.to_lists(), count) == ([[0, 2, 4]], 2)


@given(IDS)
def test_every_policy_ends_inside_the_vocabulary(lists):
    bags = Ragged.of_lists(lists)
    outside = sum(not 0 <= i < 5 for row in lists for i in row)
    for policy in ("drop", "clip", "hash"):
        fitted, count = fit_ids("f", bags, table(policy))
        assert count == outside
        assert fitted.num_samples == len(lists)
        assert all(0 <= i < 5 for i in fitted.values)
        if policy != "drop":
            kept = [
                new
                for row, new_row in zip(lists, fitted.to_lists(), strict=True)
                for old, new in zip(row, new_row, strict=True)
                if 0 <= old < 5 and old != new
            ]
            assert kept == []


def test_hash_spreads_and_is_the_same_everywhere():
    assert (
        hashed(np.array([-1, 0, 1, 2**63 - 1]), 1000).tolist() == hashed(np.array([-1, 0, 1, 2**63 - 1]), 1000).tolist()
    )
    # splitmix64 of 0, from its published sequence.
    assert hashed(np.array([0]), 2**62).tolist() == [0xE220A8397B1DCDAF % 2**62]
    counts = np.bincount(hashed(np.arange(-10_000, 0), 10), minlength=10)
    assert counts.min() > 800


def test_without_removes_the_marked():
    assert without(Ragged.of_lists([[1, 2], [3]]), np.array([True, False, True])).to_lists() == [[2], []]
