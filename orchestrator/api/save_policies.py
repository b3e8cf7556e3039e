"""When to commit, as small values. Each says, from what is known at a step, whether a commit is due then, or at which
later step.

The policies are pure. Time and quality come in with the `Moment`. The name of a commit holds its step, so a run whose
commits follow the clock can be retraced step by step. A commit changes no byte of what is trained. The last step, and a
stop by a signal or a preemption, are committed whatever the policies say; `orchestrator.driver.driver` sees to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

# Whether the highest or the lowest value of a metric is the best.
Order = Literal["max", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is known after `step` steps.

    Attributes:
      saved_step: the step of the last commit; 0 before the first.
      since_save_s: seconds since then, or since the generation began.
      metrics: of an evaluation after exactly this step, by name; empty without one.
      best: per metric the best value among the commits so far.
    """

    step: int
    saved_step: int
    since_save_s: float = 0.0
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
    """At each multiple of `steps`."""

    steps: int

    needs_evaluation: ClassVar[bool] = False

    def next_save(self, now: Moment) -> int | None:
        if now.step > now.saved_step and now.step % self.steps == 0:
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
    """After every evaluation on the way."""

    needs_evaluation: ClassVar[bool] = True

    def next_save(self, now: Moment) -> int | None:
        return now.step if now.metrics else None


@dataclass(frozen=True, slots=True)
class OnBest:
    """After an evaluation that is better than that of every commit so far."""

    metric: str
    order: Order | None = None

    needs_evaluation: ClassVar[bool] = True

    def next_save(self, now: Moment) -> int | None:
        value = now.metrics.get(self.metric)
        if value is None:
            return None
        best = now.best.get(self.metric)
        return now.step if best is None or is_better(self.metric, value, best, order=self.order) else None


def is_better(metric: str, value: float, than: float, *, order: Order | None = None) -> bool:
    """Whether a value is strictly better, by the order, or else by the name. A loss is better when it is lower, any
    other metric when it is higher.
    """
    order = order or ("min" if metric.endswith("loss") else "max")
    return value < than if order == "min" else value > than


def is_due(policies: Sequence[SavePolicy], now: Moment) -> bool:
    """Whether any policy asks for a commit now."""
    return any(policy.next_save(now) == now.step for policy in policies)


def next_known(policies: Sequence[SavePolicy], now: Moment) -> int | None:
    """The first step after this one that a policy is known to ask for."""
    steps = [step for policy in policies if (step := policy.next_save(now)) is not None and step > now.step]
    return min(steps, default=None)
