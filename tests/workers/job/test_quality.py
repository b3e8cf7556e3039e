from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from podembed.workers.job.quality import QualityError, Scores, area_under_curve, mean_log_loss

rows = st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 1), st.integers(0, 3)), min_size=2, max_size=30)


@settings(deadline=None)
@given(rows)
def test_area_is_the_share_of_pairs_in_order(rows: list[tuple[int, int, int]]) -> None:
    scores, labels, weights = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    ones = [(s, w) for s, y, w in rows if y]
    zeros = [(s, w) for s, y, w in rows if not y]
    total = sum(w for _, w in ones) * sum(w for _, w in zeros)
    assume(total > 0)
    pairs = sum(v * w * (1.0 if s > r else 0.5 if s == r else 0.0) for s, v in ones for r, w in zeros)
    assert area_under_curve(scores, labels, weights) == pytest.approx(pairs / total, abs=1e-12)


@settings(deadline=None)
@given(rows)
def test_log_loss_is_the_mean_surprise(rows: list[tuple[int, int, int]]) -> None:
    scores, labels, weights = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    assume(weights.sum() > 0)
    surprise = [w * -math.log(1 / (1 + math.exp(-s if y else s))) for s, y, w in rows]
    assert mean_log_loss(scores, labels, weights) == pytest.approx(sum(surprise) / float(weights.sum()))


def test_huge_logits_neither_overflow_nor_vanish() -> None:
    assert mean_log_loss(np.array([1e4, -1e4]), np.array([1, 0])) == 0
    assert mean_log_loss(np.array([1e4]), np.array([0])) == pytest.approx(1e4)


def test_parts_in_any_cut_give_the_same_figures() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=500).astype(np.float32).round(1)
    labels = (rng.random(500) < 0.3).astype(np.float32)
    weights = rng.integers(0, 3, 500).astype(np.float32)
    parts = [Scores(scores[cut], labels[cut], weights[cut]) for cut in (slice(0, 7), slice(7, 7), slice(7, 500))]
    merged = Scores.concatenate(parts)
    assert merged.auc() == area_under_curve(scores, labels, weights)
    assert merged.log_loss() == mean_log_loss(scores, labels, weights)


def test_rows_without_weight_are_not_even_looked_at() -> None:
    scores = np.array([0.1, 0.9, np.nan])
    assert area_under_curve(scores, np.array([0, 1, 7]), np.array([1, 1, 0])) == 1.0


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.1, 0.2], [1, 1], "weight 2 of label 1 and 0 of label 0"),
        ([0.1, math.nan], [0, 1], "1 NaN among 2"),
        ([0.1, 0.2, 0.3], [0, 1, 2], "label 2"),
        ([], [], "some of both"),
    ],
)
def test_an_area_that_is_not_defined_is_refused(scores: list[float], labels: list[int], message: str) -> None:
    with pytest.raises(QualityError, match=message):
        area_under_curve(np.array(scores), np.array(labels))


def test_a_loss_of_nothing_is_refused() -> None:
    with pytest.raises(QualityError, match="no weight"):
        Scores.concatenate([]).log_loss()
