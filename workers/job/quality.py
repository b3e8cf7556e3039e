"""How well scores rank and predict: exact AUC and log loss of an evaluation, from the scores of all its rows.

An evaluation keeps one score, label and weight a row (`Scores`). Results of hosts therefore merge by concatenation, and
the figures are exact, whatever the number of hosts. A histogram of scores would be neither. Numbers only; who computes
scores is none of its business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podembed.workers.job.candidates import Ranks

# Of optax, by name: losses that take a score for the log odds of label 1.
_LOSSES_OF_LOGITS = ("sigmoid_binary_cross_entropy", "sigmoid_focal_loss")


class QualityError(ValueError):
    """The figure is not defined for these rows."""


class FaultyScores(QualityError):
    """The scores are no numbers, or too many, whatever the rows are. This ends a run."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What an evaluation yields, one entry a row; rows of weight 0 count for nothing.

    Attributes:
      logits: float `[n]`, or `[n, k]` of k classes, the model's scores. They are its log odds of label 1, unless the
        job declares a loss that takes them for something else.
      labels: float `[n]`, 0 or 1, or what the job's loss takes.
      weights: float `[n]`, 0 or more.
      groups: by feature, int64 `[n]`, the id that it has in each row; for metrics that look at rows of one id together.
      ranks: ranks of full rankings, where a row is the positive candidate of a sample; else None.
    """

    logits: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    ranks: Ranks | None = None

    @staticmethod
    def concatenate(parts: Sequence[Scores]) -> Scores:
        """The rows of all parts; of steps or of hosts, which have the same groups. No parts are no rows."""
        empty = np.zeros(0, np.float32)
        names = parts[0].groups if parts else ()
        ranks = [part.ranks for part in parts if part.ranks is not None]
        return Scores(
            np.concatenate([part.logits for part in parts]) if parts else empty,
            np.concatenate([empty, *(part.labels for part in parts)]),
            np.concatenate([empty, *(part.weights for part in parts)]),
            {name: np.concatenate([part.groups[name] for part in parts]) for name in names},
            Ranks.concatenate(ranks) if ranks else None,
        )

    def auc(self) -> float:
        """See `area_under_curve`."""
        return area_under_curve(self.logits, self.labels, self.weights)

    def log_loss(self) -> float:
        """See `mean_log_loss`."""
        return mean_log_loss(self.logits, self.labels, self.weights)


def named(figure: str, task: str | None) -> str:
    """What a figure is called, of the whole job or of one of its tasks."""
    return figure if task is None else f"{task}/{figure}"


def has_logits(loss: Callable[..., Any] | None) -> bool:
    """Whether scores are known to be log odds: by the default loss, or by one of optax that takes them so."""
    name, module = getattr(loss, "__name__", ""), getattr(loss, "__module__", "")
    return loss is None or (name in _LOSSES_OF_LOGITS and module.startswith("optax"))


def are_binary(labels: np.ndarray, weights: np.ndarray) -> bool:
    """Whether all labels that have weight are 0 or 1."""
    counted = labels[weights > 0]
    return bool(((counted == 0) | (counted == 1)).all())


def cross_entropies(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The default loss of each sample, float64 `[n]`: -y log p - (1 - y) log(1 - p) for the probability p of a logit. Y
    need not be 0 or 1.
    """
    scores = np.asarray(logits, np.float64)
    # A score that is no number is refused where the figures are made.
    with np.errstate(invalid="ignore"):
        return np.logaddexp(0, scores) - np.asarray(labels, np.float64) * scores


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> float:
    """The mean in float64, over rows with weight.

    Raises:
      QualityError: there is no weight at all.
    """
    counts = weights > 0
    weights = np.asarray(weights[counts], np.float64)
    if weights.sum() <= 0:
        raise QualityError("Found no weight in any row. Expected at least one row to evaluate. Evaluate on some rows.")
    return float((values[counts].astype(np.float64) * weights).sum() / weights.sum())


def area_under_curve(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Probability that a random row of label 1 scores above one of label 0, ties counted half.

    The weighted Mann-Whitney statistic: the sum over distinct scores of (weight of ones there) × (weight of zeros below
    + half the weight of zeros there), divided by both total weights. Sums are in float64.

    Args:
      scores: `[n]`, in any unit that rises with the probability.
      labels: `[n]`, 0 or 1.
      weights: `[n]`, or None for all ones.

    Raises:
      QualityError: one of the two labels has no weight, labels are neither 0 nor 1, or a score is NaN.
    """
    scores, labels, weights = _checked(scores, labels, weights)
    order = np.argsort(scores)
    ones = (weights * labels)[order]
    zeros = (weights * (1 - labels))[order]
    total = ones.sum() * zeros.sum()
    if total <= 0:
        raise QualityError(
            f"Found weight {ones.sum():g} of label 1 and {zeros.sum():g} of label 0. Expected some of both. "
            "Evaluate on rows of both labels."
        )
    ranked = scores[order]
    group_starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    ones_at = np.add.reduceat(ones, group_starts)
    zeros_at = np.add.reduceat(zeros, group_starts)
    zeros_below = np.cumsum(zeros_at) - zeros_at
    return float((ones_at * (zeros_below + zeros_at / 2)).sum() / total)


def mean_log_loss(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Weighted mean of -log(probability given to the label), in nats and float64, from log odds z. It is log(1 +
    exp(-z)) for label 1 and log(1 + exp(z)) for label 0.

    Raises:
      QualityError: there is no weight at all, labels are neither 0 nor 1, or a logit is NaN.
    """
    logits, labels, weights = _checked(logits, labels, weights)
    return weighted_mean(np.logaddexp(0, np.where(labels == 1, -logits, logits)), weights)


def _checked(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows that have weight, as float64."""
    weights = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
    counts = weights > 0
    scores, labels, weights = (
        np.asarray(scores, np.float64)[counts],
        np.asarray(labels, np.float64)[counts],
        weights[counts],
    )
    if np.isnan(scores).any():
        raise FaultyScores(
            f"Found {int(np.isnan(scores).sum())} NaN among {len(scores)} scores. Expected numbers. Look for a "
            "diverged loss before this."
        )
    if ((labels != 0) & (labels != 1)).any():
        wrong = labels[(labels != 0) & (labels != 1)][0]
        raise QualityError(f"Found label {wrong:g}. Expected 0 or 1. AUC and log loss are for binary labels.")
    return scores, labels, weights
