from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.parquet_sets import assert_same
from tests.workers.test_batch import batch_of
from workers.batch import Batch
from workers.gather import Part, gather_rows

bags = st.lists(st.lists(st.integers(0, 2**62), max_size=4), min_size=1, max_size=8)


@settings(deadline=None)
@given(st.lists(bags, min_size=1, max_size=4), st.booleans(), st.integers(0, 3), st.data())
def test_rows_reach_their_destinations(
    blocks: list[list[list[int]]], weighted: bool, padding: int, data: st.DataObject
) -> None:
    batches = [batch_of(block, first_id=100 * at, weighted=weighted and at == 0) for at, block in enumerate(blocks)]
    wanted = [(at, row) for at, block in enumerate(blocks) for row in range(len(block))]
    wanted = data.draw(st.permutations(wanted))[: data.draw(st.integers(0, len(wanted)))]
    num_samples = len(wanted) + padding
    places = data.draw(st.permutations(range(num_samples)))[: len(wanted)]
    parts = []
    for at, batch in enumerate(batches):
        mine = [k for k, (block, _) in enumerate(wanted) if block == at]
        rows = np.array([wanted[k][1] for k in mine], np.int64)
        parts.append(Part(block=batch, rows=rows, destinations=np.array([places[k] for k in mine], np.int64)))
    gathered = gather_rows(parts, num_samples=num_samples, like=batches[0])

    nothing = Batch.empty(["one", "bag"], num_dense=2)
    at_place = dict(zip(places, wanted, strict=True))
    rows = [
        batches[at_place[k][0]].slice(at_place[k][1], at_place[k][1] + 1) if k in at_place else nothing.padded(1)
        for k in range(num_samples)
    ]
    expected = Batch.concatenate([nothing, *rows])
    assert_same(gathered, expected)
    weights, expected_weights = gathered.features["bag"].weights, expected.features["bag"].weights
    if weights is not None and expected_weights is not None:
        assert weights.tolist() == expected_weights.tolist()
    else:
        assert weights is None or (weights == 1).all()
        assert expected_weights is None


def test_features_with_one_id_a_row_still_share_their_offsets() -> None:
    splits = np.arange(4)
    block = batch_of([[1], [2], [3]])
    block.features["one"] = type(block.features["one"])(np.arange(3), splits)
    block.features["two"] = type(block.features["one"])(np.arange(3) + 10, splits)
    part = Part(block=block, rows=np.array([2, 0]), destinations=np.array([0, 1]))
    gathered = gather_rows([part], num_samples=2, like=block)
    assert gathered.features["one"].row_splits is gathered.features["two"].row_splits
    sliced = gathered.slice(1, 2)
    assert sliced.features["one"].row_splits is sliced.features["two"].row_splits
    assert sliced.features["two"].to_lists() == [[10]]
