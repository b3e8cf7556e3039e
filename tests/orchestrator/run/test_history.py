"""Bookkeeping of a driver's call: which samples count, which seconds count, and the rates that follow."""

from __future__ import annotations

import pytest

from podembed.orchestrator.api.result import Evaluation
from podembed.orchestrator.run.history import History
from podembed.workers.liveness.progress import Phase


def trained(history: History, first: int, steps: int, *, seconds: float, at_s: float, generation: int = 1) -> float:
    """A window of so many steps of 100 samples each that begins at a time. Returns when it ended."""
    history.window(
        generation=generation,
        first_step=first,
        losses=[0.5] * steps,
        num_samples=100 * steps,
        phase_s={Phase.DEVICE: seconds},
        phase_cpu_s={Phase.BETWEEN: seconds / 4},
        began_s=at_s,
        ended_s=at_s + seconds,
    )
    return at_s + seconds


def evaluation(step: int) -> Evaluation:
    return Evaluation(step=step, auc=0.7, log_loss=0.5, num_samples=10)


def test_the_median_is_that_of_steps_without_the_cold_window() -> None:
    """Compilation in the first window takes most of the time, and another one in the middle takes some of it."""
    history, now_s = History(), 10.0
    now_s = trained(history, 0, 10, seconds=40.0, at_s=now_s)
    for step in range(10, 60, 10):
        now_s = trained(history, step, 10, seconds=0.1, at_s=now_s)
    now_s = trained(history, 60, 10, seconds=20.0, at_s=now_s)
    assert history.num_samples == 7000
    assert history.trained_s == pytest.approx(60.5)
    assert history.median_samples_per_s == pytest.approx(10_000)


def test_windows_count_with_their_steps() -> None:
    history, now_s = History(), 10.0
    now_s = trained(history, 0, 1, seconds=9.0, at_s=now_s)
    for step in range(1, 6):
        now_s = trained(history, step, 1, seconds=0.1, at_s=now_s)
    trained(history, 6, 8, seconds=16.0, at_s=now_s)
    assert history.median_samples_per_s == pytest.approx(50)


def test_a_run_of_one_window_has_its_rate() -> None:
    history = History()
    trained(history, 0, 10, seconds=2.0, at_s=0.0)
    assert history.median_samples_per_s == pytest.approx(500)


def test_lost_steps_are_no_samples_but_their_time_was_spent() -> None:
    history = History()
    trained(history, 0, 10, seconds=1.0, at_s=0.0)
    trained(history, 10, 90, seconds=1.0, at_s=1.0)
    history.cut(10)
    # Five seconds of recovery, then the same steps at a tenth of the speed.
    trained(history, 10, 90, seconds=10.0, at_s=7.0, generation=2)
    assert history.num_samples == 100 * 100
    assert history.trained_s == pytest.approx(17.0)
    assert [window.generation for window in history.windows] == [1, 2]
    assert history.median_samples_per_s == pytest.approx(900)
    assert sorted(history.losses) == list(range(100))


def test_evaluations_between_steps_are_no_training_and_one_at_the_end_changes_nothing() -> None:
    history = History()
    trained(history, 0, 10, seconds=1.0, at_s=0.0)
    history.evaluation(evaluation(10), seconds=30.0)
    trained(history, 10, 10, seconds=1.0, at_s=31.0)
    assert history.trained_s == pytest.approx(2.0)
    history.evaluation(evaluation(20), seconds=30.0)
    assert history.trained_s == pytest.approx(2.0)
    assert [made.step for made in history.evaluations] == [10, 20]
    history.cut(10)
    assert [made.step for made in history.evaluations] == [10]


def test_nothing_trained_has_no_rate() -> None:
    history = History()
    history.evaluation(evaluation(0), seconds=5.0)
    assert (history.num_samples, history.trained_s, history.median_samples_per_s) == (0, 0.0, 0.0)


def test_what_is_left_goes_by_the_pace_of_the_last_windows() -> None:
    history, now_s = History(), 0.0
    for at in range(30):
        assert (history.left_s(100) is None) == (at < 2)
        now_s = trained(history, 10 * at, 10, seconds=1.0, at_s=now_s + 1.0)
    # Each window with the second before it, in which a commit was waited for.
    assert history.left_s(100) == pytest.approx(20.0)
    history.evaluation(evaluation(300), seconds=50.0)
    now_s = trained(history, 300, 10, seconds=1.0, at_s=now_s + 51.0)
    # Evaluations will go on to take their share.
    assert history.left_s(100) == pytest.approx(20.0 + 100 * 50 / 310)
    # A fault takes all but the first window back, and the hosts that are left take twice as long.
    history.cut(10)
    now_s = trained(history, 10, 1, seconds=9.0, at_s=now_s + 600.0, generation=2)
    now_s = trained(history, 11, 9, seconds=1.8, at_s=now_s, generation=2)
    assert history.left_s(100) == pytest.approx(20.0 + 100 * 50 / 320)


def test_what_is_left_is_known_at_once_in_another_generation() -> None:
    history = History()
    now_s = trained(history, 0, 1, seconds=5.0, at_s=0.0)
    now_s = trained(history, 1, 9, seconds=1.0, at_s=now_s)
    trained(history, 10, 1, seconds=70.0, at_s=now_s, generation=2)
    assert history.left_s(90) == pytest.approx(10.0)
