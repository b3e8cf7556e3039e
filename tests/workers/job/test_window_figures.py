"""Figures of binned scores against the exact ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

from podembed.workers.job.quality import area_under_curve, mean_log_loss
from podembed.workers.job.window_figures import LARGEST_LOGIT, figures_of
from tests.workers.job.counts import counts


class Samples(NamedTuple):
    logits: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def samples(seed: int, *, spread: float = 2.0, num: int = 3000) -> Samples:
    random = np.random.default_rng(seed)
    logits = random.normal(-1, spread, num)
    labels = (random.random(num) < 1 / (1 + np.exp(-logits))).astype(float)
    return Samples(logits, labels, random.integers(1, 5, num) / 4)


@pytest.mark.parametrize("spread", [0.01, 2.0, 30.0])
def test_auc_is_within_its_error_of_the_exact_one(spread: float) -> None:
    found = samples(1, spread=spread)
    (figures,) = figures_of([[counts(*found)]])
    assert abs(figures.auc - area_under_curve(*found)) <= figures.auc_error
    assert figures.auc_error < (0.35 if spread < 1 else 0.01 if spread < 10 else 0.5)


def test_entropy_and_calibration_are_exact() -> None:
    found = samples(2)
    (figures,) = figures_of([[counts(*found)]])
    share = np.average(found.labels, weights=found.weights)
    entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    assert figures.normalized_entropy == pytest.approx(mean_log_loss(*found) / entropy, rel=1e-12)
    predicted = (found.weights / (1 + np.exp(-found.logits))).sum()
    assert figures.calibration == pytest.approx(predicted / (found.weights * found.labels).sum(), rel=1e-12)
    assert figures.weight == found.weights.sum()


@pytest.mark.parametrize("num_hosts", [1, 3, 7])
def test_hosts_add_up_to_the_same_figures(num_hosts: int) -> None:
    whole = samples(3)
    parts = [Samples(*(column[at::num_hosts] for column in whole)) for at in range(num_hosts)]
    (alone,), (together,) = figures_of([[counts(*whole)]]), figures_of([[counts(*part)] for part in parts])
    assert (together.auc, together.auc_error, together.positives) == (alone.auc, alone.auc_error, alone.positives)
    assert together.normalized_entropy == pytest.approx(alone.normalized_entropy, rel=1e-12)
    assert together.calibration == pytest.approx(alone.calibration, rel=1e-12)


def test_what_has_no_meaning_has_no_figure() -> None:
    ones = np.ones(4)
    (figures,) = figures_of([[counts(np.arange(4.0), ones)]])
    assert math.isnan(figures.auc)
    assert math.isnan(figures.normalized_entropy)
    assert figures.positives == 4
    assert figures_of([[counts(np.arange(4.0), 0.5 * ones)]]) == ()
    assert figures_of([[counts(np.arange(4.0), ones, 0 * ones)]]) == ()
    assert figures_of([[], []]) == ()


def test_scores_beyond_the_bins_keep_their_side() -> None:
    logits = np.asarray([-1e6, -LARGEST_LOGIT, 0.0, LARGEST_LOGIT, 1e6])
    (figures,) = figures_of([[counts(logits, np.asarray([0.0, 0, 0, 1, 1]))]])
    assert figures.auc == 1
