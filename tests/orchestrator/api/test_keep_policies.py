"""What to keep: each policy as a table of lineages, and that keeping is stable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.keep_policies import CommitMetrics, KeepBest, KeepEvery, KeepPolicy, kept


def lineage(*entries: tuple[int, float | None]) -> list[CommitMetrics]:
    """Newest first; names are steps."""
    return [
        CommitMetrics(name=str(step), step=step, metrics={} if auc is None else {"auc": auc, "log_loss": 1 - auc})
        for step, auc in entries
    ]


SCORED = lineage((50, None), (40, 0.6), (30, 0.9), (20, 0.9), (10, 0.7))


@pytest.mark.parametrize(
    ("policy", "commits", "expected"),
    [
        (KeepEvery(2), [], []),
        (KeepEvery(20), SCORED, ["40", "20", "10"]),
        (KeepEvery(25), lineage((60, None), (51, None), (49, None), (24, None)), ["51", "49", "24"]),
        (KeepEvery(1000), SCORED, ["10"]),
        (KeepEvery(1), SCORED, ["50", "40", "30", "20", "10"]),
        (KeepBest(1, "auc"), SCORED, ["20"]),
        (KeepBest(3, "auc"), SCORED, ["30", "20", "10"]),
        (KeepBest(9, "auc"), SCORED, ["40", "30", "20", "10"]),
        (KeepBest(1, "log_loss"), SCORED, ["20"]),
        (KeepBest(1, "auc", "min"), SCORED, ["40"]),
        (KeepBest(2, "auc"), lineage((10, None)), []),
    ],
)
def test_what_a_policy_keeps(policy: KeepPolicy, commits: Sequence[CommitMetrics], expected: Sequence[str]) -> None:
    assert sorted(policy.kept(commits)) == sorted(expected)


def test_a_commit_stays_if_any_policy_wants_it() -> None:
    assert kept([KeepEvery(20), KeepBest(1, "auc"), KeepBest(1, "auc", "min")], SCORED) == {"40", "20", "10"}
    assert kept([], SCORED) == frozenset()


def test_the_policies_of_a_configuration() -> None:
    assert CheckpointConfig().keep_policies == ()
    config = CheckpointConfig(keep_every_steps=100, keep_best=2, metric="log_loss")
    assert config.keep_policies == (KeepEvery(100), KeepBest(2, "log_loss"))


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.none() | st.sampled_from([0.1, 0.5, 0.9])), unique_by=lambda pair: pair[0]
    ),
    st.integers(1, 25),
    st.integers(0, 3),
)
def test_deleting_one_commit_at_a_time_ends_where_deleting_once_ends(
    entries: list[tuple[int, float | None]], every: int, best: int
) -> None:
    """A run deletes after every commit; what it has left must be what the policies would choose from all commits ever
    made.
    """
    entries = sorted(entries, reverse=True)
    policies = [KeepEvery(every), KeepBest(best, "auc")]
    left: list[CommitMetrics] = []
    for entry in reversed(entries):
        left = [*lineage(entry), *left]
        names = kept(policies, left)
        left = [commit for commit in left if commit.name in names]
    everything = lineage(*entries)
    # A tie for the best is decided for the older, which may be pushed out by later ones but never comes back.
    assert {commit.name for commit in left} == kept(policies, everything)
