"""A planted fault for each detector of evaluations, and the same numbers without it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from podembed.orchestrator.api.result import Evaluation
from podembed.orchestrator.events.commits import Committed
from podembed.orchestrator.events.progress import Evaluated
from podembed.tools.health.check import replayed
from podembed.tools.metrics.reading import without_lost
from podembed.workers.job.window_figures import LabelFigures
from tests.tools.health.points import Driver
from tests.tools.metrics.windows import recovery


@pytest.fixture
def driver() -> Driver:
    return Driver()


def trained(
    driver: Driver, windows: int = 10, *, entropy: float = 0.9, auc: float = 0.7, loss: float | None = None
) -> None:
    """Windows of 10 steps of 64 samples, of which about a third are positive."""
    for _ in range(windows):
        figures = LabelFigures(
            label="click",
            weight=640.0,
            positives=210.0,
            predicted=210.0,
            auc=auc,
            auc_error=0.001,
            normalized_entropy=entropy,
            calibration=1.0,
        )
        driver.windows(1, loss=loss, figures=(figures,))


def evaluated(
    driver: Driver, *, auc: float = 0.7, log_loss: float = 0.5, best: float | None = None, num_samples: int = 100_000
) -> None:
    made = Evaluation(step=driver.step, auc=auc, log_loss=log_loss, num_samples=num_samples, loss=log_loss)
    driver.event(Evaluated(evaluation=made, best_auc=best, baseline=None))


def test_a_normalized_entropy_above_one_is_that_of_a_constant(driver: Driver) -> None:
    trained(driver, 60, entropy=0.99)
    assert driver.begun == []
    trained(driver, 60, entropy=1.02)
    assert driver.begun == [("no_better_than_constant", "click")]
    assert "1.0176" in driver.watch.standing["no_better_than_constant", "click"].text, "what a window's own share gains"
    trained(driver, 60, entropy=0.9)
    assert driver.standing == []


def test_a_small_window_that_knows_its_own_share_makes_no_alarm(driver: Driver) -> None:
    # One nat in 2 × 210 positives is what fitting a share brings.
    trained(driver, 200, entropy=1.0 + 0.4 / 210)
    assert driver.begun == []


def test_an_auc_near_chance_after_many_samples(driver: Driver) -> None:
    trained(driver, 50, auc=0.5)
    evaluated(driver, auc=0.505)
    assert driver.begun == [], "32,000 samples are few"
    trained(driver, 150, auc=0.52)
    evaluated(driver, auc=0.524)
    assert driver.begun == [("no_better_than_constant", "click")]
    assert "0.5240" in driver.watch.standing["no_better_than_constant", "click"].text
    trained(driver, 50, auc=0.56)
    evaluated(driver, auc=0.562)
    assert driver.ended == [], "that is hardly better"
    trained(driver, 50)
    evaluated(driver, auc=0.8)
    assert driver.ended == [("no_better_than_constant", "click")]


def test_an_auc_of_few_samples_may_be_near_chance_by_luck(driver: Driver) -> None:
    trained(driver, 200, auc=0.58)
    evaluated(driver, auc=0.53, num_samples=1000)
    assert driver.begun == []


def test_an_auc_far_below_the_reachable_one(driver: Driver) -> None:
    trained(driver, 200, auc=0.56)
    evaluated(driver, auc=0.56, best=0.8117)
    assert driver.begun == [("no_better_than_constant", "click")]
    assert "19%" in driver.watch.standing["no_better_than_constant", "click"].text
    trained(driver, 50)
    evaluated(driver, auc=0.79, best=0.8117)
    assert driver.standing == []


def test_an_evaluation_that_falls_while_the_training_loss_falls(driver: Driver) -> None:
    for at, log_loss in enumerate((0.52, 0.505, 0.518, 0.53, 0.557)):
        assert driver.begun == [], at
        trained(driver, loss=0.5 - 0.02 * at)
        evaluated(driver, log_loss=log_loss)
    assert driver.begun == [("evaluation_falls", "log_loss")]
    text = driver.watch.standing["evaluation_falls", "log_loss"].text
    assert "is 0.5570 after step 500 and was 0.5050 at its best, after step 200; the 3 evaluations since" in text
    trained(driver, loss=0.4)
    evaluated(driver, log_loss=0.49)
    assert driver.standing == []


@pytest.mark.parametrize(
    ("name", "figures", "orders"),
    [
        ("rmse", (1.02, 0.98, 1.0, 1.01, 1.02), {}),
        ("click/ndcg@10", (0.3, 0.35, 0.33, 0.32, 0.31), {}),
        ("hit_rate@5", (0.3, 0.35, 0.33, 0.32, 0.31), {}),
        ("regret", (40.0, 30.0, 32.0, 33.0, 34.0), {"regret": "min"}),
        ("gain", (30.0, 40.0, 38.0, 37.0, 36.0), {"gain": "max"}),
    ],
)
def test_metrics_fall_the_way_that_they_declare_or_that_their_names_say(
    driver: Driver, name: str, figures: tuple[float, ...], orders: dict[str, Any]
) -> None:
    for at, figure in enumerate(figures):
        assert driver.begun == [], at
        trained(driver, loss=0.5 - 0.02 * at)
        made = Evaluation(
            step=driver.step, auc=math.nan, log_loss=math.nan, num_samples=1000, metrics={name: figure, "odd": -figure}
        )
        driver.event(Evaluated(evaluation=made, best_auc=None, baseline=None, orders=orders))
    assert driver.begun == [("evaluation_falls", name)], "nobody knows of the other one"


@pytest.mark.parametrize(
    "log_losses", [(0.505, 0.518, 0.53, 0.5051, 0.52, 0.53), (0.505, 0.506, 0.5055, 0.506, 0.5052)]
)
def test_evaluations_that_come_back_or_stay_are_no_alarm(driver: Driver, log_losses: tuple[float, ...]) -> None:
    for at, log_loss in enumerate(log_losses):
        trained(driver, loss=0.5 - 0.01 * at)
        evaluated(driver, log_loss=log_loss)
    assert driver.begun == []


def test_where_the_training_loss_rises_as_well_it_is_another_alarm(driver: Driver) -> None:
    for at in range(6):
        trained(driver, loss=0.5 + 0.01 * at)
        evaluated(driver, log_loss=0.5 + 0.01 * at)
    assert ("evaluation_falls", "log_loss") not in driver.begun


def test_training_that_is_far_better_than_the_evaluation(driver: Driver) -> None:
    trained(driver, auc=0.71)
    evaluated(driver, auc=0.7)
    trained(driver, auc=0.82)
    evaluated(driver, auc=0.73)
    assert driver.begun == [], "the evaluation still gets better"
    trained(driver, auc=0.9)
    evaluated(driver, auc=0.72)
    assert driver.begun == [("overfits", "")]
    assert "0.9000 in training and 0.7200" in driver.watch.standing["overfits", ""].text
    trained(driver, auc=0.74)
    evaluated(driver, auc=0.73)
    assert driver.standing == []


def test_without_an_auc_the_losses_are_compared_with_how_they_began(driver: Driver) -> None:
    def both(training: float, evaluation: float) -> None:
        driver.windows(10, loss=training)
        evaluated(driver, auc=math.nan, log_loss=evaluation)

    # Sampled negatives: the two are unlike from the start.
    both(0.5, 1.0)
    both(0.45, 0.95)
    assert driver.begun == []
    both(0.3, 0.96)
    assert driver.begun == [("overfits", "")]


def test_an_auc_that_nothing_can_reach(driver: Driver) -> None:
    trained(driver, 50)
    evaluated(driver, auc=0.8125, best=0.8117)
    assert driver.begun == [], "that may be chance"
    trained(driver, 50)
    evaluated(driver, auc=0.83, best=0.8117)
    assert driver.begun == [("auc_above_reachable", "")]


def test_a_second_evaluation_of_the_same_step_counts_once(driver: Driver) -> None:
    trained(driver, loss=0.5)
    evaluated(driver, log_loss=0.5)
    trained(driver, loss=0.4)
    for _ in range(4):
        evaluated(driver, log_loss=0.55)
    assert driver.begun == []


def test_an_evaluation_right_after_the_commit_is_not_forgotten_with_a_fault(driver: Driver) -> None:
    trained(driver, loss=0.5)
    evaluated(driver, log_loss=0.5)
    for at in range(3):
        trained(driver, loss=0.4 - at / 100)
        if at == 2:
            driver.event(Committed(name="c", step=driver.step, size_bytes=1 << 20, seconds=0.5))
        evaluated(driver, log_loss=0.55)
    assert driver.standing == [("evaluation_falls", "log_loss")]
    base = driver.step
    trained(driver, 3)
    driver.event(recovery(base_step=base, generation=2, discarded_steps=30))
    driver.step = base
    assert driver.standing == [("evaluation_falls", "log_loss")]
    driver.windows(3, generation=2)
    counted, lost = without_lost(driver.points)
    assert lost
    watch, _ = replayed(counted)
    assert watch.standing == driver.watch.standing
