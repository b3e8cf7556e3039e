"""Decisions as tables of cases: when to pause, commit and evaluate, how long a window is, what to do after a failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import CheckpointConfig
from orchestrator.errors import Failure, FailureKind, cause, is_host_fault
from orchestrator.policies import (
    CALL_CPU_S,
    CALLS_PER_HOST,
    LONGEST_WINDOW_S,
    WINDOW_TARGET_S,
    GiveUp,
    Recover,
    Schedule,
    after_failure,
    window_end,
    window_target_s,
)
from orchestrator.saves import Saves

DIED, HUNG, PEER, ERROR = FailureKind.DIED, FailureKind.HUNG, FailureKind.PEER, FailureKind.ERROR


def failures(*kinds: FailureKind) -> list[Failure]:
    return [Failure(worker=f"host {at}", kind=kind, message=f"m{at}") for at, kind in enumerate(kinds)]


def saves_of(*, total: int, commit_every: int | None, eval_every: int | None) -> Saves:
    policies = CheckpointConfig(every_steps=commit_every).save_policies
    return Saves(Schedule(total_steps=total, save_policies=policies, eval_every=eval_every), monotonic=lambda: 0.0)


@pytest.mark.parametrize(
    ("total", "commit_every", "eval_every", "step", "boundary"),
    [
        (50, None, None, 0, 50),
        (50, 10, None, 0, 10),
        (50, 10, None, 10, 20),
        (50, 10, None, 45, 50),
        (50, 10, 7, 0, 7),
        (50, 10, 7, 7, 10),
        (50, 10, 7, 19, 20),
        (50, 100, 100, 3, 50),
        (5, 1, 1, 4, 5),
    ],
)
def test_the_next_boundary(
    total: int, commit_every: int | None, eval_every: int | None, step: int, boundary: int
) -> None:
    saves = saves_of(total=total, commit_every=commit_every, eval_every=eval_every)
    saves.begin(step, ())
    assert saves.next_boundary(step) == boundary


@pytest.mark.parametrize(
    ("step", "commits", "evaluates"),
    [(5, False, False), (10, True, False), (15, False, True), (30, True, True), (35, True, False)],
)
def test_what_happens_at_a_step(step: int, commits: bool, evaluates: bool) -> None:
    """The last step commits, whatever its number; its evaluation is the driver's last act and not asked for here."""
    saves = saves_of(total=35, commit_every=10, eval_every=15)
    assert (saves.take(step, {}), saves.schedule.evaluates_at(step)) == (commits, evaluates)


@given(
    total=st.integers(1, 300),
    commit_every=st.none() | st.integers(1, 50),
    eval_every=st.none() | st.integers(1, 50),
    step_s=st.none() | st.floats(0, 100),
)
def test_windows_reach_the_end_and_pause_at_every_commit_and_evaluation(
    total: int, commit_every: int | None, eval_every: int | None, step_s: float | None
) -> None:
    saves = saves_of(total=total, commit_every=commit_every, eval_every=eval_every)
    step, commits, evaluations = 0, [], []
    while step < total:
        end = window_end(step=step, boundary=saves.next_boundary(step), step_s=step_s)
        assert step < end <= total
        step = end
        metrics = {"auc": 0.5} if saves.schedule.evaluates_at(step) else {}
        evaluations += [step] if metrics else []
        commits += [step] if saves.take(step, metrics) else []
    expected_evaluations = [] if eval_every is None else [*range(eval_every, total, eval_every)]
    assert evaluations == expected_evaluations
    on_the_way = expected_evaluations if commit_every is None else range(commit_every, total, commit_every)
    assert commits == [*on_the_way, total]


@pytest.mark.parametrize(
    ("step_s", "num_steps"), [(None, 1), (WINDOW_TARGET_S / 8, 8), (WINDOW_TARGET_S * 9, 1), (0.0, 1000)]
)
def test_a_window_takes_about_its_target_time(step_s: float | None, num_steps: int) -> None:
    assert window_end(step=100, boundary=1100, step_s=step_s) == 100 + num_steps


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 64, 256, 700])
def test_the_calls_of_a_window_take_at_most_a_hundredth_of_it(num_hosts: int) -> None:
    spent_s = num_hosts * CALLS_PER_HOST * CALL_CPU_S
    assert spent_s <= 0.01001 * window_target_s(num_hosts)
    assert WINDOW_TARGET_S <= window_target_s(num_hosts) <= LONGEST_WINDOW_S


def test_a_window_of_many_hosts_still_ends_soon_enough_to_be_stopped() -> None:
    assert window_target_s(100_000) == LONGEST_WINDOW_S


@pytest.mark.parametrize(
    ("kinds", "is_fault", "root"),
    [
        ([DIED], True, "host 0 died: m0"),
        ([HUNG], True, "host 0 hung: m0"),
        ([PEER], True, "host 0 lost a peer: m0"),
        ([ERROR], False, "host 0 failed: m0"),
        ([ERROR, ERROR], False, "host 0 failed: m0"),
        ([PEER, DIED], True, "host 1 died: m1"),
        ([PEER, PEER, HUNG], True, "host 2 hung: m2"),
        # A collective that lost a member raises in the survivors before Ray knows of the death.
        ([ERROR, DIED], True, "host 1 died: m1"),
        ([ERROR, HUNG], True, "host 1 hung: m1"),
        ([ERROR, PEER], True, "host 0 failed: m0"),
        ([PEER, ERROR], True, "host 1 failed: m1"),
    ],
)
def test_the_root_of_a_group_of_failures(kinds: list[FailureKind], is_fault: bool, root: str) -> None:
    assert is_host_fault(failures(*kinds)) is is_fault
    assert cause(failures(*kinds)) == root


@pytest.mark.parametrize(
    ("kinds", "before", "max_failures", "decision"),
    [
        ([DIED], 0, 3, Recover(cause="host 0 died: m0", failures_since_commit=1)),
        ([DIED], 2, 3, Recover(cause="host 0 died: m0", failures_since_commit=3)),
        ([DIED], 3, 3, GiveUp(cause="host 0 died: m0", is_job_error=False)),
        ([DIED], 0, 0, GiveUp(cause="host 0 died: m0", is_job_error=False)),
        ([ERROR], 0, 3, GiveUp(cause="host 0 failed: m0", is_job_error=True)),
        ([ERROR], 9, 3, GiveUp(cause="host 0 failed: m0", is_job_error=True)),
        ([ERROR, DIED], 0, 3, Recover(cause="host 1 died: m1", failures_since_commit=1)),
    ],
)
def test_what_to_do_after_a_failure(
    kinds: list[FailureKind], before: int, max_failures: int, decision: Recover | GiveUp
) -> None:
    assert after_failure(failures(*kinds), failures_since_commit=before, max_failures=max_failures) == decision


def test_a_broken_collective_reports_a_peer_and_not_the_job() -> None:
    """A gang member that dies with its whole machine is noticed by JAX before Ray."""
    from jax.errors import JaxRuntimeError

    from orchestrator.cluster import failure_of

    lost = failure_of("device 0", JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
    own = failure_of("device 0", JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    assert (lost.kind, own.kind) == (FailureKind.PEER, FailureKind.ERROR)
    assert isinstance(after_failure([lost], failures_since_commit=0, max_failures=3), Recover)
    assert isinstance(after_failure([own], failures_since_commit=0, max_failures=3), GiveUp)
