from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.hashing import mix64
from podembed.workers.input.lanes import permutation


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_permutation_holds_every_position_once(count: int) -> None:
    assert sorted(permutation(count, seed=5).tolist()) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 17, 1000, 32_768, 40_001])
@pytest.mark.parametrize("seed", [0, 1, -3, 2**70])
def test_permutation_sorts_the_mixed_positions(count: int, seed: int) -> None:
    expected = np.argsort(mix64(np.arange(count, dtype=np.uint64), salt=seed))
    assert np.array_equal(permutation(count, seed=seed), expected)


def test_permutation_is_fixed_for_good() -> None:
    # A change here changes what a saved run reads after it is resumed.
    assert permutation(8, seed=1).tolist() == [4, 3, 2, 5, 7, 1, 0, 6]
    assert permutation(100, seed=1).tolist() != permutation(100, seed=2).tolist()
