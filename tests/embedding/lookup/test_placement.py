"""Tables are placed whole where that is fair, stay where they are, and are cut where they are too large."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.buckets import MAX_BUCKETS
from podembed.embedding.config import TableConfig
from podembed.embedding.lookup.placement import MOST_WORK, buckets_for_work, place_tables, ways
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.embedding.table_spec import TableSpec
from tests.long_tests import examples


def spec(at: int, num_rows: int, num_buckets: int = 8, rule=None) -> TableSpec:
    config = TableConfig(num_rows, 4, name=f"t{at}", optimizer=rule or Adagrad(0.1))
    return TableSpec.of(config, seed=0, num_buckets=num_buckets)


@settings(deadline=None, max_examples=examples(50))
@given(
    rows=st.lists(st.integers(8, 5000), min_size=1, max_size=12),
    hosts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_fair_tables_are_whole_through_any_chain_of_hosts(rows: list[int], hosts: list[int]) -> None:
    specs = [spec(at, count) for at, count in enumerate(rows)]
    sizes = [8 * one.bucket_bytes for one in specs]
    placement = None
    for num_hosts in hosts:
        placement = place_tables(specs, num_features=[1] * len(specs), num_hosts=num_hosts, previous=placement)
        load = np.zeros(num_hosts)
        for one, owners in zip(specs, placement, strict=True):
            assert owners.shape == (8,)
            assert owners.dtype == np.int32
            assert ((owners >= 0) & (owners < num_hosts)).all()
            np.add.at(load, owners, one.bucket_bytes)
            if 8 * one.bucket_bytes <= sum(sizes) // num_hosts and num_hosts <= MOST_WORK * len(specs):
                assert len(set(owners.tolist())) == 1
        # Bytes and features count alike, and a host is at most one table above the fair share of their sum.
        assert load.max() <= 2 * sum(sizes) / num_hosts + max(sizes)


def test_a_table_above_the_fair_share_is_cut() -> None:
    large, small = place_tables([spec(0, 8000), spec(1, 80)], num_features=[1, 0], num_hosts=2)
    assert np.bincount(large).tolist() == [4, 4]
    assert len(set(small.tolist())) == 1


def test_a_table_is_cut_where_its_owner_would_work_for_too_many_hosts() -> None:
    """Six tables of equal size: one host in nine would do a sixth of the work, one in ten too much."""
    specs = [spec(at, 80) for at in range(6)]
    large = [spec(6, 800_000)]
    for num_hosts, is_whole in ((9, True), (10, False)):
        found = ways(specs + large, num_features=[1] * 6 + [0], num_hosts=num_hosts)
        assert [way.is_whole for way in found] == [is_whole] * 6 + [False]
        placed = place_tables(specs + large, num_features=[1] * 6 + [0], num_hosts=num_hosts)
        assert [len(set(owners.tolist())) == 1 for owners in placed] == [is_whole] * 6 + [False]
    assert ways(specs + large, num_features=[1] * 6 + [0], num_hosts=10)[0].reason.startswith("work: features 1, more")
    # The same with few hosts, where one table has most of the features.
    found = ways(specs + large, num_features=[7, 1, 1, 0, 0, 0, 0], num_hosts=2)
    assert [way.is_whole for way in found] == [False] + [True] * 5 + [False]


@pytest.mark.parametrize(
    ("num_rows", "num_features", "most_hosts", "num_buckets"),
    [
        (5000, 1, 31, 1),  # few hosts
        (5000, 1, 39, 1),  # the owner works 39 / 26 of the mean
        (5000, 1, 40, 8),  # a bucket is 26 / 40 / 8 of a feature, less than a quarter of a host's share
        (5000, 3, 40, 32),
        (5000, 0, 1024, 1),  # nobody looks it up
        (5000, 1, 1024, 256),
        (100, 1, 1024, 128),  # one row a bucket
        (1, 1, 1024, 1),
        (1 << 20, 26, 1 << 20, MAX_BUCKETS),
    ],
)
def test_buckets_for_work(num_rows: int, num_features: int, most_hosts: int, num_buckets: int) -> None:
    found = buckets_for_work(num_rows=num_rows, num_features=num_features, all_features=26, most_hosts=most_hosts)
    assert found == num_buckets


def test_no_host_of_many_works_much_more_than_the_others() -> None:
    """Small tables only. With one bucket each, 26 of 256 hosts would do all the work."""
    rows = [400 + 100 * at for at in range(26)]
    counts = [buckets_for_work(num_rows=count, num_features=1, all_features=26, most_hosts=256) for count in rows]
    specs = [spec(at, count, num_buckets) for at, (count, num_buckets) in enumerate(zip(rows, counts, strict=True))]
    for num_hosts in (64, 256):
        placed = place_tables(specs, num_features=[1] * 26, num_hosts=num_hosts)
        work = sum((np.bincount(owners, minlength=num_hosts) / len(owners) for owners in placed), np.zeros(num_hosts))
        assert work.max() <= MOST_WORK * work.mean()
    placed = place_tables(specs, num_features=[1] * 26, num_hosts=8)
    assert all(len(set(owners.tolist())) == 1 for owners in placed), "with few hosts they stay whole"


def test_tables_stay_with_their_host() -> None:
    specs = [spec(at, 100 + at) for at in range(8)]
    before = place_tables(specs, num_features=[1] * 8, num_hosts=2)
    after = place_tables(specs, num_features=[1] * 8, num_hosts=2, previous=before)
    for old, new in zip(before, after, strict=True):
        assert (old == new).all()


def test_rules_that_need_rows_are_cut() -> None:
    specs = [spec(0, 100, rule=SGD(0.1, use_gradient_accumulation=False)), spec(1, 100), spec(2, 100)]
    cut, *_ = place_tables(specs, num_features=[1, 1, 1], num_hosts=2)
    assert len(set(cut.tolist())) == 2


def test_features_count_beside_bytes() -> None:
    """One large table and many small ones: by bytes alone one host would get all features but one."""
    specs = [spec(0, 4000), *(spec(at, 400) for at in range(1, 11))]
    owners = [int(one[0]) for one in place_tables(specs, num_features=[1] * 11, num_hosts=2)]
    assert sorted(np.bincount(owners).tolist()) == [4, 7]


def test_a_table_that_is_cut_for_more_hosts_is_spread_over_all_of_them() -> None:
    """It lay whole on one of two hosts, which would otherwise keep most of its buckets, and get most of its ids."""
    rows = [10, 100, 300, 700, 1200, 2000, 3000, 5000, 8000, 12000, 18000, 20000, 60000, 100_000]
    specs = [spec(at, count) for at, count in enumerate(rows)]
    features = [1] * len(specs)
    before = place_tables(specs, num_features=features, num_hosts=2)
    assert len(set(before[-1].tolist())) == 1
    after = place_tables(specs, num_features=features, num_hosts=3, previous=before)
    cut = np.bincount(after[-1], minlength=3)
    assert sorted(cut.tolist()) == [2, 3, 3]
    assert (after[-1] == before[-1]).sum() == cut[before[-1][0]], "buckets moved that could have stayed"
    held, load = np.zeros(3), np.zeros(3)
    for one, owners in zip(specs, after, strict=True):
        np.add.at(held, owners, one.bucket_bytes)
        np.add.at(load, owners, one.bucket_bytes + sum(8 * s.bucket_bytes for s in specs) / len(specs) / 8)
    assert held.max() <= 1.2 * held.mean(), held
    assert load.max() <= 1.05 * load.mean(), load


def test_a_table_that_becomes_whole_goes_to_the_host_that_had_most_of_it() -> None:
    specs = [spec(0, 80), spec(1, 80), spec(2, 80)]
    before = [np.array([0, 1, 1, 0, 1, 1, 2, 2], np.int32), np.full(8, 0, np.int32), np.full(8, 2, np.int32)]
    after = place_tables(specs, num_features=[1, 1, 1], num_hosts=3, previous=before)
    assert [set(owners.tolist()) for owners in after] == [{1}, {0}, {2}]
