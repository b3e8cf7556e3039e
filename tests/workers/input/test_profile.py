"""What is measured of the data is what stands in it."""

from __future__ import annotations

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.input.index import build_index
from podembed.workers.input.profile import measure_profile, profiles_at_hand, profiles_of
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


def test_a_batch_says_what_it_holds(tmp_path) -> None:
    job = small_job(folder=str(tmp_path))
    of_batch = batch({name: [[1, 5], [5], [6, 7, 5], []] for name in job.features})
    for profile, table in zip(profiles_of(job, of_batch), job.tables, strict=True):
        features = sum(feature.table is table for feature in job.features.values())
        assert profile.ids_per_sample == (1.5,) * features
        assert profile.distinct[-1] == (4.0, 4.0)
        assert profile.distinct[0] == (1.0, 2.0)
        assert profile.hot_share == 1.0


def test_files_are_read_for_it(small_data: str) -> None:
    job = small_job(folder=small_data)
    index = build_index(job.resolved_data)
    found = measure_profile(job, index)
    at_hand = profiles_at_hand(job, index)
    assert (at_hand.tables, at_hand.is_measured, at_hand.why_assumed) == (tuple(found), True, None)
    assert len(found) == len(job.tables)
    for profile, table in zip(found, job.tables, strict=True):
        assert 0 < profile.distinct[-1][1] <= table.vocabulary_size
        assert 0 < profile.hot_share <= 1
