"""When to commit: each policy as a table of moments, and the object that keeps the moments."""

from __future__ import annotations

import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.keep_policies import CommitMetrics
from podembed.orchestrator.api.save_policies import (
    AfterEvaluation,
    EverySeconds,
    EverySteps,
    Moment,
    OnBest,
    Order,
    SavePolicy,
    declared_orders,
    is_better,
    is_due,
    next_known,
    order_of,
)
from podembed.orchestrator.decisions.failure import StepSchedule
from podembed.orchestrator.driver.saves import Saves
from podembed.serving.figures.of_groups import MRR, GroupedAUC, HitRateAt, NDCGAt
from podembed.serving.figures.of_samples import MAE, RMSE, Accuracy, Calibration, NormalizedEntropy
from podembed.workers.job.ranking import LogLoss, Metric, RecallAt


@pytest.mark.parametrize(
    ("policy", "now", "expected"),
    [
        (EverySteps(10), Moment(step=0, saved_step=0), 10),
        (EverySteps(10), Moment(step=9, saved_step=0), 10),
        (EverySteps(10), Moment(step=10, saved_step=0), 10),
        (EverySteps(10), Moment(step=10, saved_step=10), 20),
        (EverySteps(10), Moment(step=17, saved_step=13), 20),
        (EverySteps(1), Moment(step=5, saved_step=4), 5),
        (EverySteps(10, 5.0), Moment(step=20, saved_step=10, since_save_s=9.0, since_done_s=4.9), 30),
        (EverySteps(10, 5.0), Moment(step=20, saved_step=10, since_save_s=9.0, since_done_s=5.0), 20),
        (EverySteps(10, 5.0), Moment(step=25, saved_step=10, since_save_s=9.0, since_done_s=5.0), 30),
        (EverySeconds(60), Moment(step=7, saved_step=3, since_save_s=59.9), None),
        (EverySeconds(60), Moment(step=7, saved_step=3, since_save_s=60), 7),
        (EverySeconds(60), Moment(step=3, saved_step=3, since_save_s=900), None),
        (AfterEvaluation(), Moment(step=7, saved_step=3), None),
        (AfterEvaluation(), Moment(step=7, saved_step=3, metrics={"auc": 0.1}), 7),
        (OnBest("auc"), Moment(step=7, saved_step=3), None),
        (OnBest("auc"), Moment(step=7, saved_step=3, metrics={"auc": 0.5}), 7),
        (OnBest("auc"), Moment(step=7, saved_step=3, metrics={"auc": 0.5}, best={"auc": 0.5}), None),
        (OnBest("auc"), Moment(step=7, saved_step=3, metrics={"auc": 0.6}, best={"auc": 0.5}), 7),
        (OnBest("auc"), Moment(step=7, saved_step=3, metrics={"log_loss": 0.1}, best={"auc": 0.5}), None),
        (OnBest("log_loss"), Moment(step=7, saved_step=3, metrics={"log_loss": 0.6}, best={"log_loss": 0.5}), None),
        (OnBest("log_loss"), Moment(step=7, saved_step=3, metrics={"log_loss": 0.4}, best={"log_loss": 0.5}), 7),
        (OnBest("mae", "min"), Moment(step=7, saved_step=3, metrics={"mae": 0.4}, best={"mae": 0.5}), 7),
        (OnBest("mae", "min"), Moment(step=7, saved_step=3, metrics={"mae": 0.6}, best={"mae": 0.5}), None),
    ],
)
def test_the_next_commit_of_a_policy(policy: SavePolicy, now: Moment, expected: int | None) -> None:
    assert policy.next_save(now) == expected


def test_any_policy_may_ask_and_the_nearest_known_step_counts() -> None:
    policies = [EverySteps(10), EverySteps(4), EverySeconds(5)]
    now = Moment(step=6, saved_step=4, since_save_s=1)
    assert (is_due(policies, now), next_known(policies, now)) == (False, 8)
    now = Moment(step=6, saved_step=4, since_save_s=6)
    assert (is_due(policies, now), next_known(policies, now)) == (True, 8)
    assert next_known([EverySeconds(5), OnBest("auc")], now) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CheckpointConfig(), (AfterEvaluation(),)),
        (CheckpointConfig(every_steps=5), (EverySteps(5),)),
        (CheckpointConfig(every_seconds=2.5), (EverySeconds(2.5),)),
        (CheckpointConfig(every_steps=5, seconds_apart=2), (EverySteps(5, 2),)),
        (CheckpointConfig(every_steps=5, every_seconds=9), (EverySteps(5), EverySeconds(9))),
        (CheckpointConfig(every_steps=5, on_best=True, metric="log_loss"), (EverySteps(5), OnBest("log_loss"))),
    ],
)
def test_the_policies_of_a_configuration(config: CheckpointConfig, expected: tuple[SavePolicy, ...]) -> None:
    assert config.save_policies == expected


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def saves(config: CheckpointConfig, clock: Clock) -> Saves:
    schedule = StepSchedule(total_steps=100, save_policies=config.save_policies, eval_every=None)
    return Saves(schedule, monotonic=clock)


def test_seconds_count_from_the_last_commit_whatever_asked_for_it() -> None:
    clock = Clock()
    clock.now_s = 1_000.0
    run = saves(CheckpointConfig(every_steps=10, every_seconds=60), clock)
    run.begin(0, ())
    clock.now_s += 59
    assert not run.take(3, {})
    clock.now_s += 1
    assert run.take(4, {})
    clock.now_s += 30
    assert run.take(10, {})
    clock.now_s += 59
    assert not run.take(19, {})
    clock.now_s += 1
    run.begin(10, ())
    assert not run.take(11, {}), "a new generation has just restored what is committed"


def test_commits_that_would_wait_for_the_one_before_are_left_out() -> None:
    clock = Clock()
    clock.now_s = 1_000.0
    run = saves(CheckpointConfig(every_steps=10, seconds_apart=5.0), clock)
    run.begin(0, ())
    clock.now_s += 4
    assert not run.take(10, {})
    assert run.next_boundary(10) == 20
    clock.now_s += 1
    assert run.take(20, {})
    clock.now_s += 9
    assert not run.take(30, {}), "the one before is still written"
    run.done()
    clock.now_s += 4
    assert not run.take(40, {})
    clock.now_s += 1
    assert run.take(50, {})
    run.failed(50)
    clock.now_s += 5
    assert run.take(60, {})
    assert run.take(100, {}), "the last step is committed in any case"


def test_a_new_best_must_beat_the_commits_of_earlier_drivers() -> None:
    run = saves(CheckpointConfig(on_best=True), Clock())
    earlier = [
        CommitMetrics(name="s000000020-g00000001", step=20, metrics={"auc": 0.7}),
        CommitMetrics(name="s000000010-g00000001", step=10, metrics={"auc": 0.8}),
        CommitMetrics(name="s000000005-g00000001", step=5, metrics={}),
    ]
    run.begin(20, earlier)
    assert not run.take(30, {"auc": 0.75})
    assert run.take(40, {"auc": 0.81})
    assert not run.take(50, {"auc": 0.81})
    run.begin(20, earlier)
    assert run.take(40, {"auc": 0.805}), "what was lost with a generation is no longer the best"


def test_a_new_best_of_an_error_is_a_lower_one() -> None:
    run = saves(CheckpointConfig(on_best=True, metric="mae", metric_order="min"), Clock())
    run.begin(0, [CommitMetrics(name="s000000001-g00000001", step=1, metrics={"mae": 0.5})])
    assert not run.take(10, {"mae": 0.6})
    assert run.take(20, {"mae": 0.4})
    assert not run.take(30, {"mae": 0.45})


@pytest.mark.parametrize(
    ("order", "metrics"),
    [
        ("max", (GroupedAUC(), HitRateAt(10), NDCGAt(5, task="buy"), MRR(), RecallAt(10, group_by="user"), Accuracy())),
        ("min", (RMSE(), MAE(task="rating"), NormalizedEntropy(), LogLoss())),
        (None, (Calibration(),)),
    ],
)
def test_the_order_of_a_metric_is_known_by_its_name_and_declared_alike(
    order: Order | None, metrics: tuple[Metric, ...]
) -> None:
    assert {order_of(metric.name) for metric in metrics} == {order}
    assert set(declared_orders(metrics).values()) <= {order}
    assert order_of(metrics[0].name, {metrics[0].name: "min"}) == "min"
    better, worse = (1.0, 2.0) if order == "min" else (2.0, 1.0)
    assert all(is_better(metric.name, better, worse) for metric in metrics)


def test_the_last_step_is_committed_whatever_the_policies_say() -> None:
    run = saves(CheckpointConfig(on_best=True), Clock())
    run.begin(0, ())
    assert run.next_boundary(0) == 100
    assert not run.take(99, {})
    assert run.take(100, {})


def test_steps_before_a_possible_commit_are_told_from_their_number_alone() -> None:
    """With staleness no lookup crosses such a step, so an uninterrupted run and a resumed one must agree on them."""
    by_steps = saves(CheckpointConfig(every_steps=10), Clock())
    schedule = StepSchedule(total_steps=100, save_policies=CheckpointConfig(on_best=True).save_policies, eval_every=25)
    on_best = Saves(schedule, monotonic=Clock())
    for begun_at in (0, 7, 20):
        by_steps.begin(begun_at, ())
        assert [step for step in range(begun_at + 1, 101) if by_steps.may_follow(step)] == [
            step for step in range(10, 101, 10) if step > begun_at
        ]
        on_best.begin(begun_at, ())
        assert [step for step in range(begun_at + 1, 101) if on_best.may_follow(step)] == [25, 50, 75, 100]


def test_a_commit_that_failed_is_not_the_best_to_beat() -> None:
    run = saves(CheckpointConfig(on_best=True), Clock())
    run.begin(0, [CommitMetrics(name="s000000001-g00000001", step=1, metrics={"auc": 0.5})])
    assert run.take(10, {"auc": 0.7})
    assert not run.take(20, {"auc": 0.6})
    run.failed(10)
    assert not run.take(30, {"auc": 0.5})
    assert run.take(40, {"auc": 0.6})
