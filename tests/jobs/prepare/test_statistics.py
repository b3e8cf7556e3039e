"""Tallies of parts add up to the tally of the whole."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.jobs.prepare import statistics
from podembed.jobs.prepare.statistics import FieldTally, NumberTally, bin_edges, merged

NUMBERS = st.lists(st.one_of(st.none(), st.floats(-(2.0**60), 2.0**60)))


@given(st.lists(NUMBERS))
def test_numbers_add_up(parts: list[list[float | None]]) -> None:
    tallies = []
    for part in parts:
        tally = NumberTally()
        tally.add(pa.array(part, pa.float64()))
        tallies.append(NumberTally.from_json(json.loads(json.dumps(tally.to_json()))))
    total = merged(tallies)
    numbers = [number for part in parts for number in part if number is not None]
    assert (total.count, total.missing) == (len(numbers), sum(part.count(None) for part in parts))
    assert (total.least, total.most) == (min(numbers, default=None), max(numbers, default=None))
    assert sum(total.bins.values()) == len(numbers)
    for at, count in total.bins.items():
        low, high = bin_edges(at)
        # The outermost bins hold what lies beyond them, too.
        inside = [n for n in numbers if (low == high == n) or (low <= n < high if at > 0 else low < n <= high)]
        if 1 < abs(at) < 80 or at == 0:
            assert count == len(inside)


def test_bins_are_ordered_as_numbers_are() -> None:
    edges = [bin_edges(at) for at in range(-5, 6)]
    assert edges == sorted(edges)
    assert bin_edges(21) == (1.0, 2.0)


def test_rows_by_how_often_they_are_hit() -> None:
    tally = FieldTally(num_rows=10)
    tally.add(np.array([0, 0, 0, 0, 0, 2, 3, 3, 4, 4, 4, 9]), missing=3)
    assert (tally.missing, tally.unseen) == (3, 2)
    # Rows 2 and 9 once, rows 3 and 4 two or three times.
    assert tally.frequencies() == [(0, 2, 2), (1, 2, 5)]


def test_large_tables_are_tracked_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "MAX_TRACKED_ROWS", 100)
    tally = FieldTally(num_rows=1000)
    tally.add(np.repeat(np.arange(1, 1000), 3), missing=0)
    assert len(tally.hits) == 100
    # 99 tracked rows besides row 0 stand for ten each.
    assert tally.frequencies() == [(1, 990, 2970)]
