"""Figures of an evaluation that rank the samples of a group, such as the candidates of a user.

Left out, `group_by` stands for the candidates of each sample (`JobConfig.candidates`).

Samples with one score have no order. A figure is its mean over all orders of them. So it depends on scores alone, at
any number of hosts. Groups without a sample of label 1 do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import comb

import numpy as np

from podembed.workers.declared_types import check_plain_fields
from podembed.workers.job.candidates import SAMPLE, Ranks
from podembed.workers.job.quality import FaultyScores, QualityError, Scores, named
from podembed.workers.job.ranking import counted_ranks


@dataclass(frozen=True)
class _Ties:
    """Runs of samples of one group and one score, group after group, the highest score first.

    Attributes:
      group: int64 `[num_ties]`, number of the group, from 0.
      before: int64 `[num_ties]`, samples of the group with a higher score.
      size: int64 `[num_ties]`, samples.
      positives: int64 `[num_ties]`, samples of label 1.
    """

    group: np.ndarray
    before: np.ndarray
    size: np.ndarray
    positives: np.ndarray

    @staticmethod
    def of(scores: Scores, group_by: str) -> _Ties:
        if scores.ranks is not None:
            return _Ties._of_ranks(scores, scores.ranks)
        counts = scores.weights > 0
        values, labels = scores.logits[counts], scores.labels[counts]
        groups = scores.groups[group_by][counts]
        if np.isnan(values).any():
            raise FaultyScores("Found a NaN among the scores. Expected numbers. Look for a diverged loss before this.")
        odd = labels[(labels != 0) & (labels != 1)]
        if len(odd):
            raise QualityError(f"Found label {odd[0]:g}. Expected 0 or 1. Ranking figures are for binary labels.")
        if not labels.any():
            raise QualityError("Found no sample of label 1. Expected some to rank. Evaluate on samples of both labels.")
        order = np.lexsort((-values, groups))
        values, labels, groups = values[order], labels[order], groups[order]
        is_new_group = np.concatenate([[True], groups[1:] != groups[:-1]])
        starts = np.flatnonzero(is_new_group | np.concatenate([[True], values[1:] != values[:-1]]))
        number = np.cumsum(is_new_group) - 1
        group_starts = np.flatnonzero(is_new_group)
        return _Ties(
            group=number[starts],
            before=starts - group_starts[number[starts]],
            size=np.diff(starts, append=len(values)),
            positives=np.add.reduceat(labels.astype(np.int64), starts),
        )

    @staticmethod
    def _of_ranks(scores: Scores, ranks: Ranks) -> _Ties:
        """Of full rankings: the candidates above the positive one, it with those of its score, and those below."""
        ranks = counted_ranks(scores, ranks)
        sizes = np.stack([ranks.above, ranks.tied + 1, ranks.others - ranks.above - ranks.tied], axis=1)
        starts = np.cumsum(sizes, axis=1) - sizes
        group, run = np.nonzero(sizes)
        return _Ties(
            group=group, before=starts[group, run], size=sizes[group, run], positives=(run == 1).astype(np.int64)
        )

    @cached_property
    def of_group(self) -> np.ndarray:
        """int64 `[num_groups]`, samples of label 1."""
        return np.bincount(self.group, weights=self.positives).astype(np.int64)

    @cached_property
    def first(self) -> np.ndarray:
        """By counted group, the first run with a sample of label 1."""
        found = np.flatnonzero(self.positives)
        return found[np.unique(self.group[found], return_index=True)[1]]

    def mean_of_groups(self, values: np.ndarray) -> float:
        """Of a value for each run: the sum over each group, and the mean of these over the groups that count."""
        return float(np.bincount(self.group, weights=values)[self.of_group > 0].mean())


@dataclass(frozen=True, slots=True)
class _AtK:
    k: int
    task: str | None = field(default=None, kw_only=True)
    group_by: str = field(default=SAMPLE, kw_only=True)

    def __post_init__(self) -> None:
        check_plain_fields(self, QualityError)
        if self.k < 1:
            raise QualityError(f"Found k={self.k} for {type(self).__name__}. Expected at least 1.")


@dataclass(frozen=True, slots=True)
class HitRateAt(_AtK):
    """The share of groups with a sample of label 1 among the k best scored. Where each group has one, it is HR@k of He
    et al., Neural collaborative filtering, 2017.
    """

    @property
    def name(self) -> str:
        return named(f"hit_rate@{self.k}", self.task)

    def of(self, scores: Scores) -> float:
        ties = _Ties.of(scores, self.group_by)
        hits = [
            _chance(self.k - int(ties.before[at]), int(ties.size[at]), int(ties.positives[at])) for at in ties.first
        ]
        return float(np.mean(hits))


@dataclass(frozen=True, slots=True)
class NDCGAt(_AtK):
    """The discounted gain of the k best scored, divided by the best possible. A sample of label 1 gains 1 / log2(1 +
    place). The source is Järvelin and Kekäläinen, 2002.
    """

    @property
    def name(self) -> str:
        return named(f"ndcg@{self.k}", self.task)

    def of(self, scores: Scores) -> float:
        ties = _Ties.of(scores, self.group_by)
        longest = int((ties.before + ties.size).max())
        places = np.arange(1, longest + 1)
        gains = np.concatenate([[0.0], np.cumsum(np.where(places <= self.k, 1 / np.log2(1 + places), 0.0))])
        mean_gain = (gains[ties.before + ties.size] - gains[ties.before]) / ties.size
        return ties.mean_of_groups(ties.positives * mean_gain / gains[ties.of_group][ties.group].clip(1e-300))


@dataclass(frozen=True, slots=True)
class MRR:
    """The mean over groups of 1 / place of the best scored sample of label 1."""

    task: str | None = field(default=None, kw_only=True)
    group_by: str = field(default=SAMPLE, kw_only=True)

    @property
    def name(self) -> str:
        return named("mrr", self.task)

    def of(self, scores: Scores) -> float:
        ties = _Ties.of(scores, self.group_by)
        found = [_reciprocal(int(ties.before[at]), int(ties.size[at]), int(ties.positives[at])) for at in ties.first]
        return float(np.mean(found))


@dataclass(frozen=True, slots=True)
class GroupedAUC:
    """The AUC within each group, averaged over groups by their number of samples (Zhou et al., Deep interest network,
    2018). Groups with one label only do not count.
    """

    task: str | None = field(default=None, kw_only=True)
    group_by: str = field(default=SAMPLE, kw_only=True)

    @property
    def name(self) -> str:
        return named("gauc", self.task)

    def of(self, scores: Scores) -> float:
        ties = _Ties.of(scores, self.group_by)
        zeros = (ties.size - ties.positives).astype(np.float64)
        of_group = np.bincount(ties.group, weights=zeros)
        through = np.cumsum(zeros)
        first = np.concatenate([[0.0], np.cumsum(of_group)[:-1]])
        below = of_group[ties.group] - (through - first[ties.group])
        won = np.bincount(ties.group, weights=ties.positives * (below + zeros / 2))
        pairs = ties.of_group * of_group
        counted = pairs > 0
        if not counted.any():
            raise QualityError(
                "Found no group with samples of both labels. Expected some. Group by a feature whose groups have both."
            )
        sizes = np.bincount(ties.group, weights=ties.size)[counted]
        return float((won[counted] / pairs[counted] * sizes).sum() / sizes.sum())


def _chance(room: int, size: int, positives: int) -> float:
    """That at least one of the positives is among the first `room` of `size` samples in random order."""
    if room <= 0:
        return 0.0
    room = min(room, size)
    return 1.0 - comb(size - positives, room) / comb(size, room)


def _reciprocal(before: int, size: int, positives: int) -> float:
    """The mean of 1 / place of the first positive among `size` samples in random order, with `before` ahead."""
    if positives == 1:
        return float(np.mean(1 / np.arange(before + 1, before + size + 1)))
    total, left = 0.0, 1.0
    for place in range(size - positives + 1):
        chance = left * positives / (size - place)
        total += chance / (before + place + 1)
        left -= chance
    return total
