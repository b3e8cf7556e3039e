"""Recall at k against plain Python, and what does not count in it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.workers.job.quality import QualityError, Scores
from podembed.workers.job.ranking import RecallAt, recall_at

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=9)


def plain_recall(k: int, rows: list[tuple[int, int, int]]) -> float:
    """Of (group, score, label): averaged over all orders of equal scores."""
    recalls = []
    for group in {group for group, _, _ in rows}:
        members = [(score, label) for g, score, label in rows if g == group]
        wanted = sum(label for _, label in members)
        if wanted:
            orders = [sorted(order, key=lambda row: -row[0]) for order in itertools.permutations(members)]
            recalls.append(np.mean([sum(label for _, label in order[:k]) / wanted for order in orders]))
    return float(np.mean(recalls))


@given(ROWS.filter(lambda rows: any(label for _, _, label in rows) and len(rows) <= 6), st.integers(1, 4))
def test_recall_is_the_mean_over_all_orders_of_ties(rows: list[tuple[int, int, int]], k: int) -> None:
    groups, scores, labels = (np.array(column) for column in zip(*rows, strict=True))
    assert recall_at(k, scores.astype(float), labels, groups) == pytest.approx(plain_recall(k, rows))


@given(ROWS.filter(lambda rows: any(label for _, _, label in rows)), st.randoms())
def test_the_order_of_rows_and_of_hosts_does_not_matter(rows: list[tuple[int, int, int]], random) -> None:
    def scores(rows: list[tuple[int, int, int]]) -> Scores:
        groups, logits, labels = (np.array(column) for column in zip(*rows, strict=True))
        return Scores(logits.astype(float), labels, np.ones(len(rows)), {"user": groups})

    shuffled = random.sample(rows, len(rows))
    cut = random.randrange(len(rows))
    parts = [scores(part) for part in (shuffled[:cut], shuffled[cut:]) if part]
    metric = RecallAt(2, group_by="user")
    assert metric.of(Scores.concatenate(parts)) == pytest.approx(metric.of(scores(rows)))


def test_rows_of_weight_0_do_not_count() -> None:
    scores = Scores(
        np.array([3.0, 2.0, 1.0]), np.array([0, 1, 0]), np.array([0.0, 1.0, 1.0]), {"user": np.array([7, 7, 7])}
    )
    assert RecallAt(1, group_by="user").of(scores) == 1.0
    assert RecallAt(1, group_by="user").name == "recall@1"


def test_what_is_not_defined_is_refused() -> None:
    with pytest.raises(QualityError, match="no sample of label 1"):
        recall_at(1, np.zeros(2), np.zeros(2), np.zeros(2, np.int64))
    with pytest.raises(QualityError, match="NaN"):
        recall_at(1, np.array([np.nan]), np.ones(1), np.zeros(1, np.int64))
    with pytest.raises(QualityError, match="k=0"):
        RecallAt(0, group_by="user")
