"""Whether evaluations still get better: what `EarlyStopping` decides by, as values that a commit keeps. No clock, no
Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from podembed.orchestrator.api.save_policies import Order, is_better
from podembed.orchestrator.api.text import plural
from podembed.workers.control.stopping import EarlyStopping

# Names under which a commit keeps it: among its counters, and the value among its metrics.
BEST = "early_stopping_best"
BEST_STEP = "early_stopping_best_step"
WAITED = "early_stopping_waited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The best evaluation so far, and how many followed it.

    Attributes:
      best: its value; NaN before the first evaluation.
      best_step: steps before it.
      waited: evaluations since, none of them better.
    """

    best: float = math.nan
    best_step: int = 0
    waited: int = 0

    @staticmethod
    def of(counters: Mapping[str, int], metrics: Mapping[str, float]) -> Standing:
        """What a commit says; the beginning, where it says nothing."""
        return Standing(
            best=metrics.get(BEST, math.nan), best_step=counters.get(BEST_STEP, 0), waited=counters.get(WAITED, 0)
        )

    @property
    def counters(self) -> dict[str, int]:
        return {BEST_STEP: self.best_step, WAITED: self.waited}

    @property
    def metrics(self) -> dict[str, float]:
        return {} if math.isnan(self.best) else {BEST: self.best}

    def after(self, step: int, value: float, *, metric: str, order: Order | None, min_delta: float) -> Standing:
        """What it is after one more evaluation. A value that is not finite is no better.

        Args:
          order: order as for `is_better`.
        """
        is_lower_better = is_better(metric, 0.0, 1.0, order=order)
        bar = self.best - min_delta if is_lower_better else self.best + min_delta
        if math.isfinite(value) and (math.isnan(self.best) or is_better(metric, value, bar, order=order)):
            return Standing(best=value, best_step=step)
        return Standing(best=self.best, best_step=self.best_step, waited=self.waited + 1)


class EarlyStop:
    """Follows the evaluations of a run. Mutated by the driver's thread: `standing`.

    Args:
      policy: None for a job that trains all its steps.
      metric, order: metric and order by which evaluations are compared.

    Attributes:
      standing: of the evaluations up to the newest one.
    """

    def __init__(self, policy: EarlyStopping | None, *, metric: str, order: Order | None) -> None:
        self.policy = policy
        self.metric = metric
        self.order: Order | None = order
        self.standing = Standing()

    def begin(self, counters: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        """A generation starts from a commit with these."""
        self.standing = Standing.of(counters, metrics)

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation was made after `step` steps."""
        if self.policy is not None:
            value = metrics.get(self.metric, math.nan)
            self.standing = self.standing.after(
                step, value, metric=self.metric, order=self.order, min_delta=self.policy.min_delta
            )

    @property
    def is_due(self) -> bool:
        """Whether training is to end."""
        return is_over(self.policy, self.standing)

    @property
    def reason(self) -> str | None:
        """Why training ends, in words; None while it goes on."""
        if not self.is_due:
            return None
        best = "no value" if math.isnan(self.standing.best) else f"{self.standing.best:.6g}"
        return (
            f"{self.metric} was best at step {self.standing.best_step} ({best}), and not better in the "
            f"{plural(self.standing.waited, 'evaluation')} since"
        )

    @property
    def counters(self) -> dict[str, int]:
        """What a commit keeps among its counters."""
        return {} if self.policy is None else self.standing.counters

    @property
    def metrics(self) -> dict[str, float]:
        """What a commit keeps among its metrics."""
        return {} if self.policy is None else self.standing.metrics


def is_over(policy: EarlyStopping | None, standing: Standing) -> bool:
    """Whether a policy ends training there."""
    return policy is not None and standing.waited >= policy.patience
