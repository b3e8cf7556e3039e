"""What is measured of the data is what stands in it."""

from __future__ import annotations

from podembed.jobs.planning.data_at_hand import measure_profile, profiles_at_hand
from podembed.workers.input.index import build_index
from tests.small_job import small_job


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
