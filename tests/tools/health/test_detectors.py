"""A planted fault for each detector, through the measurer; and the same numbers without the fault."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from podembed.orchestrator.events.commits import CommitDelayed, Committed
from podembed.orchestrator.events.health import AlarmBegan
from podembed.tools.health.check import replayed
from podembed.tools.metrics.reading import without_lost
from podembed.workers.job.window_figures import DenseNorms, LabelFigures
from podembed.workers.liveness.progress import Phase
from tests.tools.health.points import Driver
from tests.tools.metrics.windows import recovery

READS = {Phase.READ: 0.5, Phase.DEVICE: 0.2, Phase.POOL: 0.2}
DEVICE = {Phase.READ: 0.0, Phase.DEVICE: 0.93, Phase.POOL: 0.05}


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_input_that_is_waited_for_begins_and_ends_an_alarm(driver: Driver) -> None:
    driver.windows(40)
    assert driver.begun == []
    driver.windows(30, shares=(READS, READS))
    assert driver.begun == [("input_bound", "")]
    (began,) = [one for one in driver.said if isinstance(one, AlarmBegan)]
    assert began.step > 410
    assert "%" in began.finding
    driver.windows(40)
    assert driver.ended == [("input_bound", "")]
    assert driver.standing == []


def test_one_slow_window_is_no_alarm(driver: Driver) -> None:
    driver.windows(40)
    driver.windows(1, seconds=8.0, shares=(READS, READS))
    driver.windows(20)
    assert driver.begun == []


def test_a_device_that_takes_all_the_time_is_a_note(driver: Driver) -> None:
    driver.windows(40, shares=(DEVICE, DEVICE))
    assert driver.begun == [("device_bound", "")]
    (began,) = driver.said
    assert isinstance(began, AlarmBegan)
    assert began.is_note


def test_a_host_that_works_longer_than_the_others_is_named(driver: Driver) -> None:
    slow = {Phase.ID_EXCHANGE: 0.05, Phase.POOL: 0.8}
    fast = {Phase.ID_EXCHANGE: 0.6, Phase.POOL: 0.25}
    driver.windows(40, shares=(fast, slow, fast))
    assert driver.standing == [("slow_host", "host 1")]
    assert "pool" in driver.watch.standing["slow_host", "host 1"].text
    assert driver.begun == [], "the driver has an event of its own for it"
    driver.windows(60, shares=(fast, fast, fast))
    assert driver.standing == []


def commits(driver: Driver, count: int, *, seconds: float, size_bytes: int, delayed_s: float) -> None:
    """Each after four windows."""
    for _ in range(count):
        driver.windows(4)
        if delayed_s:
            driver.clock.now_s += delayed_s
            driver.event(CommitDelayed(step=driver.step, before_step=driver.step - 40, waited_s=delayed_s))
        driver.event(Committed(name="c", step=driver.step, size_bytes=size_bytes, seconds=seconds))


def test_commits_that_hold_training_up(driver: Driver) -> None:
    commits(driver, 10, seconds=1.5, size_bytes=1 << 30, delayed_s=0.1)
    assert driver.begun == []
    commits(driver, 20, seconds=1.5, size_bytes=1 << 30, delayed_s=2.0)
    assert driver.begun == [("frequent_commits", "")]
    commits(driver, 30, seconds=1.5, size_bytes=1 << 30, delayed_s=0.0)
    assert driver.standing == []


def test_a_slow_disk_is_told_from_frequent_commits(driver: Driver) -> None:
    commits(driver, 20, seconds=9.0, size_bytes=20 << 20, delayed_s=3.0)
    assert driver.begun == [("slow_storage", "")]


def test_slow_commits_that_nothing_waits_for_are_no_alarm(driver: Driver) -> None:
    commits(driver, 20, seconds=9.0, size_bytes=20 << 20, delayed_s=0.0)
    assert driver.begun == []


def test_memory_that_grows_and_does_not_stop(driver: Driver) -> None:
    for at in range(500):
        driver.windows(1, memory_bytes=(1 << 30) + at * (2 << 20))
    assert ("memory_grows", "host 0") in driver.begun


@pytest.mark.parametrize("shape", ["constant", "saturates", "saw", "one jump"])
def test_memory_that_fills_up_is_no_alarm(driver: Driver, shape: str) -> None:
    noise = random.Random(3)
    for at in range(900):
        added = {
            "constant": 0.0,
            "saturates": 1.0 - math.exp(-at / 100),
            "saw": (at % 120) / 120,
            "one jump": float(at > 400),
        }[shape]
        driver.windows(1, memory_bytes=(1 << 30) + int((added + 0.02 * noise.random()) * (1 << 30)))
    assert driver.begun == []


def losses(driver: Driver, *, start: float, end: float, windows: int, noise: float = 0.02, seed: int = 1) -> None:
    chance = random.Random(seed)
    for at in range(windows):
        mean = end + (start - end) * math.exp(-at / 5)
        driver.windows(1, loss=mean * (1 + noise * chance.gauss(0, 1)))


def test_a_loss_that_does_not_fall(driver: Driver) -> None:
    losses(driver, start=0.693, end=0.693, windows=60, noise=0.002)
    assert driver.begun == [("loss_not_falling", "")]


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_is_no_alarm(driver: Driver, seed: int) -> None:
    losses(driver, start=0.693, end=0.62, windows=200, seed=seed)
    assert driver.begun == []


def test_a_run_that_goes_on_may_have_learned_before(driver: Driver) -> None:
    driver.step = 5000
    losses(driver, start=0.45, end=0.45, windows=100)
    assert driver.begun == []


def test_a_loss_that_rises(driver: Driver) -> None:
    losses(driver, start=0.69, end=0.45, windows=60)
    losses(driver, start=0.45, end=0.7, windows=30)
    assert driver.begun == [("loss_rises", "")]
    losses(driver, start=0.7, end=0.45, windows=60)
    assert driver.ended == [("loss_rises", "")]


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_of_a_few_samples_jumps_and_that_is_no_rise(driver: Driver, seed: int) -> None:
    random_of = random.Random(seed)
    # As a model learns its samples by heart, fewer and fewer of them make the loss.
    for at in range(1200):
        spread = 0.6 * min(1.0, at / 200)
        driver.windows(1, loss=max(1e-4, 0.69 * math.exp(-at / 50)) * random_of.lognormvariate(0.0, spread))
    assert driver.begun == []
    losses(driver, start=1e-2, end=0.3, windows=30)
    assert driver.begun == [("loss_rises", "")]


def test_a_learning_rate_that_is_far_too_high_shows_at_once(driver: Driver) -> None:
    driver.windows(1, steps=1, loss=0.69)
    losses(driver, start=5.0, end=3.0, windows=20)
    assert ("loss_rises", "") in driver.begun


def test_what_a_fault_takes_back_is_undone_and_a_reader_says_the_same(driver: Driver) -> None:
    driver.windows(40)
    driver.event(Committed(name="c", step=driver.step, size_bytes=1 << 20, seconds=0.5))
    at = driver.step
    driver.windows(20, shares=(READS, READS), loss=0.9)
    assert ("input_bound", "") in driver.standing
    driver.event(recovery(base_step=at, generation=2, discarded_steps=driver.step - at))
    driver.step = at
    assert driver.standing == []
    driver.windows(20, generation=2, loss=0.9)
    assert ("loss_rises", "") in driver.standing
    driver.windows(20, generation=2, shares=(READS, READS), loss=0.5)
    counted, lost = without_lost(driver.points)
    assert lost
    watch, _ = replayed(counted)
    assert watch.standing == driver.watch.standing
    assert watch.began_step == driver.watch.began_step


def scores(driver: Driver, *, calibration: float, windows: int, positives: float = 300.0) -> None:
    for _ in range(windows):
        figures = LabelFigures(
            label="click",
            weight=3 * positives,
            positives=positives,
            predicted=calibration * positives,
            auc=0.7,
            auc_error=0.001,
            normalized_entropy=0.9,
            calibration=calibration,
        )
        driver.windows(1, figures=(figures,))


def test_scores_that_predict_other_shares_than_come(driver: Driver) -> None:
    scores(driver, calibration=1.02, windows=40)
    assert driver.begun == []
    scores(driver, calibration=1.3, windows=30)
    assert driver.begun == [("calibration_off", "click")]
    assert "1.30 times" in driver.watch.standing["calibration_off", "click"].text
    scores(driver, calibration=1.0, windows=20)
    assert driver.standing == []


@pytest.mark.parametrize("positives", [300.0, 3.0])
def test_calibration_that_gets_better_or_is_not_known_is_no_alarm(driver: Driver, positives: float) -> None:
    for at in range(60):
        better = math.exp(-at / 10) if positives > 100 else random.Random(at).random() - 0.5
        scores(driver, calibration=1 + better, windows=1, positives=positives)
    assert driver.begun == []


def test_updates_that_are_too_large(driver: Driver) -> None:
    norms = DenseNorms(gradient=1.0, update=0.3, params=10.0, largest_gradient=1.0)
    driver.windows(60, norms=norms)
    assert driver.begun == []
    driver.windows(60, norms=replace(norms, update=2.0))
    assert driver.begun == [("learning_rate_too_high", "")]
    assert "20%" in driver.watch.standing["learning_rate_too_high", ""].text
    driver.windows(60, norms=norms)
    assert driver.standing == []
