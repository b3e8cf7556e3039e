"""Decisions of the driver as pure functions: how long the next window is, and what to do after a failure. No clock, no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import Failure, cause, is_host_fault
from orchestrator.save_policies import SavePolicy

WINDOW_TARGET_S = 2.0
LONGEST_WINDOW_S = 30.0
CALL_CPU_S = 0.2e-3  # of the driver, for one call of an actor and its answer: `benchmarks/driver.py --calls`
CALLS_PER_HOST = 2  # a window is one call of each process of a host
DRIVER_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps at which something happens besides training.

    Attributes:
      total_steps: steps of the whole run; the last one is always committed.
      save_policies: when to commit on the way.
      eval_every: steps between evaluations; None means never.
    """

    total_steps: int
    save_policies: tuple[SavePolicy, ...]
    eval_every: int | None

    def next_boundary(self, step: int, *, next_save: int | None) -> int:
        """The next step, above `step`, at which the run must pause.

        Args:
          next_save: the next commit that is known.
        """
        ahead = [self.total_steps]
        if next_save is not None:
            ahead.append(next_save)
        if self.eval_every is not None:
            ahead.append((step // self.eval_every + 1) * self.eval_every)
        return min(ahead)

    def evaluates_at(self, step: int) -> bool:
        """Evaluations on the way; the one at the end is the driver's last act."""
        return self.eval_every is not None and step % self.eval_every == 0 and step < self.total_steps


def window_target_s(num_hosts: int) -> float:
    """How long a window should take, so that its calls cost the driver a hundredth of its time.

    Never under 2 s. Never over 30 s either, since a request to stop is answered between windows; above 750 hosts the driver's share grows.
    """
    return min(max(WINDOW_TARGET_S, num_hosts * CALLS_PER_HOST * CALL_CPU_S / DRIVER_SHARE), LONGEST_WINDOW_S)


def window_end(*, step: int, boundary: int, step_s: float | None, target_s: float = WINDOW_TARGET_S) -> int:
    """The step at which the next window ends.

    Args:
      step: steps done.
      boundary: the window does not pass it.
      step_s: measured seconds of a step; None before the first window, which is kept to one step.
      target_s: how long the window should take.
    """
    if step_s is None:
        return min(step + 1, boundary)
    return min(step + max(1, round(target_s / max(step_s, 1e-6))), boundary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """Start a new generation from the last commit."""

    cause: str
    failures_since_commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Stop. `is_job_error` tells the job's own error from a crash loop."""

    cause: str
    is_job_error: bool


def after_failure(failures: Sequence[Failure], *, failures_since_commit: int, max_failures: int) -> Recover | GiveUp:
    """What to do after workers failed.

    Args:
      failures: of one attempt.
      failures_since_commit: host faults before this one, since the last commit.
      max_failures: how many are borne in a row.
    """
    if not is_host_fault(failures):
        return GiveUp(cause=cause(failures), is_job_error=True)
    if failures_since_commit + 1 > max_failures:
        return GiveUp(cause=cause(failures), is_job_error=False)
    return Recover(cause=cause(failures), failures_since_commit=failures_since_commit + 1)
