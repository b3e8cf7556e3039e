"""`Saves`: the facts that save policies decide by, kept up to date along a generation, and the pauses that follow from
their decisions.

The policies know neither a clock nor what was committed before; this small object does, and nothing else. Used by the
driver's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.config import RunConfig
from podembed.orchestrator.api.keep_policies import CommitMetrics
from podembed.orchestrator.api.save_policies import Moment, OnBest, Order, is_better, is_due, next_known
from podembed.orchestrator.decisions.failure import StepSchedule


@dataclass(slots=True)
class Saves:
    """See the module. Mutated: what was saved last, and the best metrics so far.

    Attributes:
      monotonic: the clock, in seconds.
    """

    schedule: StepSchedule
    monotonic: Callable[[], float] = time.monotonic
    _saved_step: int = 0
    _saved_s: float = 0.0
    _done_s: float | None = 0.0
    _best: dict[str, float] = field(default_factory=dict)
    _taken: dict[int, Mapping[str, float]] = field(default_factory=dict)

    @staticmethod
    def of(
        config: RunConfig, *, all_steps: int, has_evaluation: bool, clock: Clock, stops_early: bool = False
    ) -> Saves:
        """The saves of a run of so many steps, see `StepSchedule.of`."""
        schedule = StepSchedule.of(config, all_steps=all_steps, has_evaluation=has_evaluation, stops_early=stops_early)
        return Saves(schedule, monotonic=clock.monotonic_s)

    def begin(self, step: int, commits: Sequence[CommitMetrics]) -> None:
        """A generation starts from `step`.

        Args:
          commits: commits of the lineage; their metrics are what a new best has to beat.
        """
        self._saved(step)
        self._done_s = self._saved_s
        self._taken = {commit.step: commit.metrics for commit in commits}
        self._compare()

    def next_boundary(self, step: int) -> int:
        """The step at which the run must pause next."""
        now = Moment(step=step, saved_step=self._saved_step)
        return self.schedule.next_boundary(step, next_save=next_known(self.schedule.save_policies, now))

    def to_next_save(self, step: int, step_s: float) -> float | None:
        """Seconds to the next commit whose step is known, None if there is none before the end.

        Args:
          step_s: seconds of a step.
        """
        known = next_known(self.schedule.save_policies, Moment(step=step, saved_step=self._saved_step))
        return None if known is None else (known - step) * step_s

    def may_follow(self, step: int) -> bool:
        """Whether a commit may be made after `step` steps, judged by the number alone, so that every start of a run
        answers alike.

        A policy that waits for an evaluation may want a commit after each one. A policy that follows the clock is not
        asked.
        """
        schedule = self.schedule
        if step == schedule.total_steps:
            return True
        if schedule.evaluates_at(step) and any(policy.needs_evaluation for policy in schedule.save_policies):
            return True
        return is_due(schedule.save_policies, Moment(step=step, saved_step=self._saved_step))

    def take(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether a commit is due after `step` steps; if so, it counts as made.

        Args:
          metrics: metrics of an evaluation at this very step.
        """
        now_s = self.monotonic()
        now = Moment(
            step=step,
            saved_step=self._saved_step,
            since_save_s=now_s - self._saved_s,
            since_done_s=0.0 if self._done_s is None else now_s - self._done_s,
            metrics=metrics,
            best=self._best,
        )
        if step != self.schedule.total_steps and not is_due(self.schedule.save_policies, now):
            return False
        self._saved(step)
        self._taken[step] = metrics
        self._compare()
        return True

    def done(self) -> None:
        """The commit that was made last is published."""
        self._done_s = self.monotonic()

    def failed(self, step: int) -> None:
        """The commit of this step was not made after all, so the best one is among the others."""
        self.done()
        self._taken.pop(step, None)
        self._compare()

    def _saved(self, step: int) -> None:
        self._saved_step, self._saved_s, self._done_s = step, self.monotonic(), None

    def _compare(self) -> None:
        self._best = {}
        orders: dict[str, Order | None] = {
            policy.metric: policy.order for policy in self.schedule.save_policies if isinstance(policy, OnBest)
        }
        for metrics in self._taken.values():
            for name, value in metrics.items():
                if name not in self._best or is_better(name, value, self._best[name], order=orders.get(name)):
                    self._best[name] = value
