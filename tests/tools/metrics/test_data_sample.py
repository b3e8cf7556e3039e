"""What hosts see of their samples: each sample once a column, in bins that do not depend on the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.config import ParquetData
from podembed.workers.data.extra_columns import VectorColumn
from podembed.workers.input.data_sample import MOST_SAMPLES, NOTHING, Sampler, bins_of_numbers
from podembed.workers.job.job import JobConfig
from tests.tools.health.changed_data import data_job


def batch_of(job: JobConfig, ids: list[list[int]]) -> Batch:
    count = len(ids)
    return Batch(
        dense=np.ones((count, job.data.num_dense), np.float32),
        labels=np.zeros(count, np.float32),
        weights=np.ones(count, np.float32),
        features={name: Ragged.of_lists(ids) for name in job.features},
        sample_ids=np.arange(count),
    )


def test_a_sample_counts_once_in_each_column(tmp_path) -> None:
    job = data_job(folder=str(tmp_path))
    sampler = Sampler(job, num_hosts=1)
    sampler.take(batch_of(job, [[5, 6], [], [7], [7]]).padded(9))
    found = sampler.finish()
    assert found.names == ("user", "item", "shop", "tags", "label", "price", "age")
    assert (found.num_features, found.num_samples) == (4, 4)
    assert found.counts.sum(axis=(0, 2)).tolist() == [4] * 7
    assert found.counts[:, :4, NOTHING].tolist() == [[1] * 4, [0] * 4]
    # The second half has one id alone, and all numbers are the same.
    assert found.counts[1].max(axis=1).tolist() == [2] * 7
    # Another window, of another host, has the same bins.
    other = Sampler(job, num_hosts=8)
    for sampled in (sampler, other):
        sampled.take(batch_of(job, [[5, 6], [], [7], [7]]))
        again = sampled.finish()
        assert np.array_equal(again.counts, found.counts)
        # The bag of two ids and that of none have no id that comes twice.
        assert again.frequent.features.tolist() == [0, 1, 2, 3]
        assert again.frequent.counts.tolist() == [2] * 4
        assert len({key & (1 << 56) - 1 for key in again.frequent.keys.tolist()}) == 1


def test_a_look_is_bounded(tmp_path) -> None:
    job = data_job(folder=str(tmp_path))
    for num_hosts, expected in ((1, MOST_SAMPLES), (4, MOST_SAMPLES // 4), (1000, MOST_SAMPLES // 8)):
        sampler = Sampler(job, num_hosts=num_hosts)
        for _ in range(9):
            sampler.take(batch_of(job, [[1]] * 700))
        assert sampler.finish().num_samples == expected
    nothing = sampler.finish()
    assert nothing.num_samples == 0
    assert len(nothing.frequent.keys) == 0


def test_all_places_in_bags_are_seen(tmp_path) -> None:
    job = data_job(folder=str(tmp_path))
    sampler = Sampler(job, num_hosts=1)
    sampler.take(batch_of(job, [[11, 12, 13, 14]] * 1000))
    seen = np.sort(sampler.finish().counts.sum(axis=0)[0])[-4:]
    assert seen.sum() == 1000
    assert seen.min() > 240


def test_long_vectors_and_doubled_names_have_columns(tmp_path) -> None:
    job = data_job(folder=str(tmp_path))
    data = ParquetData(
        job.data.paths,
        label="label",
        dense=("user", VectorColumn("vector", 100)),
        features=job.data.features,
    )
    names = Sampler(replace(job, data=data), num_hosts=1).finish().names
    assert names[4:8] == ("label", "user as a number", "vector[0]", "vector[4]")
    assert len(names) == 4 + 2 + 25


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_have_bins_in_their_order(sign: int) -> None:
    sizes = np.array([0, 1e-9, 1e-3, 1.0, 1.2, 1.3, 2.0, 1e6, 1e30, np.inf], np.float32)
    bins = bins_of_numbers(sign * sizes)
    steps = np.diff(sign * bins)
    assert (steps >= 0).all()
    # A third of an octave is 26 %; what is tiny is zero, and what is huge is the last bin.
    assert (steps > 0).tolist() == [False, True, True, False, True, True, True, True, False]
    assert bins_of_numbers(np.array([np.nan, 3.0], np.float32)).tolist()[0] == NOTHING
    assert 0 <= bins.min() <= bins.max() < NOTHING
