"""What a window's steps say of learning: counts of scores that hosts add up, the figures of their sum, and norms.

Each sample is scored before the model trains on it, so the figures are of unseen samples (progressive validation). A
score falls into one of many bins of log odds. Counts of bins add up exactly over steps and hosts. Only AUC depends on
the bins, by at most half the pairs that share one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

NUM_BINS = 1 << 13
LARGEST_LOGIT = 16.0
"""Log odds beyond it share the last bin."""
NOT_COUNTED = 2 * NUM_BINS
"""Code of a sample without weight or label."""
NOT_BINARY = NOT_COUNTED + 1
"""Code of a label that is neither 0 nor 1."""
NUM_CODES = NOT_BINARY + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelCounts:
    """Scores of one label in some steps.

    Attributes:
      label: its column.
      codes: int32 `[k]`, rising: twice the bin of the score, and 1 more for label 1.
      weights: float64 `[k]`, of the samples there.
      predicted: sum of weight × predicted probability.
      loss: sum of weight × cross entropy, in nats.
      is_binary: whether all labels were 0 or 1.
    """

    label: str
    codes: np.ndarray
    weights: np.ndarray
    predicted: float
    loss: float
    is_binary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFigures:
    """What counts say of one label.

    Attributes:
      label: its column.
      weight: weight of all samples.
      positives: weight of label 1.
      predicted: expected weight of label 1 by the scores.
      auc: NaN without samples of both labels. Ties within a bin count half.
      auc_error: the exact AUC is at most so far from it.
      normalized_entropy: cross entropy over that of the window's share of label 1 (He et al., Practical Lessons from
        Predicting Clicks on Ads at Facebook, 2014). Below 1 the scores know more than that share. NaN as `auc`.
      calibration: `predicted` over `positives` (same paper); NaN without positives.
    """

    label: str
    weight: float
    positives: float
    predicted: float
    auc: float
    auc_error: float
    normalized_entropy: float
    calibration: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseNorms:
    """Euclidean norms of the dense half, over all its parameters.

    Attributes:
      gradient: mean of the window's steps.
      update: mean of every 32nd step of the run; None where the window has none of these.
      params: before the last of them.
      largest_gradient: largest gradient of one step.
    """

    gradient: float
    update: float | None
    params: float | None
    largest_gradient: float


def figures_of(hosts: Sequence[Sequence[LabelCounts]]) -> tuple[LabelFigures, ...]:
    """The figures of each label over all hosts. A label has none where one is neither 0 nor 1, or nothing has weight.

    Args:
      hosts: of each host its labels, the same on all.
    """
    found = (_figures(parts) for parts in zip(*hosts, strict=True))
    return tuple(one for one in found if one is not None)


def _figures(parts: Iterable[LabelCounts]) -> LabelFigures | None:
    parts = list(parts)
    by_code = np.zeros(NOT_COUNTED)
    for part in parts:
        by_code[part.codes] += part.weights
    zeros, ones = by_code[::2], by_code[1::2]
    negatives, positives = float(zeros.sum()), float(ones.sum())
    weight = negatives + positives
    if weight <= 0 or not all(part.is_binary for part in parts):
        return None
    predicted, loss = (math.fsum(getattr(part, name) for part in parts) for name in ("predicted", "loss"))
    auc = auc_error = normalized = math.nan
    if negatives > 0 and positives > 0:
        pairs = negatives * positives
        half_tied = float((ones * zeros).sum()) / 2
        auc = (float((ones * (np.cumsum(zeros) - zeros)).sum()) + half_tied) / pairs
        auc_error = half_tied / pairs
        share = positives / weight
        normalized = loss / weight / -(share * math.log(share) + (1 - share) * math.log1p(-share))
    return LabelFigures(
        label=parts[0].label,
        weight=weight,
        positives=positives,
        predicted=predicted,
        auc=auc,
        auc_error=auc_error,
        normalized_entropy=normalized,
        calibration=predicted / positives if positives > 0 else math.nan,
    )
