"""Decisions of the driver as pure functions: how long the next window is, and what to do after a failure. No clock, no
Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from podembed.orchestrator.api.config import ConfigurationError, RunConfig
from podembed.orchestrator.api.intervals import known_steps
from podembed.orchestrator.api.run_errors import (
    CrashLoop,
    Failure,
    JobFailed,
    WorkerRefused,
    cause,
    is_host_fault,
    roots,
)
from podembed.orchestrator.api.save_policies import SavePolicy
from podembed.orchestrator.api.text import without_machinery

WINDOW_TARGET_S = 2.0
LONGEST_WINDOW_S = 30.0
CALL_CPU_S = 0.2e-3  # of the driver, for one call of an actor and its answer: `benchmarks/driver.py --calls`
CALLS_PER_HOST = 2  # a window is one call of each process of a host
DRIVER_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """Steps at which something happens besides training.

    Attributes:
      total_steps: steps of the whole run; the last one is always committed.
      save_policies: when to commit on the way.
      eval_every: steps between evaluations; None means never.
      counts_last: whether an evaluation after the last step is one on the way, and so comes before the commit.
    """

    total_steps: int
    save_policies: tuple[SavePolicy, ...]
    eval_every: int | None
    counts_last: bool = False

    @staticmethod
    def of(config: RunConfig, *, all_steps: int, has_evaluation: bool, stops_early: bool = False) -> StepSchedule:
        """The schedule of a run.

        Args:
          all_steps: all steps of all epochs.
          has_evaluation: there are samples to evaluate with.
          stops_early: evaluations decide when the run ends. It may go on behind `max_steps`, so the one there counts.
        """
        eval_every = known_steps("eval_every_steps", config.eval_every_steps)
        return StepSchedule(
            total_steps=config.last_step(all_steps),
            save_policies=config.checkpoint_config.save_policies,
            eval_every=eval_every if has_evaluation else None,
            counts_last=stops_early and config.last_step(all_steps) < all_steps,
        )

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
        is_on_the_way = step < self.total_steps or self.counts_last
        return self.eval_every is not None and step % self.eval_every == 0 and is_on_the_way


def window_target_s(num_hosts: int) -> float:
    """Seconds that a window should take, so that its calls cost the driver a hundredth of its time.

    Never under 2 s. Never over 30 s either, since a request to stop is answered between windows; above 750 hosts the
    driver's share grows.
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


class FaultClass(Enum):
    """The class that a failure is charged to."""

    HOST = "a host failed"
    PREEMPTION = "an announced machine left"
    HOST_MEMORY = "a host ran out of memory"
    DEVICE_MEMORY = "a device ran out of memory"
    USER = "the job raised"
    REFUSAL = "data, storage or settings were refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The failures so far in this call of the driver, each kind counted for itself.

    Attributes:
      host_faults: in a row without a new commit.
      preemptions: announced losses of machines; they cost nothing.
      user_errors: exceptions of the job after which it was tried again.
      last_error: messages and step of the newest of them.
      out_of_memory: what ran out, and with how many hosts.
    """

    host_faults: int = 0
    preemptions: int = 0
    user_errors: int = 0
    last_error: tuple[frozenset[str], int] | None = None
    out_of_memory: frozenset[tuple[FaultClass, int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """Start a new generation from the last commit, with what is left of the budget."""

    cause: str
    kind: FaultClass
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Stop. `cause` says also why it is not tried again, where that is not plain."""

    cause: str
    kind: FaultClass


def fault_class(failures: Sequence[Failure], *, is_proven: bool = True) -> FaultClass:
    """The class that a group of failures is charged to. Its root decides, not the echoes in other processes.

    Args:
      is_proven: the rows that hosts kept from before a fault are known to be right. Otherwise they may be why a job
        failed or was refused.
    """
    memory = next((failure.memory for failure in failures if failure.memory), "")
    if memory:
        return FaultClass.HOST_MEMORY if memory == "host" else FaultClass.DEVICE_MEMORY
    if not is_host_fault(failures):
        if not is_proven:
            return FaultClass.HOST
        return FaultClass.REFUSAL if all(failure.refusal for failure in failures) else FaultClass.USER
    return FaultClass.PREEMPTION if all(failure.is_preemption for failure in roots(failures)) else FaultClass.HOST


def after_failure(
    failures: Sequence[Failure],
    *,
    budget: Budget,
    max_failures: int,
    max_user_errors: int = 0,
    step: int | None = None,
    num_hosts: int = 1,
    is_proven: bool = True,
) -> Recover | GiveUp:
    """The decision after workers failed.

    Args:
      failures: failures of one attempt.
      budget: what went wrong before, since the last commit where that counts.
      max_failures: number of host faults in a row that are tolerated.
      max_user_errors: number of exceptions of the job that are tolerated in all.
      step: step that was worked on; None while the generation started, where an exception would come again for sure.
      num_hosts: number of hosts of the attempt.
      is_proven: flag of `fault_class`.
    """
    kind, what = fault_class(failures, is_proven=is_proven), cause(failures)
    if kind is not fault_class(failures):
        if budget.host_faults + 1 > max_failures:
            return GiveUp(cause=what, kind=fault_class(failures))
        what = f"{what.rstrip('.')}. Rows that hosts had kept were not compared with the commit yet, so they may be why"
    match kind:
        case FaultClass.REFUSAL:
            return GiveUp(cause=what, kind=kind)
        case FaultClass.PREEMPTION:
            return Recover(cause=what, kind=kind, budget=replace(budget, preemptions=budget.preemptions + 1))
        case FaultClass.USER:
            return _after_error(failures, budget, max_user_errors, step)
        case FaultClass.HOST_MEMORY | FaultClass.DEVICE_MEMORY:
            if (kind, num_hosts) in budget.out_of_memory:
                return GiveUp(cause=f"{what}. It was the second time with {_hosts(num_hosts)}", kind=kind)
            budget = replace(budget, out_of_memory=budget.out_of_memory | {(kind, num_hosts)})
    if budget.host_faults + 1 > max_failures:
        return GiveUp(cause=what, kind=FaultClass.HOST)
    return Recover(cause=what, kind=kind, budget=replace(budget, host_faults=budget.host_faults + 1))


def _after_error(
    failures: Sequence[Failure], budget: Budget, max_user_errors: int, step: int | None
) -> Recover | GiveUp:
    """The decision after an exception of the job. Its step is known to within one: hosts work ahead of their
    devices.
    """
    what, messages = cause(failures), frozenset(failure.message for failure in failures)
    if step is None:
        return GiveUp(cause=what, kind=FaultClass.USER)
    before, at = budget.last_error or (frozenset(), 0)
    if before & messages and abs(at - step) <= 1:
        return GiveUp(cause=f"{what}\nIt came twice at step {step}, so it would come again.", kind=FaultClass.USER)
    if budget.user_errors + 1 > max_user_errors:
        return GiveUp(cause=what, kind=FaultClass.USER)
    budget = replace(budget, user_errors=budget.user_errors + 1, last_error=(messages, step))
    return Recover(cause=what, kind=FaultClass.USER, budget=budget)


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"


def ending(decision: GiveUp, failures: Sequence[Failure], *, max_failures: int, plan: str) -> Exception:
    """The exception with which a run ends that is not tried again.

    Args:
      plan: in a sentence without its full stop, what the plan puts on a host.
    """
    # Many hosts fail alike; one traceback is enough.
    details = next((failure.details for failure in failures if failure.details), "")
    match decision.kind:
        case FaultClass.REFUSAL:
            # `cause` names the first of them, and those that failed alike.
            refusal = next((failure.refusal for failure in failures if failure.refusal), WorkerRefused)
            return refusal(decision.cause)
        case FaultClass.USER:
            return JobFailed(f"{decision.cause}\n{without_machinery(details)}".strip())
        case FaultClass.HOST_MEMORY:
            return ConfigurationError(
                f"{decision.cause}. The plan: {plan}. Expected it to fit beside what else a host needs. Use more hosts "
                "(--hosts), machines with more memory, row optimizers with fewer slots (row-wise Adagrad, SGD), or "
                "smaller tables; `podembed plan` shows what lies where."
            )
        case FaultClass.DEVICE_MEMORY:
            return ConfigurationError(
                f"{decision.cause}. Expected the dense model and a host's share of the batch to fit its device. Lower "
                "the batch size, use more hosts (--hosts), or make the model smaller."
            )
    return CrashLoop(
        f"{decision.cause.rstrip('.')}. That was fault {max_failures + 1} in a row without a new commit. "
        f"Look at the hosts named above; then `podembed resume` goes on from the last commit.\n{details}".strip()
    )
