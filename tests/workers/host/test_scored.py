"""Scores of candidates become samples, each with the group of its sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.ragged import Ragged
from podembed.serving.figures.of_groups import HitRateAt
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import IdColumn, Negatives
from podembed.workers.data.config import ParquetData
from podembed.workers.host.windows import ScoredParts
from podembed.workers.job.job import JobConfig
from podembed.workers.job.quality import QualityError, Scores
from podembed.workers.job.ranking import RecallAt
from tests.small_job import SmallModel

JOB = JobConfig(
    name="likes",
    features={
        "user": FeatureConfig(TableConfig(100, 4)),
        "item": FeatureConfig(TableConfig(100, 4), max_sequence_length=3),
    },
    model=SmallModel(),
    data=ParquetData(
        "likes/*.parquet",
        label="like",
        features={"item": IdColumn("item", negatives=Negatives(2, given=6))},
    ),
    batch_size=4,
    num_lanes=1,
    candidates="item",
    metrics=(HitRateAt(1), RecallAt(1, group_by="user")),
)


def batch(items: list[list[int]]) -> Batch:
    """Two users, the second of whom has two samples, and a row of padding."""
    return Batch(
        dense=np.zeros((4, 0), np.float32),
        labels=np.array([1, 1, 0, 0], np.float32),
        weights=np.array([1, 2, 1, 0], np.float32),
        features={"user": Ragged(np.array([7, 9, 9]), np.array([0, 1, 2, 3, 3])), "item": Ragged.of_lists(items)},
        sample_ids=np.array([10, 11, 12, -1]),
    )


def test_each_candidate_that_is_there_counts_once() -> None:
    collected = ScoredParts(JOB)
    scores = np.arange(12, dtype=np.float32).reshape(4, 3)
    collected.add(batch([[1, 2, 3], [4, 5, 6], [7], []]), scores, number=0)
    collected.add(batch([[8], [], [], []]), -scores - 1, number=1)
    found = collected.joined()
    assert found.scores.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    # The first of the first part is the positive one, with the label of the sample.
    assert found.labels.tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
    assert found.weights.tolist() == [1, 1, 1, 2, 2, 2, 1, 1]
    assert found.groups["sample"].tolist() == [10, 10, 10, 11, 11, 11, 12, 10]
    assert found.groups["user"].tolist() == [7, 7, 7, 9, 9, 9, 9, 7]
    np.testing.assert_allclose(found.losses, np.logaddexp(0, found.scores) - found.labels * found.scores, rtol=1e-5)
    whole = Scores(found.scores, found.labels, found.weights, found.groups)
    assert HitRateAt(1).of(whole) == 0.0
    assert HitRateAt(3).of(whole) == pytest.approx(1.0)
    with pytest.raises(QualityError):
        HitRateAt(1).of(replace(whole, labels=np.zeros(8)))


def test_no_candidate_of_a_sample_without_a_label_counts() -> None:
    collected = ScoredParts(JOB)
    collected.add(
        replace(batch([[1, 2, 3], [4, 5], [7], []]), labels=np.array([np.nan, 1, 0, 0], np.float32)),
        np.zeros((4, 3), np.float32),
    )
    np.testing.assert_array_equal(collected.joined().labels, [np.nan, np.nan, np.nan, 1, 0, 0])
