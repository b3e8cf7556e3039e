"""When evaluations no longer get better: the standing of a run, and what a commit keeps of it."""

from __future__ import annotations

import math

import pytest

from podembed.orchestrator.api.early_stopping import EarlyStop
from podembed.orchestrator.api.save_policies import Order
from podembed.workers.control.stopping import EarlyStopping, StoppingError


def stopped_at(values: list[float], *, policy: EarlyStopping, order: Order | None = None, kept: bool = False) -> int:
    """Evaluations until the end; 0 where it does not come.

    Args:
      kept: each evaluation is followed by a commit and a new driver.
    """
    stop = EarlyStop(policy, metric="auc", order=order)
    for at, value in enumerate(values, 1):
        stop.take(10 * at, {"auc": value, "loss": 1.0})
        if kept:
            before, stop = stop, EarlyStop(policy, metric="auc", order=order)
            stop.begin(before.counters, before.metrics)
        if stop.is_due:
            return at
    return 0


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("values", "order", "min_delta", "expected"),
    [
        ([0.5, 0.6, 0.6, 0.59], None, 0.0, 4),
        ([0.5, 0.6, 0.59, 0.61, 0.6, 0.7], None, 0.0, 0),
        ([0.5, 0.6, 0.605, 0.609], None, 0.01, 4),
        ([0.5, 0.6, 0.605, 0.611], None, 0.01, 0),
        ([0.6, 0.5, 0.5, 0.51], "min", 0.0, 4),
        ([0.6, 0.5, 0.495, 0.491], "min", 0.01, 4),
        ([math.nan, math.nan], None, 0.0, 2),
        ([0.5, math.nan, math.inf], None, 0.0, 3),
        ([math.nan, 0.5, 0.4, 0.6, 0.5], None, 0.0, 0),
    ],
)
def test_so_many_evaluations_in_a_row_that_are_not_better(
    values: list[float], order: Order | None, min_delta: float, expected: int, kept: bool
) -> None:
    assert stopped_at(values, policy=EarlyStopping(patience=2, min_delta=min_delta), order=order, kept=kept) == expected


def test_a_job_without_a_policy_keeps_and_ends_nothing() -> None:
    stop = EarlyStop(None, metric="auc", order=None)
    for step in range(9):
        stop.take(step, {"auc": 0.5})
    assert (stop.is_due, stop.reason, stop.counters, stop.metrics) == (False, None, {}, {})


def test_the_reason_names_the_best_evaluation() -> None:
    stop = EarlyStop(EarlyStopping(patience=1), metric="auc", order=None)
    stop.take(10, {"auc": 0.75})
    assert stop.reason is None
    stop.take(20, {"auc": 0.7})
    assert stop.reason == "auc was best at step 10 (0.75), and not better in the 1 evaluation since"


@pytest.mark.parametrize("given", [{"patience": 0}, {"min_delta": -0.1}, {"min_delta": math.nan}, {"patience": "3"}])
def test_what_cannot_work_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(StoppingError, match="Found"):
        EarlyStopping(**given)  # type: ignore[arg-type]
