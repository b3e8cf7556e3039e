"""Placement of buckets: every bucket has one owner, loads are even, little moves, and equal arguments give equal
answers.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.buckets import (
    MAX_BUCKETS,
    MAX_FINE_BUCKETS,
    TARGET_BUCKET_BYTES,
    USUAL_BUCKETS,
    BucketLayout,
    _fill,
    _Placed,
    bucket_layout,
    place,
    split_evenly,
    within_reason,
)

Sizes = list[np.ndarray]


@st.composite
def tables(draw: st.DrawFn) -> Sizes:
    """Bucket sizes of a few tables; within one table all buckets are equal, as in a run."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5_000)), min_size=1, max_size=6))
    return [np.full(1 << power, size, np.int64) for power, size in shapes]


def loads(sizes: Sizes, placement: list[np.ndarray], num_hosts: int) -> np.ndarray:
    result = np.zeros(num_hosts, np.int64)
    for size, owners in zip(sizes, placement, strict=True):
        np.add.at(result, owners, size)
    return result


def moved_bytes(sizes: Sizes, before: list[np.ndarray], after: list[np.ndarray]) -> int:
    return sum(int(size[old != new].sum()) for size, old, new in zip(sizes, before, after, strict=True))


def check_partition(sizes: Sizes, placement: list[np.ndarray], num_hosts: int) -> None:
    assert [len(owners) for owners in placement] == [len(size) for size in sizes]
    for owners in placement:
        assert owners.dtype == np.int32
        assert ((owners >= 0) & (owners < num_hosts)).all()


def limit(sizes: Sizes, num_hosts: int) -> int:
    """What the busiest host may have: 1.02 times the mean, or what a table's even share in whole buckets is."""
    mean = sum(int(size.sum()) for size in sizes) / num_hosts
    return int(max([1.02 * mean, *(-(-len(size) // num_hosts) * size[0] for size in sizes)]))


def check_balance(sizes: Sizes, placement: list[np.ndarray], num_hosts: int) -> None:
    """Every table is spread evenly; the busiest host is within the limit, or has no bucket that another could take."""
    counts = [np.bincount(owners, minlength=num_hosts) for owners in placement]
    most = [-(-len(owners) // num_hosts) for owners in placement]
    assert all(count.max() <= share for count, share in zip(counts, most, strict=True))
    load = loads(sizes, placement, num_hosts)
    busiest = int(load.argmax())
    if load[busiest] <= limit(sizes, num_hosts):
        return
    for size, count, share in zip(sizes, counts, most, strict=True):
        if count[busiest]:
            assert (load[count < share] + size[0] >= load[busiest]).all()


@settings(deadline=None)
@given(sizes=tables(), hosts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_chain_of_host_numbers_keeps_a_balanced_partition(sizes: Sizes, hosts: list[int]) -> None:
    placement = None
    for num_hosts in hosts:
        placement = place(bucket_bytes=sizes, num_hosts=num_hosts, previous=placement)
        check_partition(sizes, placement, num_hosts)
        check_balance(sizes, placement, num_hosts)


@settings(deadline=None)
@given(sizes=tables(), before=st.integers(1, 9), after=st.integers(1, 9))
def test_survivors_give_away_only_what_is_above_a_limit(sizes: Sizes, before: int, after: int) -> None:
    old = place(bucket_bytes=sizes, num_hosts=before)
    new = place(bucket_bytes=sizes, num_hosts=after, previous=old)
    within = np.zeros(after, np.int64)
    displaced = 0
    for size, was in zip(sizes, old, strict=True):
        counts = np.bincount(was[was < after], minlength=after)
        kept = np.minimum(counts, -(-len(was) // after))
        within += size[0] * kept
        displaced += len(was) - int(kept.sum())
    given = sum(int(size[(was != now) & (was < after)].sum()) for size, was, now in zip(sizes, old, new, strict=True))
    surplus = np.maximum(within - limit(sizes, after), 0)
    # A bucket that comes may push another one out, and the last that a host gives may take it below the limit.
    # Then the way to a host that may have it is at most two moves long.
    largest = max(int(size[0]) for size in sizes)
    assert given <= 2 * int(surplus.sum()) + largest * 2 * (displaced + int((surplus > 0).sum()))


@settings(deadline=None)
@given(sizes=tables(), hosts=st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_placing_again_moves_nothing(sizes: Sizes, hosts: list[int]) -> None:
    placement = None
    for num_hosts in hosts:
        placement = place(bucket_bytes=sizes, num_hosts=num_hosts, previous=placement)
    again = place(bucket_bytes=sizes, num_hosts=hosts[-1], previous=placement)
    assert moved_bytes(sizes, placement or [], again) == 0


@settings(deadline=None)
@given(power=st.integers(0, 8), before=st.integers(1, 9), after=st.integers(1, 9), size=st.integers(1, 99))
def test_equal_buckets_move_the_least_that_any_plan_could(power: int, before: int, after: int, size: int) -> None:
    sizes = [np.full(1 << power, size, np.int64)]
    (old,) = place(bucket_bytes=sizes, num_hosts=before)
    (new,) = place(bucket_bytes=sizes, num_hosts=after, previous=[old])
    ceiling = -(-len(old) // after)
    held = np.bincount(old[old < after], minlength=after)
    unavoidable = int((old >= after).sum()) + int(np.maximum(held - ceiling, 0).sum())
    assert moved_bytes(sizes, [old], [new]) == unavoidable * size
    assert np.bincount(new, minlength=after).max() <= ceiling


@settings(deadline=None)
@given(sizes=tables(), num_hosts=st.integers(1, 9))
def test_the_same_arguments_give_the_same_owners_and_nothing_moves_without_need(sizes: Sizes, num_hosts: int) -> None:
    first = place(bucket_bytes=sizes, num_hosts=num_hosts)
    kept = [owners.copy() for owners in first]
    again = place(bucket_bytes=sizes, num_hosts=num_hosts)
    stay = place(bucket_bytes=sizes, num_hosts=num_hosts, previous=first)
    assert moved_bytes(sizes, first, again) == 0
    assert moved_bytes(sizes, first, kept) == 0, "place changed its argument"
    assert moved_bytes(sizes, first, stay) == 0


@settings(deadline=None)
@given(
    power=st.integers(0, 6),
    size=st.integers(1, 30),
    load=st.lists(st.integers(0, 90), min_size=1, max_size=9),
    data=st.data(),
)
def test_buckets_go_one_by_one_to_the_least_busy_host(
    power: int, size: int, load: list[int], data: st.DataObject
) -> None:
    """One large bucket a host makes the loads; then those of another table are given out, from any of them on."""
    num_hosts, count = len(load), 1 << power
    most = -(-count // num_hosts)
    had = data.draw(st.lists(st.integers(-1, num_hosts - 1), min_size=count, max_size=count))
    owners = [host if had[:at].count(host) < most else -1 for at, host in enumerate(had)]
    expected = [*owners]
    loads = [one + size * owners.count(host) for host, one in enumerate(load)]
    for bucket in range(count):
        if expected[bucket] < 0:
            host = min((h for h in range(num_hosts) if expected.count(h) < most), key=lambda h: (loads[h], h))
            expected[bucket] = host
            loads[host] += size
    table = _Placed(held_bytes=size, work_bytes=0, owners=np.array(owners, np.int32), num_hosts=num_hosts)
    found = np.array(load) + size * table.counts
    nth = data.draw(st.integers(0, 30))
    _fill(table, found, nth=nth)
    free = [bucket for bucket, owner in enumerate(owners) if owner < 0]
    given, turned = [expected[bucket] for bucket in free], [int(table.owners[bucket]) for bucket in free]
    assert turned in [given[at:] + given[:at] for at in range(len(free) or 1)]
    assert nth or turned == given
    assert [owner for owner in owners if owner >= 0] == [
        int(new) for new, old in zip(table.owners, owners, strict=True) if old >= 0
    ]
    assert table.counts.tolist() == [expected.count(host) for host in range(num_hosts)]
    assert found.tolist() == loads


@pytest.mark.parametrize("num_hosts", [32, 256, 1024])
def test_first_buckets_of_tables_lie_on_other_hosts(num_hosts: int) -> None:
    """Rows of low numbers are often those that all hosts want."""
    placed = place(bucket_bytes=[np.full(num_hosts, 8)] * 24, num_hosts=num_hosts)
    owners = np.array([owners[: num_hosts // 32] for owners in placed])
    assert np.bincount(owners.ravel()).max() <= 2


def test_orphans_go_to_the_emptiest_hosts_and_the_others_stay() -> None:
    sizes = [np.full(8, 10, np.int64)]
    previous = [np.array([0, 0, 1, 1, 7, 7, -1, -1], np.int32)]
    (owners,) = place(bucket_bytes=sizes, num_hosts=3, previous=previous)
    assert owners[:4].tolist() == [0, 0, 1, 1]
    assert np.bincount(owners, minlength=3).tolist() == [3, 3, 2]


def test_more_hosts_than_buckets_leave_some_hosts_empty() -> None:
    owners = place(bucket_bytes=[np.array([5]), np.array([3])], num_hosts=4)
    assert sorted(int(part[0]) for part in owners) == [0, 1]


def test_no_tables_have_no_owners() -> None:
    assert place(bucket_bytes=[], num_hosts=3) == []


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "num_buckets"),
    [
        (1, 4, 1),
        (TARGET_BUCKET_BYTES // 64, 64, 1),
        (2 * TARGET_BUCKET_BYTES // 64, 64, 2),
        (3 * TARGET_BUCKET_BYTES // 64, 64, 4),
        (USUAL_BUCKETS * TARGET_BUCKET_BYTES // 64, 64, USUAL_BUCKETS),
        # Above that buckets are finer: a quarter of a MiB to half of one.
        (USUAL_BUCKETS * TARGET_BUCKET_BYTES // 64 + TARGET_BUCKET_BYTES, 64, 4 * USUAL_BUCKETS),
        (6 << 24, 64, 4 * USUAL_BUCKETS),
        (8 << 24, 64, 8 * USUAL_BUCKETS),
        (16 << 24, 64, MAX_BUCKETS),
        (10_000_000_000, 512, MAX_BUCKETS),
    ],
)
def test_a_bucket_is_about_a_mebibyte(num_rows: int, row_bytes: int, num_buckets: int) -> None:
    layout = bucket_layout(num_rows=num_rows, row_bytes=row_bytes)
    assert layout.num_buckets == num_buckets
    assert layout.rows_per_bucket * layout.num_buckets >= num_rows


@pytest.mark.parametrize(
    ("most_hosts", "num_buckets"), [(1, 4096), (64, 4096), (65, 8192), (128, 8192), (1000, 65_536), (4096, 65_536)]
)
def test_few_hosts_need_no_fine_buckets(most_hosts: int, num_buckets: int) -> None:
    assert bucket_layout(num_rows=1 << 30, row_bytes=64, most_hosts=most_hosts).num_buckets == num_buckets


def test_many_tables_have_fewer_fine_buckets() -> None:
    assert within_reason([MAX_BUCKETS] * 16) == (MAX_BUCKETS,) * 16
    assert within_reason([MAX_BUCKETS] * 17 + [3]) == (MAX_BUCKETS // 2,) * 3 + (MAX_BUCKETS,) * 14 + (3,)
    assert within_reason([USUAL_BUCKETS] * 1000) == (USUAL_BUCKETS,) * 1000
    assert sum(within_reason([MAX_BUCKETS] * 200)) <= MAX_FINE_BUCKETS


@pytest.mark.parametrize("num_hosts", [1000, 1024])
def test_a_thousand_hosts_have_even_shares_of_a_large_table(num_hosts: int) -> None:
    layout = bucket_layout(num_rows=1 << 28, row_bytes=64)
    (owners,) = place(bucket_bytes=[np.full(layout.num_buckets, 1 << 18)], num_hosts=num_hosts)
    counts = np.bincount(owners, minlength=num_hosts)
    assert counts.max() / counts.mean() < 1.01


@given(num_rows=st.integers(1, 5_000), power=st.integers(0, 8))
def test_every_row_has_one_position(num_rows: int, power: int) -> None:
    layout = BucketLayout(num_rows=num_rows, num_buckets=1 << power)
    rows = np.arange(num_rows)
    bucket, position = layout.buckets_of(rows), layout.positions_of(rows)
    assert (bucket == (rows & (layout.num_buckets - 1))).all()
    assert position.max() < layout.rows_per_bucket
    assert len(set(zip(bucket.tolist(), position.tolist(), strict=True))) == num_rows


@given(num_rows=st.integers(1, 2_000), power=st.integers(0, 6))
def test_the_rows_of_a_bucket_are_those_that_lie_in_it(num_rows: int, power: int) -> None:
    layout = BucketLayout(num_rows=num_rows, num_buckets=1 << power)
    rows = np.arange(num_rows)
    for bucket in range(layout.num_buckets):
        inside = rows[layout.buckets_of(rows) == bucket]
        assert layout.ids_of(bucket).tolist() == inside.tolist()
        assert layout.num_rows_of(bucket) == len(inside)
        assert layout.ids_of(bucket, layout.positions_of(inside)).tolist() == inside.tolist()


@given(count=st.integers(0, 500), parts=st.integers(1, 40))
def test_split_evenly_covers_everything_once(count: int, parts: int) -> None:
    ranges = split_evenly(count, parts)
    assert [at for part in ranges for at in part] == list(range(count))
    lengths = [len(part) for part in ranges]
    assert len(lengths) == parts
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
