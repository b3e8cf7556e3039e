"""Curves of distinct rows: through what was measured, and never beyond what is possible."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.ragged import Ragged
from podembed.jobs.planning.data_at_hand import even_profile
from podembed.workers.data.batch import Batch
from podembed.workers.input.table_profile import TableProfile, joined, profiles_of
from tests.small_job import small_job


def profile(distinct: tuple[tuple[float, float], ...]) -> TableProfile:
    return TableProfile(ids_per_sample=(2.0, 1.0), distinct=distinct, hot_share=0.5)


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


def test_profiles_of_several_hosts_are_means() -> None:
    one = TableProfile(ids_per_sample=(1.0, 3.0), distinct=((1.0, 4.0), (2.0, 8.0)), hot_share=1.0)
    other = TableProfile(ids_per_sample=(3.0, 3.0), distinct=((1.0, 2.0), (2.0, 4.0)), hot_share=0.5)
    assert joined([one, other]) == TableProfile(
        ids_per_sample=(2.0, 3.0), distinct=((1.0, 3.0), (2.0, 6.0)), hot_share=0.75
    )


def batch(ids: dict[str, list[list[int]]]) -> Batch:
    count = len(next(iter(ids.values())))
    return Batch(
        dense=np.zeros((count, 1), np.float32),
        labels=np.zeros(count, np.float32),
        weights=np.ones(count, np.float32),
        features={name: Ragged.of_lists(lists) for name, lists in ids.items()},
        sample_ids=np.arange(count),
    )


def test_a_batch_says_what_it_holds(tmp_path) -> None:
    job = small_job(folder=str(tmp_path))
    of_batch = batch({name: [[1, 5], [5], [6, 7, 5], []] for name in job.features})
    for profile, table in zip(profiles_of(job, of_batch), job.tables, strict=True):
        features = sum(feature.table is table for feature in job.features.values())
        assert profile.ids_per_sample == (1.5,) * features
        assert profile.distinct[-1] == (4.0, 4.0)
        assert profile.distinct[0] == (1.0, 2.0)
        assert profile.hot_share == 1.0
