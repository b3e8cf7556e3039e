"""Rows of many hosts, listed by stream, against slices host by host."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.kernels.requests import rows_by_host, rows_by_stream
from podembed.embedding.lookup.prefetch import Part
from podembed.embedding.lookup.wanted_rows import listed, split_rows, starts_of
from tests.long_tests import examples

GROUPS = [(0, 2), (1,), ()]
WIDTHS = [4, 16, 1]


@settings(deadline=None, max_examples=examples(40))
@given(seed=st.integers(0, 10_000), num_hosts=st.integers(1, 5))
def test_a_listing_has_every_row_with_the_place_it_came_from(seed: int, num_hosts: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 5, (num_hosts, 3))
    wanted = [random.integers(0, 99, counts[host, [0, 2, 1]].sum()) for host in range(num_hosts)]
    found = listed(wanted, counts, GROUPS)
    for number, (streams, one) in enumerate(zip(GROUPS, found, strict=True)):
        served, expected = [], [[] for _ in streams]
        for host in range(num_hosts):
            assert one.host_starts[host] == len(served)
            first = sum(int(counts[host, at]) for group in GROUPS[:number] for at in group)
            for column, at in enumerate(streams):
                rows = wanted[host][first : first + counts[host, at]].tolist()
                expected[column] += [(row, len(served) + j) for j, row in enumerate(rows)]
                served += rows
                first += len(rows)
        assert one.host_starts[-1] == len(served)
        for column, pairs in enumerate(expected):
            here = one.of_streams(column, column + 1)
            assert list(zip(one.rows[here].tolist(), one.places[here].tolist(), strict=True)) == pairs


@settings(deadline=None, max_examples=examples(40))
@given(seed=st.integers(0, 10_000), num_hosts=st.integers(1, 4), share=st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_early_rows_are_packed_first_and_own_rows_lie_where_they_belong(
    seed: int, num_hosts: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 9, (num_hosts, 3))
    own = int(random.integers(num_hosts))
    wanted = listed([random.integers(0, 99, n) for n in counts.sum(axis=1)], counts, GROUPS)
    late = [random.random(len(one.rows)) >= share for one in wanted]
    splits = split_rows(wanted, late, WIDTHS, own=own)
    for number, (one, flags) in enumerate(zip(wanted, late, strict=True)):
        served = np.full((len(flags), WIDTHS[number]), -1, np.float32)
        own_start, own_length = 2, int(np.diff(one.host_starts)[own])
        rows = np.full((own_start + own_length, WIDTHS[number]), -1, np.float32)
        written = np.zeros(len(flags), bool)
        for part in Part:
            found = one.targets_of(part, served, rows, own, own_start)
            if found is None:
                continue
            addresses, entries = found
            entries = np.arange(len(one.rows)) if entries is None else entries
            for entry, address in zip(entries.tolist(), addresses.tolist(), strict=True):
                place = int(one.places[entry])
                assert not written[place]
                written[place] = True
                memory = rows if one.host_starts[own] <= place < one.host_starts[own + 1] else served
                memory[(address - memory.ctypes.data) // memory.strides[0]] = place
        assert written.all()
        for host in range(num_hosts):
            first, stop = int(one.host_starts[host]), int(one.host_starts[host + 1])
            places, split = np.arange(first, stop), splits[host]
            if host == own:
                assert rows[own_start:, 0].tolist() == places.tolist()
                continue
            if split is not None:
                early, rest = split.prefetched[number], split.rest[number]
                assert rest.tolist() == np.flatnonzero(flags[first:stop]).tolist()
                places = np.concatenate([first + early, first + rest])
            assert served[first:stop, 0].tolist() == places.tolist()


def test_rows_go_to_hosts_and_come_back() -> None:
    counts = np.array([[2, 0, 1], [1, 3, 0]])
    starts = starts_of(counts)
    rows, by_host = np.arange(7) * 10, np.empty(7, np.int64)
    rows_by_host(rows, starts, counts, by_host)
    assert by_host.tolist() == [0, 10, 60, 20, 30, 40, 50]
    again, places = np.empty(7, np.int64), np.empty(7, np.int64)
    rows_by_stream(by_host, starts, counts, starts, again, places)
    assert again.tolist() == rows.tolist()
    assert by_host[places].tolist() == rows.tolist()


def test_counts_that_are_not_those_of_the_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Found \[2\] rows that hosts want. Expected \[3\]"):
        listed([np.arange(2)], np.array([[2, 1, 0]]), [(0, 1, 2)])
    with pytest.raises(ValueError, match="Check that all hosts are of one generation"):
        listed([np.arange(2)], np.array([[3, -1, 0]]), [(0, 1, 2)])
