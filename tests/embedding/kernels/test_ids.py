"""Distinct ids, routing and merging against numpy, on any ids; scratch is left clean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.kernels.ids import chain_all_rows, merge, num_hash_slots, row_of_each_id, unique_ids
from podembed.embedding.kernels.row_numbers import route
from tests.embedding import reference
from tests.long_tests import examples

ANY_ID = st.one_of(st.integers(0, 20), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, 2**63 - 1, -(2**63)]))


def run_unique(ids, hash_slots):
    unique, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
    count = unique_ids(ids, hash_slots, unique, inverse)
    return unique[:count], inverse


@given(ids=st.lists(ANY_ID, max_size=200), extra=st.sampled_from([1, 2, 8]))
@settings(max_examples=examples(150), deadline=None)
def test_unique_ids(ids, extra):
    ids = np.array(ids, np.int64)
    hash_slots = np.zeros((num_hash_slots(len(ids)) * extra, 2), np.int64)
    unique, inverse = run_unique(ids, hash_slots)
    expected_unique, expected_inverse = reference.unique_ids(ids)
    assert np.array_equal(unique, expected_unique)
    assert np.array_equal(inverse, expected_inverse)
    assert not hash_slots.any()


def test_unique_ids_of_many_that_collide():
    """Ids a multiple of a large power of two apart hash alike in the low bits; the table is used right up to half."""
    ids = np.repeat(np.arange(2048, dtype=np.int64) << 50, 2)
    hash_slots = np.zeros((num_hash_slots(len(ids)), 2), np.int64)
    unique, inverse = run_unique(ids, hash_slots)
    assert np.array_equal(unique[inverse], ids)
    assert len(unique) == 2048
    assert not hash_slots.any()


def test_unique_ids_takes_read_only_ids():
    ids = np.array([5, 5, 7], np.int64)
    ids.flags.writeable = False
    unique, inverse = run_unique(ids, np.zeros((num_hash_slots(3), 2), np.int64))
    assert (unique.tolist(), inverse.tolist()) == ([5, 7], [0, 0, 1])


@pytest.mark.parametrize(
    ("num_slots_given", "room", "places"), [(8, 5, 5), (24, 5, 5), (16, 4, 5), (16, 5, 4), (0, 5, 5)]
)
def test_unique_ids_refuses_small_arrays(num_slots_given, room, places):
    hash_slots = np.zeros((num_slots_given, 2), np.int64)
    with pytest.raises(ValueError, match="num_hash_slots"):
        unique_ids(np.zeros(5, np.int64), hash_slots, np.empty(room, np.int64), np.empty(places, np.int32))


def test_ids_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="Expected int64"):
        run_unique(np.zeros(3, np.int32), np.zeros((16, 2), np.int64))
    with pytest.raises(ValueError, match="without gaps"):
        run_unique(np.zeros(6, np.int64)[::2], np.zeros((16, 2), np.int64))


def test_route_refuses_what_does_not_fit():
    arrays = np.zeros(1, np.int64), np.empty(2, np.int64), np.empty(2, np.int32)
    ids = np.arange(2)
    with pytest.raises(ValueError, match="power of two"):
        route(ids, ids, 2, np.zeros(3, np.int32), *arrays)
    with pytest.raises(ValueError, match="room for all"):
        route(np.arange(3), np.arange(3), 3, np.zeros(2, np.int32), *arrays)


@pytest.mark.parametrize("bad", [-1, 12, 2**62, -(2**63)])
def test_route_refuses_ids_outside_the_table(bad):
    ids = np.array([3, 11, bad])
    with pytest.raises(ValueError, match=f"Found id {bad} for a table of 12 rows"):
        route(ids, ids, 12, np.zeros(4, np.int32), np.zeros(1, np.int64), np.empty(3, np.int64), np.empty(3, np.int32))


def test_row_of_each_id():
    index = np.empty(4, np.int32)
    row_of_each_id(np.array([2, 0, 1], np.int32), np.array([0, 0, 2, 1], np.int32), index)
    assert index.tolist() == [2, 2, 1, 0]


def chains(rows, head, following):
    result = {}
    for row, entry in zip(rows.tolist(), head.tolist(), strict=True):
        result[row] = []
        while entry >= 0:
            result[row].append(entry)
            entry = int(following[entry])
    return result


LOCAL_ROWS = st.lists(st.integers(0, 15), max_size=60)


def expected_chains(local_rows, rows):
    return {row: [i for i, other in enumerate(local_rows) if other == row] for row in rows}


@given(local_rows=LOCAL_ROWS)
@settings(max_examples=examples(100), deadline=None)
def test_merge(local_rows):
    rows = np.array(local_rows, np.int64)
    marks = np.zeros(16, np.int32)
    unique, head, following = (
        np.empty(len(rows), np.int64),
        np.empty(len(rows), np.int32),
        np.empty(len(rows), np.int32),
    )
    count = merge(rows, marks, unique, head, following)
    assert unique[:count].tolist() == list(dict.fromkeys(local_rows))
    assert chains(unique[:count], head[:count], following) == expected_chains(local_rows, set(local_rows))
    assert not marks.any()


@given(local_rows=LOCAL_ROWS)
@settings(max_examples=examples(50), deadline=None)
def test_chain_all_rows(local_rows):
    head, following = np.full(16, 7, np.int32), np.empty(len(local_rows), np.int32)
    chain_all_rows(np.array(local_rows, np.int64), head, following)
    assert chains(np.arange(16), head, following) == expected_chains(local_rows, range(16))


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
def test_merge_refuses_rows_of_others_and_leaves_the_scratch_clean(bad):
    rows = np.array([1, 3, 1, bad, 2], np.int64)
    marks = np.zeros(4, np.int32)
    room = np.empty(5, np.int64), np.empty(5, np.int32), np.empty(5, np.int32)
    with pytest.raises(ValueError, match=rf"Found local row {bad} on a host that holds 4 rows"):
        merge(rows, marks, *room)
    assert not marks.any()
    with pytest.raises(ValueError, match=rf"Found local row {bad}"):
        chain_all_rows(rows, marks, room[2])


def test_merge_refuses_small_arrays():
    with pytest.raises(ValueError, match="room"):
        merge(
            np.zeros(3, np.int64),
            np.zeros(4, np.int32),
            np.empty(3, np.int64),
            np.empty(2, np.int32),
            np.empty(3, np.int32),
        )
