"""Figures of single samples against what their definitions say."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.serving.figures.of_samples import MAE, RMSE, Accuracy, Calibration, NormalizedEntropy
from podembed.workers.job.quality import QualityError, Scores

LOGITS = np.array([2.0, -1.0, 0.5, -800.0, 99.0])
LABELS = np.array([1, 0, 0, 1, 1])
WEIGHTS = np.array([1.0, 2.0, 1.0, 0.5, 0.0])


def scores(logits=LOGITS, labels=LABELS, weights=WEIGHTS) -> Scores:
    return Scores(np.asarray(logits), np.asarray(labels), np.asarray(weights))


def test_the_figures_are_what_their_names_say_and_weight_0_does_not_count() -> None:
    probabilities = np.array([1 / (1 + np.exp(-2.0)), 1 / (1 + np.e), 1 / (1 + np.exp(-0.5)), 0.0])
    weights, labels = WEIGHTS[:4], LABELS[:4]
    mean = (labels * weights).sum() / weights.sum()
    assert Accuracy().of(scores()) == pytest.approx((1 + 2) / 4.5)
    assert Accuracy(threshold=0.6).of(scores()) == pytest.approx((1 + 2 + 1) / 4.5)
    assert Calibration().of(scores()) == pytest.approx((probabilities * weights).sum() / 4.5 / mean)
    entropy = -mean * np.log(mean) - (1 - mean) * np.log(1 - mean)
    assert NormalizedEntropy().of(scores()) == pytest.approx(scores().log_loss() / entropy)
    stars = scores([3.5, 4.0, 1.0], [4, 4, 3], [1.0, 1.0, 2.0])
    assert RMSE().of(stars) == pytest.approx(np.sqrt((0.25 + 0 + 2 * 4) / 4))
    assert MAE().of(stars) == pytest.approx((0.5 + 0 + 2 * 2) / 4)


def test_the_rule_that_predicts_the_mean_has_normalized_entropy_and_calibration_1() -> None:
    labels = np.array([1, 0, 0, 0])
    same = scores(np.full(4, np.log(0.25 / 0.75)), labels, np.ones(4))
    assert NormalizedEntropy().of(same) == pytest.approx(1.0)
    assert Calibration().of(same) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("metric", "given", "message"),
    [
        (NormalizedEntropy(), scores(labels=np.ones(5)), "mean label 1. Expected labels of both kinds"),
        (Calibration(), scores(labels=np.zeros(5)), "mean label 0. Expected labels of both kinds"),
        (Accuracy(), scores(labels=np.full(5, 3)), "label 3. Expected 0 or 1"),
        (RMSE(), scores(logits=np.full(5, np.nan)), "4 NaN among 5 scores"),
        (MAE(), scores(weights=np.zeros(5)), "no weight in any row"),
    ],
)
def test_what_has_no_meaning_is_refused(metric, given: Scores, message: str) -> None:
    with pytest.raises(QualityError, match=message):
        metric.of(given)
