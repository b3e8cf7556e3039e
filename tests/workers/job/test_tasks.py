"""Tasks: their losses against optax and scipy-like references, their figures, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.policy_checks import with_metric
from podembed.orchestrator.driver.evaluations import evaluation_of
from podembed.serving.figures.of_groups import HitRateAt
from podembed.serving.figures.of_samples import MAE, RMSE, Accuracy
from podembed.workers.data.columns import Label
from podembed.workers.data.config import ParquetData
from podembed.workers.device.dense_half import DenseStateError
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.host.spec import ScoredSamples
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.quality import area_under_curve
from podembed.workers.job.tasks import Task, total_losses
from tests.small_job import small_job

TASKS = (
    Task("click"),
    Task("rating", "regression", weight=0.5),
    Task("genre", "multi_class", num_classes=3),
    Task("stars", "ordinal", num_classes=4, weight=2.0),
)
WIDTH = 1 + 1 + 3 + 3
NUM_ROWS = 40


class Model:
    """A line for each score."""

    def __init__(self, changed: Any = None) -> None:
        self.changed = changed

    def init(self, key: jax.Array, spec: Any) -> Any:
        return {"w": jax.random.normal(key, (spec.num_dense, WIDTH))}

    def apply(self, params: Any, batch: Any, context: Any) -> Any:
        click, rating, genre, stars = jnp.split(batch.dense @ params["w"], [1, 2, 5], axis=1)
        found = {"click": click[:, 0], "rating": rating[:, 0], "genre": genre, "stars": stars}
        return found if self.changed is None else self.changed(found)


def job_of(small_data: str, **changed: Any) -> JobConfig:
    """Of labels that are not in the files; nothing is read."""
    job = small_job(folder=small_data, audit=False)
    labels = ("click", "rating", "genre", Label("stars", missing="mask"))
    data = replace(job.data, label="", labels=labels)
    return replace(job, **{"model": Model(), "data": data, "tasks": TASKS} | changed)


def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    scores = random.normal(0, 2, (NUM_ROWS, WIDTH)).astype(np.float32)
    columns = [random.integers(0, 2, NUM_ROWS), random.normal(size=NUM_ROWS), random.integers(0, 3, NUM_ROWS)]
    stars = np.where(random.random(NUM_ROWS) < 0.5, np.nan, random.integers(0, 4, NUM_ROWS))
    return scores, np.stack([*columns, stars], axis=1).astype(np.float32)


def expected_losses(scores: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """By optax, and for ordinal labels threshold by threshold."""
    stars = np.nan_to_num(labels[:, 3])
    above = sum(
        np.asarray(optax.sigmoid_binary_cross_entropy(scores[:, 5 + k], (stars > k).astype(np.float32)))
        for k in range(3)
    )
    return [
        np.asarray(optax.sigmoid_binary_cross_entropy(scores[:, 0], labels[:, 0])),
        np.asarray(optax.squared_error(scores[:, 1], labels[:, 1])),
        np.asarray(optax.softmax_cross_entropy_with_integer_labels(scores[:, 2:5], labels[:, 2].astype(np.int32))),
        np.where(np.isnan(labels[:, 3]), 0, above),
    ]


def test_losses_of_kinds_are_those_of_optax_in_steps_and_in_evaluations() -> None:
    scores, labels = rows()
    expected = expected_losses(scores, labels)
    parts = np.split(scores, [1, 2, 5], axis=1)
    for task, part, of_task, column in zip(TASKS, parts, expected, labels.T, strict=True):
        part = part if task.inner else part[:, 0]
        found = task.losses(jnp.asarray(part), jnp.nan_to_num(column), jnp)
        np.testing.assert_allclose(np.where(np.isnan(column), 0, found), of_task, rtol=2e-5, atol=1e-6)
    total = sum(task.weight * of_task for task, of_task in zip(TASKS, expected, strict=True))
    np.testing.assert_allclose(total_losses(TASKS)(scores, labels), total, rtol=2e-5)


def absolute(scores: Any, labels: Any) -> Any:
    return jnp.abs(scores - labels)


def test_a_loss_of_the_user_takes_the_place_of_that_of_the_kind() -> None:
    scores, labels = rows()
    found = total_losses((Task("rating", loss=absolute),))(scores[:, 1:2], labels[:, 1:2])
    np.testing.assert_allclose(found, np.abs(scores[:, 1] - labels[:, 1]), rtol=1e-6)
    assert (Task("rating", loss=absolute).label_classes, Task("rating").label_classes) == (None, 2)


def scored(labels: np.ndarray, scores: np.ndarray) -> list[ScoredSamples]:
    """Of two hosts, with weights."""
    weights = np.linspace(1, 2, NUM_ROWS).astype(np.float32)
    losses = total_losses(TASKS)(scores, labels)
    cuts = slice(0, 15), slice(15, None)
    return [
        ScoredSamples(scores=scores[cut], labels=labels[cut], weights=weights[cut], losses=losses[cut]) for cut in cuts
    ]


def test_each_task_has_its_figures(small_data: str) -> None:
    metrics = (RMSE(task="rating"), Accuracy(task="click"), Accuracy(task="genre"), MAE(task="stars"))
    job = job_of(small_data, metrics=metrics)
    scores, labels = rows()
    found = evaluation_of(job, scored(labels, scores), step=3)
    weights = np.linspace(1, 2, NUM_ROWS)
    has_stars = ~np.isnan(labels[:, 3])
    stars = (1 / (1 + np.exp(-scores[:, 5:].astype(np.float64)))).sum(axis=1)
    losses = expected_losses(scores, labels)
    expected = {
        "click/auc": area_under_curve(scores[:, 0], labels[:, 0], weights),
        "click/log_loss": np.average(losses[0], weights=weights),
        "click/accuracy": np.average((scores[:, 0] > 0) == labels[:, 0], weights=weights),
        "rating/loss": np.average(losses[1], weights=weights),
        "rating/rmse": np.sqrt(np.average(losses[1], weights=weights)),
        "genre/loss": np.average(losses[2], weights=weights),
        "genre/accuracy": np.average(scores[:, 2:5].argmax(axis=1) == labels[:, 2], weights=weights),
        "stars/loss": np.average(losses[3][has_stars], weights=weights[has_stars]),
        "stars/mae": np.average(np.abs(stars - labels[:, 3])[has_stars], weights=weights[has_stars]),
        "loss": np.average(losses[0] + 0.5 * losses[1] + losses[2] + 2 * losses[3], weights=weights),
    }
    assert found.values == pytest.approx(expected, rel=1e-5)
    assert set(found.values) == {
        *(name for task in TASKS for name in task.figure_names),
        *(metric.name for metric in metrics),
        "loss",
    }


def test_a_task_without_labelled_samples_has_no_figure_and_no_loss(small_data: str) -> None:
    scores, labels = rows()
    labels[:, 3] = np.nan
    labels[:, 0] = 1
    found = evaluation_of(job_of(small_data, metrics=(MAE(task="stars"),)), scored(labels, scores), step=3)
    assert set(found.values) == {"click/log_loss", "rating/loss", "genre/loss", "loss"}


def test_the_best_commit_may_hang_on_a_figure_of_a_task(small_data: str) -> None:
    job = job_of(small_data, metrics=(RMSE(task="rating"),))
    assert with_metric(job, CheckpointConfig(keep_best=1)).metric == "loss"
    assert with_metric(job, CheckpointConfig(keep_best=1, metric="click/auc")).metric_order is None
    assert with_metric(job, CheckpointConfig(keep_best=1, metric="rating/rmse")).metric_order == "min"
    with pytest.raises(ConfigurationError, match=r"metric='auc'.*have: click/auc, click/log_loss, rating/loss, .*loss"):
        with_metric(job, CheckpointConfig(keep_best=1, metric="auc"))


def test_labels_are_those_that_tasks_take(small_data: str) -> None:
    found = {label.name: (label.num_classes, label.missing) for label in job_of(small_data).resolved_data.label_columns}
    assert found == {
        "click": (2, "refuse"),
        "rating": (None, "refuse"),
        "genre": (3, "refuse"),
        "stars": (4, "mask"),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": (Task("click"), Task("buy"))}, r"tasks \['click', 'buy'\] in a job whose data has the labels"),
        ({"tasks": (Task("click"), Task("click"))}, "Expected each task once"),
        ({"tasks": ("click",)}, r"tasks=\('click',\). Expected a tuple of Task"),
        ({"tasks": (Task("click"),), "loss": optax.squared_error}, r"beside loss .* Write Task\(\.\.\., loss=\.\.\.\)"),
        ({"tasks": ()}, r"labels \['click', 'rating', 'genre', 'stars'\] and a loss of one label. Expected tasks"),
        ({"metrics": (RMSE(),)}, r"metric rmse of no task. .*task='click'"),
        ({"metrics": (RMSE(task="buy"),)}, r"metric buy/rmse of no task"),
        ({"metrics": (HitRateAt(3, group_by="a"),)}, r"metric hit_rate@3 of no task"),
        (
            {"tasks": (), "data": ParquetData("a", label="y"), "metrics": (RMSE(task="y"),)},
            "metric y/rmse of a task in a job without tasks",
        ),
    ],
)
def test_a_job_whose_tasks_do_not_fit_is_refused(small_data: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job_of(small_data, **changed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task("a", "classes"), "kind='classes' of task 'a'"),  # type: ignore[arg-type]
        (lambda: Task("a", "multi_class"), "num_classes=0 of task 'a' of kind 'multi_class'. Expected at least 2"),
        (lambda: Task("a", num_classes=3), "num_classes=3 of task 'a' of kind 'binary'"),
        (lambda: Task("a", loss="mse"), "loss='mse' of task 'a'"),  # type: ignore[arg-type]
        (lambda: Task("a", weight=-1.0), "weight=-1.0 of task 'a'"),
    ],
)
def test_a_task_that_cannot_be_meant_is_refused(make: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        make()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda found: found["click"],
            r"returning shape \[8\] for 8 samples. Expected a mapping of the tasks \['click', 'rating'",
        ),
        (
            lambda found: {"click": found["click"]},
            r"returning \['click'\] for 8 samples. Expected a mapping of the tasks",
        ),
        (
            lambda found: {"scores": {**found, "click": found["click"][:, None]}},
            r"shape \[8, 1\] for task 'click' of kind 'binary'. Expected \[8\]. Drop the last axis",
        ),
        (
            lambda found: {**found, "genre": found["stars"][:, :2]},
            r"shape \[8, 2\] for task 'genre' of kind 'multi_class'. Expected \[8, 3\]",
        ),
        (
            lambda found: {**found, "click": "text"},
            r"returning the text 'text' for task 'click' of kind 'binary'. Expected \[8\]. Return as many scores",
        ),
    ],
)
def test_scores_that_do_not_fit_are_refused_before_the_first_step(small_data: str, changed: Any, message: str) -> None:
    with pytest.raises(DenseStateError, match=message):
        DeviceWorker(job=job_of(small_data, model=Model(changed)), num_samples=8).build()


def test_a_loss_of_a_wrong_shape_is_refused_by_the_name_of_its_task(small_data: str) -> None:
    tasks = (*TASKS[1:], Task("click", loss=lambda scores, labels: jnp.mean(scores - labels)))
    with pytest.raises(DenseStateError, match=r"the loss of task 'click' returning shape \[\] for 8 samples"):
        DeviceWorker(job=job_of(small_data, tasks=tasks), num_samples=8).build()
