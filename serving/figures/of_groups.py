"""Figures of an evaluation that rank the samples of a group, such as the candidates of a user.

Left out, `group_by` stands for the candidates of each sample (`JobConfig.candidates`).

Samples with one score have no order. A figure is its mean over all orders of them. So it depends on scores alone, at
any number of hosts. Groups without a sample of label 1 do not count. The others count by the mean weight of their
samples of label 1, so all alike where samples have no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import comb

import numpy as np

from podembed.workers.declared_types import check_plain_fields
from podembed.workers.job.candidates import SAMPLE, Ranks
from podembed.workers.job.quality import FaultyScores, QualityError, Scores, named
from podembed.workers.job.ranking import counted_ranks, group_numbers


@dataclass(frozen=True)
class _Ties:
    """Runs of samples of one group and one score, group after group, the highest score first.

    Attributes:
      group: int64 `[num_ties]`, number of the group, from 0.
      before: int64 `[num_ties]`, samples of the group with a higher score.
      size: int64 `[num_ties]`, samples.
      positives: int64 `[num_ties]`, samples of label 1.
      weights: float64 `[2, num_ties]`, of samples of label 0, and of those of label 1.
    """

    group: np.ndarray
    before: np.ndarray
    size: np.ndarray
    positives: np.ndarray
    weights: np.ndarray

    @staticmethod
    def of(scores: Scores, group_by: str) -> _Ties:
        if scores.ranks is not None:
            return _Ties._of_ranks(scores, scores.ranks, group_by)
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
        weights = scores.weights[counts][order].astype(np.float64)
        is_new_group = np.concatenate([[True], groups[1:] != groups[:-1]])
        starts = np.flatnonzero(is_new_group | np.concatenate([[True], values[1:] != values[:-1]]))
        number = np.cumsum(is_new_group) - 1
        group_starts = np.flatnonzero(is_new_group)
        return _Ties(
            group=number[starts],
            before=starts - group_starts[number[starts]],
            size=np.diff(starts, append=len(values)),
            positives=np.add.reduceat(labels.astype(np.int64), starts),
            weights=np.add.reduceat(np.stack([weights * (labels == 0), weights * (labels == 1)]), starts, axis=1),
        )

    @staticmethod
    def _of_ranks(scores: Scores, ranks: Ranks, group_by: str) -> _Ties:
        """The groups of full rankings: candidates above each positive one, it with those of its score, and those below.

        The positive ones of a group, such as the held-out items of a user, are in one list. Where samples of a group
        were ranked in lists that differ, by their histories or in the last bit, none takes the place of a better one.
        """
        counts, ranks = counted_ranks(scores, ranks)
        group = group_numbers(scores, group_by, counts)
        order = np.lexsort((ranks.tied, ranks.above, group))
        group, ranks = group[order], ranks.of(order)
        weights = scores.weights[counts][order].astype(np.float64)
        kind = np.stack([group, ranks.above, ranks.tied])
        first = np.flatnonzero(np.concatenate([[True], (kind[:, 1:] != kind[:, :-1]).any(axis=0)]))
        positives = np.diff(first, append=len(group))
        weight = np.add.reduceat(weights, first)
        group, ranks = group[first], ranks.of(first)
        size = np.maximum(ranks.tied + 1, positives)
        before = _without_overlap(group, ranks.above, size)
        # Behind each positive run, what is between it and the next one of its group, or the end.
        is_last = np.concatenate([group[1:] != group[:-1], [True]])
        is_first = np.concatenate([[True], is_last[:-1]])
        longest = np.maximum.reduceat(ranks.others + 1, np.flatnonzero(is_first))
        end = np.where(is_last, np.maximum(longest[group], before + size), np.append(before[1:], 0))
        begin = np.where(is_first, 0, np.concatenate([[0], (before + size)[:-1]]))
        gap, rest = before - begin, np.where(is_last, end - before - size, 0)
        mean = (np.bincount(group, weights=weight) / np.bincount(group, weights=positives))[group]
        none = np.zeros(len(group), np.int64)
        sizes = np.stack([gap, size, rest], axis=1)
        zeros = np.stack([gap, size - positives, rest], axis=1) * mean[:, None]
        found = np.stack([none, positives, none], axis=1)
        starts = np.stack([begin, before, before + size], axis=1)
        at, run = np.nonzero(sizes)
        return _Ties(
            group=group[at],
            before=starts[at, run],
            size=sizes[at, run],
            positives=found[at, run],
            weights=np.stack([zeros[at, run], np.where(run == 1, weight[at], 0.0)]),
        )

    @cached_property
    def of_group(self) -> np.ndarray:
        """int64 `[num_groups]`, samples of label 1."""
        return np.bincount(self.group, weights=self.positives).astype(np.int64)

    @cached_property
    def first(self) -> np.ndarray:
        """The first run of each counted group with a sample of label 1."""
        found = np.flatnonzero(self.positives)
        return found[np.unique(self.group[found], return_index=True)[1]]

    def mean_of_groups(self, values: np.ndarray) -> float:
        """The mean over the groups that count of a value for each of them, `[num_counted]`."""
        counted = self.of_group > 0
        total = np.bincount(self.group, weights=self.weights[1])[counted]
        return float(np.average(values, weights=total / self.of_group[counted]))


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
        return ties.mean_of_groups(np.array(hits))


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
        found = np.bincount(ties.group, weights=ties.positives * mean_gain)
        counted = ties.of_group > 0
        return ties.mean_of_groups(found[counted] / gains[ties.of_group[counted]])


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
        return ties.mean_of_groups(np.array(found))


@dataclass(frozen=True, slots=True)
class GroupedAUC:
    """The AUC within each group, averaged over groups by the weight of their samples, which is their number where
    samples have no weights (Zhou et al., Deep interest network, 2018). Groups with one label only do not count.
    """

    task: str | None = field(default=None, kw_only=True)
    group_by: str = field(default=SAMPLE, kw_only=True)

    @property
    def name(self) -> str:
        return named("gauc", self.task)

    def of(self, scores: Scores) -> float:
        ties = _Ties.of(scores, self.group_by)
        zeros, ones = ties.weights
        of_group = np.bincount(ties.group, weights=zeros)
        through = np.cumsum(zeros)
        first = np.concatenate([[0.0], np.cumsum(of_group)[:-1]])
        below = of_group[ties.group] - (through - first[ties.group])
        won = np.bincount(ties.group, weights=ones * (below + zeros / 2))
        pairs = np.bincount(ties.group, weights=ones) * of_group
        counted = (ties.of_group > 0) & (np.bincount(ties.group, weights=ties.size) > ties.of_group)
        if not counted.any():
            raise QualityError(
                "Found no group with samples of both labels. Expected some. Group by a feature whose groups have both."
            )
        sizes = np.bincount(ties.group, weights=zeros + ones)[counted]
        return float((won[counted] / pairs[counted] * sizes).sum() / sizes.sum())


def _without_overlap(group: np.ndarray, before: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The begin of each run if those of a group may not overlap: `before`, or the end of the run ahead of it.

    Args:
      group: int64 `[num_runs]`, rising.
      before: int64 `[num_runs]`, rising within a group.
      size: int64 `[num_runs]`.
    """
    ahead = np.cumsum(size) - size
    # A run begins at the highest of `before` of itself and of the runs ahead of it in its group, each with all sizes
    # between. Groups rise by more than any place, so that the maximum never reaches across them.
    span = int(before.max() + size.sum()) + 1
    lifted = before - ahead + group * span
    return np.maximum.accumulate(lifted) + ahead - group * span


def _chance(room: int, size: int, positives: int) -> float:
    """The probability that a positive is among the first `room` of `size` samples in random order."""
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
