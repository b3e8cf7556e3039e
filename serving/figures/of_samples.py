"""Figures of an evaluation that look at each sample by itself, as metrics that a job declares.

Scores are what the model returns. Those of `Accuracy`, `NormalizedEntropy` and `Calibration` are log odds of label 1.
All are exact, from all evaluation samples, and weighted by the samples' weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from podembed.workers.job.quality import FaultyScores, QualityError, Scores, named, weighted_mean


@dataclass(frozen=True, slots=True)
class _OfSamples:
    """A metric without groups.

    Attributes:
      task: the task whose scores and labels are judged, of a job with tasks.
    """

    task: str | None = field(default=None, kw_only=True)

    @property
    def group_by(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class RMSE(_OfSamples):
    """The root of the mean squared difference of score and label."""

    @property
    def name(self) -> str:
        return named("rmse", self.task)

    @property
    def lower_is_better(self) -> bool:
        return True

    def of(self, scores: Scores) -> float:
        return float(np.sqrt(_mean(scores, lambda differences: differences**2)))


@dataclass(frozen=True, slots=True)
class MAE(_OfSamples):
    """The mean absolute difference of score and label."""

    @property
    def name(self) -> str:
        return named("mae", self.task)

    @property
    def lower_is_better(self) -> bool:
        return True

    def of(self, scores: Scores) -> float:
        return _mean(scores, np.abs)


@dataclass(frozen=True, slots=True)
class Accuracy(_OfSamples):
    """The share of samples whose label is 1 where the score is above the threshold, and 0 elsewhere. With several
    scores a sample, those whose highest score is that of the label.

    Attributes:
      threshold: in the unit of the scores; 0 is a probability of one half.
    """

    threshold: float = 0.0

    @property
    def name(self) -> str:
        return named("accuracy", self.task)

    def of(self, scores: Scores) -> float:
        if scores.logits.ndim > 1:
            logits, weights = _numbers(scores)
            return weighted_mean(logits.argmax(axis=1) == scores.labels, weights)
        logits, labels, weights = _binary(scores)
        return weighted_mean((logits > self.threshold) == (labels == 1), weights)


@dataclass(frozen=True, slots=True)
class NormalizedEntropy(_OfSamples):
    """The log loss, divided by that of the rule that always predicts the mean label. Below 1 is better than that rule.
    The source is He et al., Practical lessons from predicting clicks on ads at Facebook, 2014.
    """

    @property
    def name(self) -> str:
        return named("normalized_entropy", self.task)

    @property
    def lower_is_better(self) -> bool:
        return True

    def of(self, scores: Scores) -> float:
        _, labels, weights = _binary(scores)
        mean = weighted_mean(labels, weights)
        if not 0 < mean < 1:
            raise _needs_both(mean)
        return scores.log_loss() / float(-mean * np.log(mean) - (1 - mean) * np.log1p(-mean))


@dataclass(frozen=True, slots=True)
class Calibration(_OfSamples):
    """The mean predicted probability of label 1, divided by the mean label. 1 is right, 2 predicts twice as many."""

    @property
    def name(self) -> str:
        return named("calibration", self.task)

    def of(self, scores: Scores) -> float:
        logits, labels, weights = _binary(scores)
        mean = weighted_mean(labels, weights)
        if mean == 0:
            raise _needs_both(mean)
        # Without overflow: where a logit is far below 0 its exponential is 0.
        return weighted_mean(np.exp(-np.logaddexp(0, -logits)), weights) / mean


def _mean(scores: Scores, of_differences: Callable[[np.ndarray], np.ndarray]) -> float:
    logits, weights = _numbers(scores)
    _require_one(logits)
    return weighted_mean(of_differences(logits - np.asarray(scores.labels, np.float64)), weights)


def _numbers(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    logits, weights = np.asarray(scores.logits, np.float64), np.asarray(scores.weights, np.float64)
    num_nan = int(np.isnan(logits[weights > 0]).sum())
    if num_nan:
        raise FaultyScores(
            f"Found {num_nan} NaN among {len(logits)} scores. Expected numbers. Look for a diverged loss before this."
        )
    return logits, weights


def _binary(scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logits, weights = _numbers(scores)
    _require_one(logits)
    labels = np.asarray(scores.labels, np.float64)
    odd = labels[(weights > 0) & (labels != 0) & (labels != 1)]
    if len(odd):
        raise QualityError(f"Found label {odd[0]:g}. Expected 0 or 1. This figure is for binary labels.")
    return logits, labels, weights


def _require_one(logits: np.ndarray) -> None:
    if logits.ndim > 1:
        raise FaultyScores(
            f"Found {logits.shape[1]} scores a sample. Expected one, as of binary, regression and ordinal tasks. Of "
            "classes there is Accuracy."
        )


def _needs_both(mean: float) -> QualityError:
    return QualityError(
        f"Found the mean label {mean:g}. Expected labels of both kinds, since the figure divides by their share. "
        "Evaluate on samples of both labels."
    )
