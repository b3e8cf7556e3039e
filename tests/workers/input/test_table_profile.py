"""Curves of distinct rows: through what was measured, and never beyond what is possible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podembed.embedding.costs.profile import TableProfile, difference, even_profile


def profile(distinct: tuple[tuple[float, float], ...]) -> TableProfile:
    return TableProfile(ids_per_sample=(2.0, 1.0), distinct=distinct, hot_share=0.5, free_bags=0.5, free_rows=0.5)


def test_the_curve_goes_through_the_measured_points_and_rises_between_them() -> None:
    found = profile(((8.0, 20.0), (64.0, 100.0), (512.0, 400.0)))
    assert [found.rows(count, num_rows=10_000) for count in (8, 64, 512)] == pytest.approx([20, 100, 400])
    rows = [found.rows(count, num_rows=10_000) for count in (1, 4, 8, 30, 64, 200, 512, 4000)]
    assert rows == sorted(rows)
    assert found.distinct_share == 400 / (3 * 512)


def test_no_more_rows_than_ids_or_than_the_table_has() -> None:
    found = profile(((8.0, 24.0), (64.0, 190.0)))
    assert found.rows(1, num_rows=10_000) <= 3
    assert found.rows(1_000_000, num_rows=500) == 500
    assert found.rows(0, num_rows=500) == 0
    assert profile(((4.0, 0.0),)).rows(100, num_rows=10) == 0
    assert profile(((4.0, 6.0),)).rows(2, num_rows=10) == 3


@pytest.mark.parametrize("num_rows", [50, 5_000, 50_000_000])
def test_even_ids_name_as_many_rows_as_drawn_ones(num_rows: int) -> None:
    random = np.random.default_rng(0)
    found = even_profile(ids_per_sample=[3.0], num_rows=num_rows, batch_size=2048)
    for samples in (64, 700, 2048, 4096):
        drawn = len(np.unique(random.integers(0, num_rows, 3 * samples)))
        assert found.rows(samples, num_rows=num_rows) == pytest.approx(drawn, rel=0.08)
    assert not found.is_measured


def test_what_differs_counts_by_ids_and_by_floats_of_all_tables() -> None:
    small = profile(((8.0, 20.0), (64.0, 100.0)))
    longer = replace(small, ids_per_sample=(2.0, 2.0))
    more = profile(((8.0, 20.0), (64.0, 150.0)))
    assert difference([small], [small], dims=[4]) == 0
    assert difference([small, small], [small, longer], dims=[4, 4]) == pytest.approx(1 / 7)
    # Half as many rows more in one of two tables, of which the other has rows of three times as many floats.
    assert difference([small, small], [small, more], dims=[3, 1]) == pytest.approx(50 / 450)
    assert difference([small, small], [small, more], dims=[1, 3]) == pytest.approx(150 / 550)
    # What one table has more does not make up for what another one has less.
    assert difference([small, more], [more, small], dims=[1, 1]) == pytest.approx(100 / 250)


def test_batches_of_other_sizes_differ_by_nothing_and_what_was_not_measured_by_all() -> None:
    whole = profile(((8.0, 20.0), (64.0, 100.0), (512.0, 400.0)))
    part = replace(profile(((8.0, 20.0), (64.0, 100.0))), hot_share=0.9, free_bags=0.1)
    assert difference([whole], [part], dims=[4]) == 0
    even = even_profile(ids_per_sample=[3.0], num_rows=100, batch_size=64)
    assert difference([even], [even], dims=[4]) == 1
    assert difference([], [], dims=[]) == 1
