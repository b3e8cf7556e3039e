"""What an engine's values do without any engine."""

import copy
import pickle

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import SGD
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.engine import EngineSpec, Share, rates_at


def test_rates_that_are_numbers_ask_for_no_step():
    def nobody_asks() -> int:
        raise AssertionError

    assert rates_at([0.5, 0.25], nobody_asks) == [0.5, 0.25]
    assert rates_at(lambda step: [step / 4], lambda: 3) == [0.75]


def test_a_share_travels_as_it_is():
    bags = (
        Ragged.of([3, 1, 2], [0, 1, 1, 3], [0.5, 1.0, 2.0]),
        Ragged.of([], [0, 0]),
        Ragged.of([2**40], [0, 1, 1]),
    )
    share = Share(features=bags, is_training=False, name="n", altered_ids=(0, 4))
    found = copy.deepcopy(share)
    assert (found.is_training, found.name, found.altered_ids) == (False, "n", (0, 4))
    assert [one.to_lists() for one in found.features] == [[[3], [], [1, 2]], [[]], [[2**40], []]]
    assert [None if one.weights is None else one.weights.tolist() for one in found.features] == [
        [0.5, 1.0, 2.0],
        None,
        None,
    ]
    assert {one.values.dtype for one in found.features} == {np.dtype(np.int64)}


@pytest.mark.parametrize(("largest", "num_bytes"), [(255, 1), (256, 2), (2**31, 4), (2**40, 8)])
@pytest.mark.parametrize("is_even", [False, True])
def test_a_share_travels_in_as_few_bytes_as_it_needs(largest, num_bytes, is_even):
    ids = np.append(np.zeros(9_999, np.int64), largest)
    splits = np.arange(0, 10_001, 10)
    splits[1:-1] += 0 if is_even else np.arange(999) % 2
    bags = Ragged(ids, splits), Ragged.of_lists([[1], [2, 3], []])
    share = Share(features=bags, is_training=True)
    assert len(pickle.dumps(share)) < num_bytes * 10_000 + (0 if is_even else 1_000) + 600
    found, small = copy.deepcopy(share).features
    np.testing.assert_array_equal(found.values, ids)
    np.testing.assert_array_equal(found.row_splits, splits)
    assert small.to_lists() == [[1], [2, 3], []]


@pytest.mark.parametrize("last", [[[7], [8], [9]], [[7], [], [8, 9]]])
def test_features_with_as_many_samples_travel_as_they_are(last):
    lists = [[[1, 2], [3, 4], [5, 6]], [[], [], []], last]
    share = Share(features=tuple(Ragged.of_lists(one) for one in lists), is_training=True)
    found = copy.deepcopy(share).features
    assert [one.to_lists() for one in found] == lists
    assert {one.row_splits.dtype for one in found} == {np.dtype(np.int64)}


def test_what_replicas_get_packs_without_initializers():
    def first_values(shape, dtype=None):
        raise AssertionError

    table = TableSpec.of(TableConfig(10, 2, first_values, SGD(0.1), name="t"), seed=0)
    spec = EngineSpec(tables=(table,), features=(), quantization=(None,), is_pipelined=False)
    pickle.dumps(spec.for_replicas())
    (found,) = spec.for_replicas().tables
    assert (found.name, found.dim, found.optimizer) == ("t", 2, SGD(0.1))
    with pytest.raises(RuntimeError, match="First values"):
        found.initializer((1, 2))
