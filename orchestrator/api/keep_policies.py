"""Which commits stay, as small values: each names those that it wants; a commit goes when no policy names it.

The policies are pure functions of the commits that there are, newest first. They are stable: what a policy names today
it also names after the others are deleted, until newer commits push it out. Deleting is `orchestrator.commit.keep`'s
business.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from podembed.orchestrator.api.save_policies import Order, is_better


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitMetrics:
    """What the policies know of a commit. `metrics` is empty where none was evaluated at its step."""

    name: str
    step: int
    metrics: Mapping[str, float]


class KeepPolicy(Protocol):
    """One reason to keep commits."""

    def kept(self, commits: Sequence[CommitMetrics]) -> Collection[str]:
        """Names of the commits that should stay, of a lineage that is given newest first."""
        ...


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """The first commit at or after each multiple of `steps`."""

    steps: int

    def kept(self, commits: Sequence[CommitMetrics]) -> Collection[str]:
        first = {commit.step // self.steps: commit.name for commit in commits}
        return first.values()


@dataclass(frozen=True, slots=True)
class KeepBest:
    """The `count` with the best metric; of equal ones the older."""

    count: int
    metric: str
    order: Order | None = None

    def kept(self, commits: Sequence[CommitMetrics]) -> Collection[str]:
        sign = 1.0 if is_better(self.metric, 0.0, 1.0, order=self.order) else -1.0
        scored = [commit for commit in commits if self.metric in commit.metrics]
        ranked = sorted(scored, key=lambda commit: (sign * commit.metrics[self.metric], commit.step))
        return [commit.name for commit in ranked[: self.count]]


def kept(policies: Sequence[KeepPolicy], commits: Sequence[CommitMetrics]) -> frozenset[str]:
    """Names that any of the policies wants."""
    return frozenset(name for policy in policies for name in policy.kept(commits))
