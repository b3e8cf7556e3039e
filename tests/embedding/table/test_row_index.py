"""The step from keys to rows: the host that asks finds the owner, and the owner the row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import RowId
from podembed.embedding.lookup.router import Router
from podembed.embedding.row_index import DenseIndex, KeyRequest
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec


def spec_of(num_rows: int, num_buckets: int) -> TableSpec:
    return TableSpec.of(TableConfig(num_rows, 2, initializer=RowId(), name="t"), seed=0, num_buckets=num_buckets)


@given(num_rows=st.integers(1, 300), power=st.integers(0, 5), num_hosts=st.integers(1, 4), seed=st.integers(0, 99))
@settings(deadline=None)
def test_every_key_finds_its_own_row_at_the_owner_it_is_sent_to(
    num_rows: int, power: int, num_hosts: int, seed: int
) -> None:
    spec, rng = spec_of(num_rows, 1 << power), np.random.default_rng(seed)
    owners = rng.integers(0, num_hosts, 1 << power)
    ids = rng.permutation(num_rows).astype(np.int64)
    counts, routed, position = np.empty(num_hosts, np.int64), np.empty(num_rows, np.int64), np.empty(num_rows, np.int32)
    Router(spec, owners).route(ids, counts, routed, position)
    assert routed[position].tolist() == ids.tolist()
    for host, keys in enumerate(np.split(routed, np.cumsum(counts)[:-1])):
        table = Table(spec, np.flatnonzero(owners == host))
        table.initialize()
        rows = np.empty(len(keys), np.int32)
        table.index.accept([KeyRequest(keys, rows)], None)
        assert rows.tolist() == table.index.rows_of(keys).tolist()
        assert table.store.read(rows.astype(np.int64))["rows"][:, 0].tolist() == keys.tolist()


def test_rows_may_take_the_memory_of_their_keys() -> None:
    index = DenseIndex(BucketLayout(num_rows=9, num_buckets=2), np.arange(2))
    for dtype in (np.int32, np.int64):
        keys = np.array([8, 0, 3, 3], dtype)
        index.accept([KeyRequest(keys, keys.view(np.int32)[: len(keys)])], None)
        assert keys.view(np.int32)[:4].tolist() == [4, 0, 6, 6]


@pytest.mark.parametrize("bad", [1, -1, -2, 10, 1 << 30])
def test_a_key_whose_bucket_is_not_held_is_refused(bad: int) -> None:
    index = DenseIndex(BucketLayout(num_rows=9, num_buckets=2), np.arange(1))
    keys = np.array([0, bad, 2], np.int64)
    with pytest.raises(ValueError, match="that this host does not hold|for a table of 9 rows"):
        index.accept([KeyRequest(keys, keys)], None)


def test_a_host_knows_which_ids_it_holds_and_where() -> None:
    config = TableConfig(21, 2, initializer=RowId(), name="t")
    table = Table(TableSpec.of(config, seed=0, num_buckets=8), np.array([1, 4, 6]))
    table.initialize()
    ids = np.arange(21)
    rows = table.index.rows_of(ids)
    held = np.isin(ids % 8, [1, 4, 6])
    assert (rows[~held] == -1).all()
    assert table.store.read(rows[held])["rows"][:, 0].tolist() == ids[held].tolist()
    assert table.bucket_places(rows[held]).tolist() == [[1, 4, 6].index(bucket) for bucket in ids[held] % 8]


def test_ids_outside_the_table_are_refused() -> None:
    index = DenseIndex(BucketLayout(num_rows=6, num_buckets=2), np.arange(2))
    for bad in (-1, 6):
        with pytest.raises(ValueError, match="TableConfig.invalid_ids"):
            index.rows_of(np.array([0, bad]))


def test_keys_travel_in_32_bits_where_all_of_them_fit() -> None:
    assert Router(spec_of(7, 1)).key_dtype == np.int32
    assert Router(spec_of(1 << 31, 1024)).key_dtype == np.int32
    assert Router(spec_of((1 << 31) + 1, 1024)).key_dtype == np.int64
    out = np.empty(2, np.int32)
    for bad in (-1, 7, 1 << 32):
        with pytest.raises(ValueError, match=f"Found id {bad} for a table of 7 rows"):
            Router(spec_of(7, 1)).copy(np.array([0, bad]), out)
