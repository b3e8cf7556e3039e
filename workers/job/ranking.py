"""Figures of an evaluation that a job declares besides AUC and log loss, and how well a simpler rule does on the same
samples.

Recall at k asks what a recommender shows: of what a user liked, how much is among the k best scored of the user's
candidates. The candidates of a user are the evaluation samples with that user's id, so which they are is decided where
the data is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from podembed.workers.declared_types import plain_number, shown
from podembed.workers.job.candidates import SAMPLE, Ranks
from podembed.workers.job.job_errors import JobError
from podembed.workers.job.quality import FaultyScores, QualityError, Scores, named


class Metric(Protocol):
    """One figure of an evaluation. A frozen value.

    Attributes:
      name: as it is printed, and as `CheckpointConfig.metric` takes it.
      group_by: a feature with one id a sample, which says what sample belongs to what group (`Scores.groups`), or None.
        `sample` groups the candidates of each sample.

    It may also have `task`, the task of the job whose scores it judges. And `lower_is_better`, True for an error; else
    its lowest value is the best only if its name ends with `loss`.
    """

    @property
    def name(self) -> str: ...

    @property
    def group_by(self) -> str | None: ...

    def of(self, scores: Scores) -> float:
        """The figure, from all evaluation samples.

        Raises:
          QualityError: it is not defined for these. An evaluation then says so, and goes without it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a rule without learning reaches on the same evaluation samples, to be printed beside the model's figures.

    Attributes:
      name: name of the rule.
      figures: `AUC` and names of metrics to their values.

    Raises:
      JobError: on construction, a value is no number.
    """

    name: str
    figures: Mapping[str, float]

    def __post_init__(self) -> None:
        made = {name: plain_number(value) for name, value in self.figures.items()}
        wrong = next((name for name, value in made.items() if value is None), None)
        if wrong is not None:
            raise JobError(
                f"Found figures[{wrong!r}]={shown(self.figures[wrong])} of Baseline {self.name!r}. Expected a number. "
                "Write Baseline(name='popularity', figures={'AUC': 0.6})."
            )
        object.__setattr__(self, "figures", made)


@dataclass(frozen=True, slots=True)
class RecallAt:
    """The mean over groups of: samples of label 1 among the k best scored, divided by all samples of label 1.

    Groups without label 1 do not count. Samples with one score that straddle place k count by the share of them that
    fits. A random order of them gives that on average. The figure therefore depends on scores alone.

    With `group_by="user"` and full rankings it is the Recall@k of He et al., LightGCN, 2020: a user's share of held-out
    items that are among the k best, averaged over users. Each sample alone, a group has one sample of label 1, and
    this would be the hit rate, so a job with full rankings must name the feature of its users.

    Samples of label 1 count by their weight within a group, and a group by the mean weight of these.
    """

    k: int
    task: str | None = field(default=None, kw_only=True)
    group_by: str = field(default=SAMPLE, kw_only=True)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise QualityError(f"Found k={self.k} for recall. Expected at least 1.")

    @property
    def name(self) -> str:
        return named(f"recall@{self.k}", self.task)

    def of(self, scores: Scores) -> float:
        if scores.ranks is not None:
            counts, ranks = counted_ranks(scores, scores.ranks)
            found = np.clip((self.k - ranks.above) / (ranks.tied + 1), 0.0, 1.0)
            return _mean_recall(
                group_numbers(scores, self.group_by, counts), found, scores.weights[counts].astype(np.float64)
            )
        counts = scores.weights > 0
        groups = scores.groups[self.group_by][counts]
        return recall_at(self.k, scores.logits[counts], scores.labels[counts], groups, scores.weights[counts])


def counted_ranks(scores: Scores, ranks: Ranks) -> tuple[np.ndarray, Ranks]:
    """The full rankings that count: of samples that have weight and label 1. Bool `[n]`, and their ranks.

    Raises:
      QualityError: there is none, or a score is NaN.
    """
    counts = (scores.weights > 0) & (scores.labels > 0)
    if np.isnan(scores.logits[counts]).any():
        raise FaultyScores("Found a NaN among the scores. Expected numbers. Look for a diverged loss before this.")
    if not counts.any():
        raise QualityError("Found no sample of label 1. Expected some to rank. Evaluate on samples whose label is 1.")
    return counts, ranks.of(counts)


def group_numbers(scores: Scores, group_by: str, counts: np.ndarray) -> np.ndarray:
    """The group's number, from 0 and without gaps, of each sample of the full rankings that count."""
    if group_by == SAMPLE:
        return np.arange(np.count_nonzero(counts))
    return np.unique(scores.groups[group_by][counts], return_inverse=True)[1]


def recall_at(
    k: int, scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """See `RecallAt`.

    Args:
      scores: `[n]`, higher is better.
      labels: `[n]`, 0 or 1.
      groups: int64 `[n]`.
      weights: `[n]`, above 0, or None for all ones.

    Raises:
      QualityError: no sample has label 1, or a score is NaN.
    """
    if np.isnan(scores).any():
        raise FaultyScores("Found a NaN among the scores. Expected numbers. Look for a diverged loss before this.")
    order = np.lexsort((-scores, groups))
    scores, labels, groups = scores[order], labels[order].astype(np.float64), groups[order]
    if not labels.any():
        raise QualityError("Found no sample of label 1. Expected some to recall. Evaluate on samples of both labels.")
    weights = np.ones(len(labels)) if weights is None else weights[order].astype(np.float64)
    is_new_group = np.concatenate([[True], groups[1:] != groups[:-1]])
    group_starts = np.flatnonzero(is_new_group)
    tie_starts = np.flatnonzero(is_new_group | np.concatenate([[True], scores[1:] != scores[:-1]]))
    tie_sizes = np.diff(tie_starts, append=len(scores))
    places_before = tie_starts - group_starts[np.searchsorted(group_starts, tie_starts, side="right") - 1]
    share = np.repeat(np.clip((k - places_before) / tie_sizes, 0.0, 1.0), tie_sizes)
    wanted = labels > 0
    _, group = np.unique(groups[wanted], return_inverse=True)
    return _mean_recall(group, share[wanted], weights[wanted])


def _mean_recall(group: np.ndarray, found: np.ndarray, weights: np.ndarray) -> float:
    """For samples of label 1: the weighted mean of `found` within each group, and the mean of these by the groups' mean
    weights.

    Args:
      group: int64 `[n]`, numbers of groups from 0, without gaps.
      found: float64 `[n]`, how likely a sample is among the k best.
      weights: float64 `[n]`, above 0.
    """
    total = np.bincount(group, weights=weights)
    recalls = np.bincount(group, weights=found * weights) / total
    return float(np.average(recalls, weights=total / np.bincount(group)))


@dataclass(frozen=True, slots=True)
class LogLoss:
    """The log loss of scores that are log odds of label 1, for a job with a loss of its own. Without one it is always
    there.
    """

    task: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return named("log_loss", self.task)

    @property
    def group_by(self) -> None:
        return None

    @property
    def lower_is_better(self) -> bool:
        return True

    def of(self, scores: Scores) -> float:
        return scores.log_loss()
