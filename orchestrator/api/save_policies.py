"""When to commit, as small values. Each says, from what is known at a step, whether a commit is due then, or at which
later step.

The policies are pure. Time and quality come in with the `Moment`. The name of a commit holds its step, so a run whose
commits follow the clock can be retraced step by step. A commit changes no byte of what is trained. The last step, and a
stop by a signal or a preemption, are committed whatever the policies say; `orchestrator.driver.driver` sees to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from podembed.workers.job.ranking import Metric

# Whether the highest or the lowest value of a metric is the best.
Order = Literal["max", "min"]
# Of figures that are known by their names, behind that of a task. A metric at k is known by what stands before the `@`.
_LOWEST = ("loss", "rmse", "mae", "mse", "normalized_entropy")
_HIGHEST = ("auc", "accuracy", "recall", "precision", "ndcg", "mrr", "map", "hr", "hit", "hit_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is known after `step` steps.

    Attributes:
      saved_step: the step of the last commit; 0 before the first.
      since_save_s: seconds since then, or since the generation began.
      since_done_s: seconds since the last commit was done; 0 while one is written.
      metrics: metrics of an evaluation after exactly this step, by name; empty without one.
      best: per metric the best value among the commits so far.
    """

    step: int
    saved_step: int
    since_save_s: float = 0.0
    since_done_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)


class SavePolicy(Protocol):
    """One reason to commit. `needs_evaluation`: whether it can only ask for one right after an evaluation."""

    needs_evaluation: ClassVar[bool]

    def next_save(self, now: Moment) -> int | None:
        """The step of the next commit as far as it is known: `now.step` if one is due, a later step, or None."""
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Saves at each multiple of `steps`, but for those that come sooner after the commit before than `seconds_apart`:
    they would keep training waiting for it.
    """

    steps: int
    seconds_apart: float = 0.0

    needs_evaluation: ClassVar[bool] = False

    def next_save(self, now: Moment) -> int | None:
        if now.step > now.saved_step and now.step % self.steps == 0 and now.since_done_s >= self.seconds_apart:
            return now.step
        return (now.step // self.steps + 1) * self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """When `seconds` have passed since the last commit; asked between windows, so up to a window later."""

    seconds: float

    needs_evaluation: ClassVar[bool] = False

    def next_save(self, now: Moment) -> int | None:
        return now.step if now.step > now.saved_step and now.since_save_s >= self.seconds else None


@dataclass(frozen=True, slots=True)
class AfterEvaluation:
    """Saves after every evaluation on the way."""

    needs_evaluation: ClassVar[bool] = True

    def next_save(self, now: Moment) -> int | None:
        return now.step if now.metrics else None


@dataclass(frozen=True, slots=True)
class OnBest:
    """Saves after an evaluation that is better than that of every commit so far."""

    metric: str
    order: Order | None = None

    needs_evaluation: ClassVar[bool] = True

    def next_save(self, now: Moment) -> int | None:
        value = now.metrics.get(self.metric)
        if value is None:
            return None
        best = now.best.get(self.metric)
        return now.step if best is None or is_better(self.metric, value, best, order=self.order) else None


def order_of(metric: str, declared: Mapping[str, Order] | None = None) -> Order | None:
    """Which way a metric gets better: as the job declares it, or else by its name. None where neither says it.

    Args:
      metric: metric as evaluations have it, such as `auc`, `click/log_loss` or `ndcg@10`.
      declared: see `declared_orders`.
    """
    if declared and metric in declared:
        return declared[metric]
    name = metric.rpartition("/")[2]
    word = name.partition("@")[0]
    if word in _LOWEST or name.endswith("loss"):
        return "min"
    is_at_k = any(name.startswith(f"{known}_") for known in _HIGHEST)
    return "max" if word in _HIGHEST or is_at_k or name.endswith("auc") else None


def declared_orders(metrics: Sequence[Metric]) -> dict[str, Order]:
    """Orders of those metrics of a job that declare one (`lower_is_better`), by name."""
    said = {metric.name: getattr(metric, "lower_is_better", None) for metric in metrics}
    return {name: "min" if is_lower else "max" for name, is_lower in said.items() if is_lower is not None}


def is_better(metric: str, value: float, than: float, *, order: Order | None = None) -> bool:
    """Whether a value is strictly better, by the order, or else by the name (`order_of`). What neither knows is better
    when it is higher.
    """
    return value < than if (order or order_of(metric)) == "min" else value > than


def is_due(policies: Sequence[SavePolicy], now: Moment) -> bool:
    """Whether any policy asks for a commit now."""
    return any(policy.next_save(now) == now.step for policy in policies)


def next_known(policies: Sequence[SavePolicy], now: Moment) -> int | None:
    """The first step after this one that a policy is known to ask for."""
    steps = [step for policy in policies if (step := policy.next_save(now)) is not None and step > now.step]
    return min(steps, default=None)
