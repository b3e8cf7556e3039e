"""The one step from ids to rows: owners, whole tables and the parts of one host agree on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import RowId
from podembed.embedding.table.key_index import DenseIndex
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec


@given(num_rows=st.integers(1, 300), power=st.integers(0, 5), num_hosts=st.integers(1, 4), seed=st.integers(0, 99))
@settings(deadline=None)
def test_routes_and_rows_say_the_same(num_rows: int, power: int, num_hosts: int, seed: int) -> None:
    layout = BucketLayout(num_rows=num_rows, num_buckets=1 << power)
    rng = np.random.default_rng(seed)
    index = DenseIndex(layout, rng.integers(0, num_hosts, layout.num_buckets))
    ids = rng.permutation(num_rows).astype(np.int64)
    counts, rows, position = np.empty(num_hosts, np.int64), np.empty(num_rows, np.int64), np.empty(num_rows, np.int32)
    index.route(ids, counts, rows, position)
    assert index.rows_of(ids).tolist() == rows[position].tolist()


def test_a_host_knows_which_ids_it_holds_and_where() -> None:
    config = TableConfig(21, 2, initializer=RowId(), name="t")
    table = Table(TableSpec.of(config, seed=0, num_buckets=8), np.array([1, 4, 6]))
    table.initialize()
    ids = np.arange(21)
    rows = table.index.rows_of(ids)
    held = np.isin(ids % 8, [1, 4, 6])
    assert (rows[~held] == -1).all()
    assert table.store.read(rows[held])["rows"][:, 0].tolist() == ids[held].tolist()
    assert table.index.bucket_places(rows[held]).tolist() == [[1, 4, 6].index(bucket) for bucket in ids[held] % 8]


@pytest.mark.parametrize("owners", [None, np.array([0, -1])])
def test_ids_outside_the_table_are_refused(owners: np.ndarray | None) -> None:
    index = DenseIndex(BucketLayout(num_rows=6, num_buckets=2), owners)
    for bad in (-1, 6):
        with pytest.raises(ValueError, match="TableConfig.invalid_ids"):
            index.rows_of(np.array([0, bad]))


def test_a_whole_table_fills_the_array_it_is_given() -> None:
    out = np.empty(4, np.int32)
    assert DenseIndex(BucketLayout(num_rows=7, num_buckets=2)).rows_of(np.array([0, 1, 2, 6]), out) is out
    assert out.tolist() == [0, 4, 1, 3]
