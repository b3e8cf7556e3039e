"""What an evaluation reports: AUC and log loss where they have a meaning, the job's loss always; and what the best
commit hangs on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet as pq
import pytest

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError, RunConfig
from podembed.orchestrator.api.policy_checks import with_metric
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.driver.evaluations import evaluation_of, require_metric
from podembed.orchestrator.run.policy_record import read_policies
from podembed.serving.figures.of_groups import GroupedAUC, HitRateAt
from podembed.serving.figures.of_samples import NormalizedEntropy
from podembed.workers.control.stopping import EarlyStopping
from podembed.workers.data.files import locate
from podembed.workers.host.spec import ScoredSamples
from podembed.workers.host.windows import sample_losses
from podembed.workers.job.job import JobConfig
from podembed.workers.job.job_errors import JobError
from podembed.workers.job.quality import QualityError, Scores
from podembed.workers.job.ranking import Baseline, LogLoss
from podembed.workers.storage.store import Store
from tests.small_job import small_job
from tests.training import fit_job


def squared(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.square(scores - labels)


@dataclass(frozen=True)
class MeanError:
    """A metric of which less is better, though its name does not say so."""

    lower_is_better: bool = True
    name: str = "mae"
    group_by: None = None

    def of(self, scores: Scores) -> float:
        return float(np.abs(scores.logits - scores.labels).mean())


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data, audit=False, evaluate=True)


def scored(job: JobConfig, scores: list[float], labels: list[float]) -> list[ScoredSamples]:
    """Two hosts' parts."""
    columns = [np.array(column, np.float32) for column in (scores, labels, [1] * len(scores))]
    columns.append(sample_losses(job.loss)(columns[0], columns[1]))
    parts = [[column[cut] for column in columns] for cut in (slice(0, 2), slice(2, None))]
    return [ScoredSamples(scores=s, labels=y, weights=w, losses=x) for s, y, w, x in parts]


def test_the_default_loss_has_all_three_figures(job: JobConfig) -> None:
    found = evaluation_of(job, scored(job, [2.0, -1.0, 0.5], [1, 0, 1]), step=7)
    assert found.auc == 1.0
    assert found.log_loss == pytest.approx(np.log1p(np.exp([-2.0, -1.0, -0.5])).mean())
    assert found.loss == pytest.approx(found.log_loss)
    assert list(found.losses) == ["log loss"]
    assert list(found.values) == ["auc", "log_loss", "loss"]


@pytest.mark.parametrize(("labels", "has_auc"), [([1, 5, 3], False), ([1, 0, 1], True), ([1, 1, 1], False)])
def test_another_loss_is_reported_with_what_else_has_a_meaning(
    job: JobConfig, labels: list[float], has_auc: bool
) -> None:
    job = replace(job, loss=squared)
    found = evaluation_of(job, scored(job, [2.0, -1.0, 0.5], labels), step=7)
    assert found.loss == pytest.approx(np.square(np.subtract([2.0, -1.0, 0.5], labels)).mean())
    assert math.isnan(found.auc) != has_auc
    assert math.isnan(found.log_loss), "scores need not be logits"
    assert found.comparable == {**({"auc": found.auc} if has_auc else {}), "loss": found.loss}


def test_one_label_alone_has_a_log_loss_and_no_area(job: JobConfig) -> None:
    found = evaluation_of(job, scored(job, [2.0, -1.0, 0.5], [1, 1, 1]), step=7)
    assert math.isnan(found.auc)
    assert found.log_loss == pytest.approx(np.log1p(np.exp([-2.0, 1.0, -0.5])).mean())


def test_a_score_that_is_no_number_is_refused_with_every_loss(job: JobConfig) -> None:
    with pytest.raises(QualityError, match="1 NaN among 3"):
        evaluation_of(job, scored(job, [2.0, math.nan, 0.5], [1, 0, 1]), step=7)


class Own:
    """A metric of the job whose `of` is any function."""

    group_by = None

    def __init__(self, name: str, made: Callable[[], Any]) -> None:
        self.name, self._made = name, made

    def of(self, scores: Scores) -> Any:
        return self._made()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raising(error: Exception) -> Callable[[], Any]:
    def made() -> Any:
        raise error

    return made


def test_numbers_of_own_metrics_are_those_of_python(job: JobConfig) -> None:
    made = [jnp.float32(0.5), np.float32(0.5), np.array(0.5), np.int64(2), 2, True]
    job = replace(job, metrics=tuple(Own(f"m{at}", lambda value=value: value) for at, value in enumerate(made)))
    found = evaluation_of(job, scored(job, [2.0, -1.0, 0.5], [1, 0, 1]), step=7)
    assert list(found.metrics.values()) == [0.5, 0.5, 0.5, 2, 2, 1]
    assert {type(value) for value in found.metrics.values()} == {float}
    assert json.loads(json.dumps(dict(found.metrics)))["m0"] == 0.5


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: None, "Found None, which its `of` returned"),
        (lambda: "0.5", "Found '0.5', which"),
        (lambda: np.ones(1), r"an array of shape \[1\]"),
        (lambda: jnp.ones(2), r"an array of shape \[2\]"),
        (lambda: 1j, "Found 1j"),
        (lambda: 10**400, "too large for a float"),
        (
            raising(ZeroDivisionError("by zero")),
            r"ZeroDivisionError: by zero, raised in line \d+ of .*test_evaluations",
        ),
        (raising(Unspeakable()), "Unspeakable: no message, since its __str__ raised RuntimeError"),
    ],
)
def test_what_is_no_number_costs_that_figure_alone(job: JobConfig, made: Callable[[], Any], said: str) -> None:
    job = replace(job, metrics=(Own("mine", made), Own("other", lambda: 1.0)))
    found = evaluation_of(job, scored(job, [2.0, -1.0, 0.5], [1, 0, 1]), step=7)
    assert found.metrics == {"other": 1.0}
    assert re.search(said, found.missing["mine"])
    assert ". No mine: Found" in found.reasons


@pytest.mark.parametrize("name", ["auc", "AUC", "loss", "log_loss"])
def test_a_metric_that_would_replace_a_figure_is_refused(job: JobConfig, name: str) -> None:
    with pytest.raises(JobError, match=f"Found a metric '{name}' of type Own.* Call it 'own_{name}'"):
        replace(job, metrics=(Own(name, lambda: 1.0),))
    # Of a loss that takes scores for something else there is no log loss.
    if name == "log_loss":
        assert replace(job, loss=squared, metrics=(Own(name, lambda: 1.0),)).metrics


def test_figures_of_a_baseline_are_numbers() -> None:
    figure = Baseline(name="rule", figures={"AUC": jnp.float32(0.5)}).figures["AUC"]
    assert (figure, type(figure)) == (0.5, float)
    with pytest.raises(JobError, match=r"figures\['AUC'\]='high' of Baseline 'rule'"):
        Baseline(name="rule", figures={"AUC": "high"})  # type: ignore[dict-item]


def test_losses_of_logits_keep_their_log_loss(job: JobConfig) -> None:
    job = replace(job, loss=optax.sigmoid_binary_cross_entropy)
    found = evaluation_of(job, scored(job, [2.0, -1.0, 0.5], [1, 0, 1]), step=7)
    assert list(found.values) == ["auc", "log_loss", "loss"]
    own = replace(job, loss=squared, metrics=(LogLoss(),))
    assert evaluation_of(own, scored(own, [2.0, -1.0, 0.5], [1, 0, 1]), step=7).values["log_loss"] == found.log_loss


@pytest.mark.parametrize(
    ("loss", "metric", "expected"),
    [
        (None, None, ("auc", None)),
        (squared, None, ("loss", None)),
        (squared, "auc", ("auc", None)),
        (squared, "mae", ("mae", "min")),
        (None, "log_loss", ("log_loss", None)),
    ],
)
def test_the_metric_of_the_best_commit(job: JobConfig, loss: object, metric: str | None, expected: object) -> None:
    job = replace(job, loss=loss, metrics=(MeanError(),))
    config = with_metric(job, CheckpointConfig(keep_best=1, metric=metric))
    assert (config.metric, config.metric_order) == expected
    asked = with_metric(job, CheckpointConfig(keep_best=1, metric=metric, metric_order="max"))
    assert asked.metric_order == "max"


def test_a_metric_that_no_evaluation_has_is_refused_with_those_that_are_there(job: JobConfig, tmp_path: Path) -> None:
    job = replace(job, loss=squared, metrics=(MeanError(),))
    for metric in ("rmse", "log_loss"):
        config = CheckpointConfig(on_best=True, metric=metric)
        with pytest.raises(ConfigurationError, match=f"metric='{metric}'.*auc, loss, mae"):
            Trainer(job, run_config=RunConfig(storage_path=str(tmp_path), checkpoint_config=config)).fit()
        assert with_metric(job, replace(config, on_best=False)), "nothing hangs on it"
    assert not list(tmp_path.iterdir())


def test_best_commits_by_an_area_that_is_not_there_end_the_run_with_the_others(job: JobConfig) -> None:
    job = replace(job, loss=squared)
    found = evaluation_of(job, scored(job, [2.0, -1.0, 0.5], [1, 5, 3]), step=7)
    with pytest.raises(ConfigurationError, match=r"no auc in the evaluation after step 7.*Expected one of loss\."):
        require_metric(job, CheckpointConfig(keep_best=1, metric="auc"), found)
    require_metric(job, CheckpointConfig(keep_best=1), found)
    require_metric(job, CheckpointConfig(), found)


def test_a_figure_without_a_meaning_is_missing_with_the_reason(job: JobConfig) -> None:
    grouped = replace(
        job, metrics=(GroupedAUC(group_by="a"), HitRateAt(1, group_by="a"), NormalizedEntropy(), MeanError())
    )
    parts = scored(grouped, [2.0, -1.0, 0.5], [1, 0, 1])
    parts = [replace(part, groups={"a": np.arange(len(part.scores)) + 10 * at}) for at, part in enumerate(parts)]
    found = evaluation_of(grouped, parts, step=7)
    assert list(found.missing) == ["gauc"]
    assert "no group with samples of both labels" in found.missing["gauc"]
    assert list(found.values) == ["auc", "log_loss", "loss", "hit_rate@1", "normalized_entropy", "mae"]
    with pytest.raises(ConfigurationError, match=r"no gauc in.*which commits are best. Found no group with samples"):
        require_metric(grouped, CheckpointConfig(keep_best=1, metric="gauc"), found)
    require_metric(grouped, CheckpointConfig(keep_best=1, metric="hit_rate@1"), found)
    stops = replace(grouped, early_stopping=EarlyStopping(patience=2, metric="gauc"))
    with pytest.raises(ConfigurationError, match=r"no gauc in.*when training ends. Found no group with samples"):
        require_metric(stops, CheckpointConfig(), found)
    require_metric(replace(stops, early_stopping=EarlyStopping(patience=2)), CheckpointConfig(), found)
    nobody = [replace(part, weights=np.zeros_like(part.weights)) for part in parts]
    assert {*evaluation_of(grouped, nobody, step=7).missing} >= {"loss", "log_loss", "gauc", "hit_rate@1"}
    parts[0].scores[0] = np.nan
    with pytest.raises(QualityError, match="NaN"):
        evaluation_of(replace(grouped, loss=squared), parts, step=7)


def train(job: JobConfig, folder: Path, config: CheckpointConfig) -> Result:
    return fit_job(job, folder.parent, name=folder.name, max_steps=15, eval_every_steps=3, checkpoint_config=config)


def test_a_run_with_other_labels_keeps_its_best_commits_by_the_loss(job: JobConfig, tmp_path: Path) -> None:
    job = replace(job, data=replace(job.data, label="x"), loss=squared, metrics=(MeanError(),))
    result = train(job, tmp_path / "run", CheckpointConfig(on_best=True, keep_best=1, num_to_keep=2))
    assert result.step == 15
    losses = {evaluation.step: evaluation.loss for evaluation in result.evaluations}
    assert all(math.isnan(evaluation.auc) for evaluation in result.evaluations)
    commits = [commit.manifest for commit in checkpoint.list_commits(Store(result.path)) if commit.manifest]
    found = {manifest.step: dict(manifest.metrics) for manifest in commits if manifest.metrics}
    on_the_way = {step: loss for step, loss in losses.items() if step < 15}
    assert min(on_the_way, key=lambda step: on_the_way[step]) in found
    assert all(metrics["loss"] == losses[step] and "auc" not in metrics for step, metrics in found.items())
    recorded = read_policies(Store(result.path))
    assert recorded is not None
    assert (recorded.metric, recorded.metric_order) == ("loss", None)


def test_the_loss_of_an_evaluation_is_that_of_every_sample(job: JobConfig, tmp_path: Path) -> None:
    """Without a step in between, the loss of a step over all samples is that of an evaluation: here by a loss that no
    score changes.
    """
    job = replace(job, loss=lambda scores, labels: 0 * scores + labels * 3 + 1)
    result = train(job, tmp_path / "run", CheckpointConfig())
    labels = evaluation_labels(job)
    assert result.evaluations[-1].loss == pytest.approx((labels * 3 + 1).mean(), rel=1e-6)


def evaluation_labels(job: JobConfig) -> np.ndarray:
    paths = job.data.eval_paths
    assert isinstance(paths, tuple)
    return np.concatenate([pq.read_table(path).column("label").to_numpy() for path in locate(paths)])
