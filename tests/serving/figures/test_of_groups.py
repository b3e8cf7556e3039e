"""Figures of ranked groups against their definitions, averaged over all orders of equal scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.serving.figures.of_groups import MRR, GroupedAUC, HitRateAt, NDCGAt
from podembed.workers.job.candidates import RankCounts, Ranks
from podembed.workers.job.quality import QualityError, Scores, area_under_curve
from podembed.workers.job.ranking import Metric, RecallAt

Rows = list[tuple[int, int, int]]  # of (group, score, label)
ROWS: st.SearchStrategy[Rows] = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=6
).filter(lambda rows: any(label for _, _, label in rows))


def of(rows: Rows) -> Scores:
    groups, values, labels = (np.array(column) for column in zip(*rows, strict=True))
    return Scores(values.astype(float), labels, np.ones(len(rows)), {"user": groups})


def plain(rows: Rows, figure: Callable[[list[int]], float]) -> float:
    """The mean over groups with a positive of the mean of a figure of the labels in all orders that scores allow."""
    found = []
    for group in {group for group, _, _ in rows}:
        members = [(score, label) for g, score, label in rows if g == group]
        if any(label for _, label in members):
            orders = [sorted(order, key=lambda row: -row[0]) for order in itertools.permutations(members)]
            found.append(np.mean([figure([label for _, label in order]) for order in orders]))
    return float(np.mean(found))


def ndcg(labels: list[int], k: int) -> float:
    def gain(labels: list[int]) -> float:
        return sum(label / np.log2(place + 2) for place, label in enumerate(labels[:k]))

    return gain(labels) / gain(sorted(labels, reverse=True))


@given(ROWS, st.integers(1, 4))
def test_figures_are_means_over_all_orders_of_ties(rows: Rows, k: int) -> None:
    scores = of(rows)
    assert HitRateAt(k, group_by="user").of(scores) == pytest.approx(plain(rows, lambda labels: any(labels[:k])))
    assert NDCGAt(k, group_by="user").of(scores) == pytest.approx(plain(rows, lambda labels: ndcg(labels, k)))
    assert MRR(group_by="user").of(scores) == pytest.approx(plain(rows, lambda labels: 1 / (1 + labels.index(1))))


@given(ROWS)
def test_grouped_auc_is_the_auc_of_each_group_by_its_size(rows: Rows) -> None:
    parts = [[row for row in rows if row[0] == group] for group in {group for group, _, _ in rows}]
    both = [part for part in parts if 0 < sum(label for _, _, label in part) < len(part)]
    metric = GroupedAUC(group_by="user")
    if not both:
        with pytest.raises(QualityError, match="no group with samples of both labels"):
            metric.of(of(rows))
        return
    aucs = [area_under_curve(of(part).logits, of(part).labels) for part in both]
    expected = np.average(aucs, weights=[len(part) for part in both])
    assert metric.of(of(rows)) == pytest.approx(expected)


def test_leave_one_out_of_a_hundred_candidates() -> None:
    """One positive at a known place for each user, as in the papers that use this figure."""
    places = {1: 0, 2: 4, 3: 9, 4: 50}
    rows = [(user, 99 - at, int(at == place)) for user, place in places.items() for at in range(100)]
    scores = of(rows)
    assert HitRateAt(10, group_by="user").of(scores) == pytest.approx(0.75)
    assert NDCGAt(10, group_by="user").of(scores) == pytest.approx((1 + 1 / np.log2(6) + 1 / np.log2(11)) / 4)
    assert MRR(group_by="user").of(scores) == pytest.approx((1 + 1 / 5 + 1 / 10 + 1 / 51) / 4)
    assert [m.name for m in (HitRateAt(10, group_by="u"), NDCGAt(5, group_by="u"))] == ["hit_rate@10", "ndcg@5"]


def test_what_is_not_defined_is_refused() -> None:
    with pytest.raises(QualityError, match="no sample of label 1"):
        MRR(group_by="user").of(of([(1, 1, 0)]))
    with pytest.raises(QualityError, match="k=0 for NDCGAt"):
        NDCGAt(0, group_by="user")
    with pytest.raises(QualityError, match="k=2.5 in NDCGAt. Expected a whole number"):
        NDCGAt(2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(QualityError, match="label 2. Expected 0 or 1"):
        HitRateAt(1, group_by="user").of(of([(1, 1, 2)]))


def ranked(scores: np.ndarray, is_candidate: np.ndarray, labels: np.ndarray, *, width: int) -> Scores:
    """Of scores `[n, c]` whose first is the positive one, counted in parts of some columns."""
    counts = RankCounts()
    for first in range(0, scores.shape[1], width):
        part = slice(first, first + width)
        counts.add(scores[:, part], is_candidate[:, part], is_first=first == 0)
    samples = np.flatnonzero(counts.has_positive)
    own, ranks = counts.result(samples)
    return Scores(own, labels[samples], np.ones(len(samples)), {}, ranks)


@pytest.mark.parametrize("width", [1, 3, 7, 40])
def test_figures_of_a_full_ranking_are_those_of_all_its_scores(width: int) -> None:
    """With many ties, candidates that are left out, a sample without a positive one, and one whose label is 0."""
    random = np.random.default_rng(0)
    scores = random.integers(0, 6, (30, 40)).astype(np.float32)
    is_candidate = random.random((30, 40)) < 0.8
    is_candidate[:, 0] = True
    is_candidate[4] = False
    labels = np.ones(30)
    labels[9] = 0
    sample, place = np.nonzero(is_candidate)
    whole = Scores(
        scores[sample, place],
        np.where(place == 0, labels[sample], 0.0),
        np.ones(len(sample)),
        {"sample": sample},
    )
    found = ranked(scores, is_candidate, labels, width=width)
    halves = [
        ranked(scores[rows], is_candidate[rows], labels[rows], width=width) for rows in (slice(7), slice(7, None))
    ]
    metrics: list[Metric] = [HitRateAt(3), HitRateAt(10), NDCGAt(10), RecallAt(10), MRR(), GroupedAUC()]
    for metric in metrics:
        assert metric.of(found) == pytest.approx(metric.of(whole), rel=1e-12)
        assert metric.of(Scores.concatenate(halves)) == metric.of(found)


def test_all_scores_alike_are_chance_and_a_nan_is_refused() -> None:
    zeros = np.zeros((2, 100_001), np.float32)
    everything = np.ones(zeros.shape, bool)
    found = ranked(zeros, everything, np.ones(2), width=100_001)
    assert HitRateAt(10).of(found) == pytest.approx(10 / 100_001)
    assert GroupedAUC().of(found) == 0.5
    zeros[1, 70_000] = np.nan
    with pytest.raises(QualityError, match="NaN"):
        MRR().of(ranked(zeros, everything, np.ones(2), width=1_000))
    nothing = Scores(np.zeros(1), np.zeros(1), np.ones(1), {}, Ranks(*np.zeros((3, 1), np.int64)))
    for metric in (MRR(), RecallAt(1)):
        with pytest.raises(QualityError, match="no sample of label 1"):
            metric.of(nothing)


WEIGHTED = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1), st.integers(1, 3)), min_size=1, max_size=8
).filter(lambda rows: any(label for _, _, label, _ in rows))


@given(WEIGHTED)
def test_a_group_of_weight_3_counts_as_three_groups(rows: list[tuple[int, int, int, int]]) -> None:
    """Of equal weights within a group, that of its first row. Weights of 1 change nothing."""
    weights = {group: weight for group, _, _, weight in reversed(rows)}
    plain = [(group, score, label) for group, score, label, _ in rows]
    weighted = replace(of(plain), weights=np.array([weights[group] for group, _, _ in plain], float))
    repeated = of([(3 * g + copy, score, label) for g, score, label in plain for copy in range(weights[g])])
    for metric in (HitRateAt(2, group_by="user"), NDCGAt(2, group_by="user"), MRR(group_by="user")):
        assert metric.of(weighted) == pytest.approx(metric.of(repeated))
    assert RecallAt(2, group_by="user").of(weighted) == pytest.approx(RecallAt(2, group_by="user").of(repeated))
    metric = GroupedAUC(group_by="user")
    try:
        expected = metric.of(repeated)
    except QualityError:
        return
    assert metric.of(weighted) == pytest.approx(expected)


def test_samples_of_a_group_count_by_their_weight() -> None:
    """By hand: user 1 has positives of weight 3 and 1, of which the heavy one is first; user 2 has one of weight 4 that
    is last.
    """
    scores = Scores(
        np.array([9.0, 8.0, 7.0, 5.0, 4.0]),
        np.array([1, 0, 1, 0, 1]),
        np.array([3.0, 1.0, 1.0, 2.0, 4.0]),
        {"user": np.array([1, 1, 1, 2, 2])},
    )
    # Groups count by the mean weight of their positives: 2 and 4.
    assert RecallAt(1, group_by="user").of(scores) == pytest.approx((2 * 3 / 4 + 4 * 0) / 6)
    assert HitRateAt(1, group_by="user").of(scores) == pytest.approx((2 * 1 + 4 * 0) / 6)
    assert MRR(group_by="user").of(scores) == pytest.approx((2 * 1 + 4 / 2) / 6)
    # The area of user 1 is 3/4, that of user 2 is 0; groups count by all their weight, 5 and 6.
    assert GroupedAUC(group_by="user").of(scores) == pytest.approx(3 / 4 * 5 / 11)


@pytest.mark.parametrize("metric", [HitRateAt(3), NDCGAt(3), RecallAt(3), MRR(), GroupedAUC()])
@pytest.mark.parametrize("num_scores", [4, 10**9])
def test_full_rankings_of_a_user_are_one_list_with_several_positives(metric: Metric, num_scores: int) -> None:
    """Of all items with one score each, also of equal ones."""
    random = np.random.default_rng(2)
    users, items, parts, rows = 7, 12, [], []
    for user in range(users):
        scores = random.integers(0, num_scores, items).astype(np.float32)
        positives = random.permutation(items)[: 1 + user % 3]
        weights = random.integers(1, 4, len(positives)).astype(float)
        for item in positives:
            others = np.delete(scores, item)
            ranks = Ranks(
                *(np.array([n]) for n in (sum(others > scores[item]), sum(others == scores[item]), items - 1))
            )
            parts.append((scores[item], weights[0], user, ranks))
        rows += [(user, scores[item], int(item in positives), weights[0]) for item in range(items)]
    own, weights, groups, ranks = zip(*parts, strict=True)
    order = random.permutation(len(own))
    found = Scores(
        np.array(own)[order],
        np.ones(len(own)),
        np.array(weights)[order],
        {"user": np.array(groups)[order]},
        Ranks.concatenate(ranks).of(order),
    )
    user, score, label, weight = map(np.array, zip(*rows, strict=True))
    whole = Scores(score, label, weight, {"user": user})
    by_user = replace(metric, group_by="user")  # pyright: ignore
    assert by_user.of(found) == pytest.approx(by_user.of(whole))


def test_full_rankings_that_differ_within_a_user_share_no_place() -> None:
    """Two held-out items that are each the first of their own list are the first two of the user's."""
    ranks = Ranks(np.array([0, 0]), np.zeros(2, np.int64), np.array([9, 9]))
    scores = Scores(np.array([5.0, 4.0]), np.ones(2), np.ones(2), {"user": np.array([1, 1])}, ranks)
    assert NDCGAt(10, group_by="user").of(scores) == pytest.approx(1.0)
    assert RecallAt(1, group_by="user").of(scores) == 1.0
    assert GroupedAUC(group_by="user").of(scores) == 1.0
