"""What is measured of the data is what stands in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from podembed.embedding.costs.profile import TableProfile, joined
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.input.index import build_index
from podembed.workers.input.profile import measure_input, measure_profile, profiles_at_hand, profiles_of
from tests.small_job import small_job


def batch(ids: dict[str, list[list[int]]]) -> Batch:
    count = len(next(iter(ids.values())))
    return Batch(
        dense=np.zeros((count, 1), np.float32),
        labels=np.zeros(count, np.float32),
        weights=np.ones(count, np.float32),
        features={name: Ragged.of_lists(lists) for name, lists in ids.items()},
        sample_ids=np.arange(count),
    )


def test_two_batches_say_what_they_hold(tmp_path) -> None:
    job = small_job(folder=str(tmp_path))
    names = list(job.features)
    first = batch({name: [[1], [2], [3], [4]] for name in names})
    second = batch({name: [[1, 5], [5], [6, 7, 5], []] for name in names})
    for profile, table in zip(profiles_of(job, [first, second]), job.tables, strict=True):
        features = sum(feature.table is table for feature in job.features.values())
        assert profile.ids_per_sample == (1.5,) * features
        assert profile.distinct[-1] == (4.0, 4.0)
        assert profile.distinct[0] == (1.0, 2.0)
        assert profile.hot_share == 1.0
        # The first bag has row 1 of the batch before; of rows 1, 5, 6 and 7 that is the only one.
        assert profile.free_bags == 0.75
        assert profile.free_rows == 0.75
        assert profile.is_measured


def test_files_are_read_for_it(small_data: str) -> None:
    job = small_job(folder=small_data)
    index = build_index(job.resolved_data)
    found, read_sample_s = measure_input(job, index)
    assert read_sample_s > 0
    assert profiles_at_hand(job, index).tables == tuple(found) == tuple(measure_profile(job, index))
    assert len(found) == len(job.tables)
    for profile, table in zip(found, job.tables, strict=True):
        assert 0 < profile.distinct[-1][1] <= table.vocabulary_size
        assert 0 < profile.hot_share <= 1


def test_of_one_batch_alone_the_batch_before_is_taken_to_be_like_it(tmp_path) -> None:
    job = small_job(folder=str(tmp_path))
    alone = batch({name: [[1, 5], [5], [6, 7, 5], []] for name in job.features})
    for profile, table in zip(profiles_of(job, [alone]), job.tables, strict=True):
        assert profile.distinct[-1] == (4.0, 4.0)
        assert profile.hot_share == 1.0
        assert profile.free_rows == 1 - 4 / table.vocabulary_size
        assert profile.free_bags == profile.free_rows**1.5


def test_profiles_of_several_hosts_are_means() -> None:
    one = TableProfile(
        ids_per_sample=(1.0, 3.0), distinct=((1.0, 4.0), (2.0, 8.0)), hot_share=1.0, free_bags=0.5, free_rows=0.25
    )
    other = replace(one, ids_per_sample=(3.0, 3.0), distinct=((1.0, 2.0), (2.0, 4.0)), hot_share=0.5)
    assert joined([one, other]) == replace(
        one, ids_per_sample=(2.0, 3.0), distinct=((1.0, 3.0), (2.0, 6.0)), hot_share=0.75
    )
