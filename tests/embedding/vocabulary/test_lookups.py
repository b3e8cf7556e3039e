"""Dynamic tables in lookups and updates beside static ones: with room for all keys the numbers agree."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.row_index import DenseKeys
from podembed.embedding.vocabulary.key_space import DynamicKeys
from tests.workers.host.test_cut_tables import Pod, draw_bags


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("pools_cut", [False, True])
def test_lookups_and_updates_have_the_numbers_of_static_tables(num_hosts: int, pools_cut: bool) -> None:
    """Tables that lie whole and tables that are cut, pooled at their owners and by rows, with prefetches."""
    random = np.random.default_rng(num_hosts)
    batches = [
        [
            {f"f{at}": draw_bags(random, of, is_weighted=at == 3) for at, of in enumerate((1, 0, 2, 1, 3))}
            for _ in range(num_hosts)
        ]
        for _ in range(4)
    ]
    found = []
    for keys in (DenseKeys(), DynamicKeys(capacity=1)):
        pod = Pod(num_hosts, pools_cut=pools_cut, shares=False, prefetches=True, wire="float32", keys=keys)
        found.append(pod.train(batches))
    for dense, hashed in zip(*found, strict=True):
        for one, other in zip(dense, hashed, strict=True):
            if pools_cut and num_hosts > 1:
                # Partial sums of a bag follow who owns its keys.
                np.testing.assert_allclose(other, one, rtol=2e-6, atol=2e-6)
            else:
                assert other.tobytes() == one.tobytes()
