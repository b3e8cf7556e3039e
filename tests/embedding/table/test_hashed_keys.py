"""The second kind of index by itself, and in lookups beside the dense one: with room for all keys the numbers agree."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.initializers import Uniform
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.row_index import DenseKeys, KeyRequest, KeySpace
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from tests.embedding.table.hashed_keys import HashedIndex, HashedKeys
from tests.workers.host.test_cut_tables import Pod, draw_bags

BIG = [-(1 << 63), -1, 1 << 40, (1 << 63) - 1]


def a_table(keys: KeySpace, num_rows: int = 40, num_buckets: int = 4) -> Table:
    spec = TableSpec(
        name="t",
        num_rows=num_rows,
        dim=3,
        layout=BucketLayout(num_rows=num_rows, num_buckets=num_buckets),
        optimizer=Adagrad(0.1),
        initializer=Uniform(-1.0, 1.0),
        combiner="sum",
        seed=1,
        keys=keys,
    )
    table = Table(spec, np.arange(num_buckets))
    table.initialize()
    return table


def values(table: Table, keys: list[int]) -> list[list[float]]:
    rows = np.empty(len(keys), np.int64)
    table.index.accept([KeyRequest(np.array(keys), rows)], None)
    return table.store.read(rows)["rows"].tolist()


def name_keys(table: Table, step: int, *keys: np.ndarray) -> None:
    table.index.accept([KeyRequest(some, np.empty_like(some)) for some in keys], step)


def test_keys_begin_with_their_first_values_and_come_back_with_them() -> None:
    table = a_table(HashedKeys(forget_after=2))
    keys = np.array(BIG)
    name_keys(table, 1, keys, keys)
    first = values(table, BIG)
    assert len({tuple(row) for row in first}) == len(BIG)
    rows = table.index.rows_of(keys)
    table.update(rows, np.ones((4, 3), np.float32), 0.1)
    assert values(table, BIG) != first
    for number in range(2, 6):
        name_keys(table, number, np.array([7]))
    assert isinstance(table.index, HashedIndex)
    assert table.index.num_forgotten == len(BIG)
    assert values(table, BIG) == [[0.0] * 3] * 4
    name_keys(table, 6, keys)
    assert values(table, BIG) == first


def test_an_index_is_found_again_in_its_columns() -> None:
    table = a_table(HashedKeys())
    for number in range(3):
        name_keys(table, number, np.array(BIG[number:]))
    other = a_table(HashedKeys())
    for bucket in range(4):
        for name, array in table.bucket(bucket).items():
            other.bucket(bucket)[name][...] = array
    other.index.rebuild()
    assert values(other, BIG) == values(table, BIG)
    # Both forget the same keys from here on.
    for one in (table, other):
        for number in range(3, 12):
            name_keys(one, number, np.arange(4 * number, 4 * number + 8))
    everything = [*BIG, *range(60)]
    assert values(other, everything) == values(table, everything)


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("pools_cut", [False, True])
def test_lookups_and_updates_have_the_numbers_of_dense_tables(num_hosts: int, pools_cut: bool) -> None:
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
    for keys in (DenseKeys(), HashedKeys()):
        pod = Pod(num_hosts, pools_cut=pools_cut, shares=False, prefetches=True, wire="float32", keys=keys)
        found.append(pod.train(batches))
    for dense, hashed in zip(*found, strict=True):
        for one, other in zip(dense, hashed, strict=True):
            if pools_cut and num_hosts > 1:
                # Partial sums of a bag follow who owns its keys.
                np.testing.assert_allclose(other, one, rtol=2e-6, atol=2e-6)
            else:
                assert other.tobytes() == one.tobytes()
