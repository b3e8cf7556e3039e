"""From the scored samples of all hosts to the figures of an evaluation. Numbers only: no Ray, no clock.

AUC and log loss are for labels 0 and 1. Other labels, or one of the two alone, are no fault of the run: what has no
meaning is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.policy_checks import with_metric
from podembed.orchestrator.api.result import Evaluation
from podembed.workers.host.spec import ScoredSamples
from podembed.workers.job.job import JobConfig
from podembed.workers.job.quality import Scores, are_binary, weighted_mean
from podembed.workers.job.ranking import Metric
from podembed.workers.job.tasks import predicted, scores_by_task


def evaluation_of(job: JobConfig, parts: Sequence[ScoredSamples], *, step: int) -> Evaluation:
    """The figures of all samples.

    Raises:
      QualityError: there is no weight at all, a score is NaN, or a metric of the job is not defined for these samples.
    """
    if job.tasks:
        return _evaluation_of_tasks(job, parts, step=step)
    scores = Scores.concatenate([_labelled(part) for part in parts])
    if job.ranks_all:
        return ranking_of(scores, job.metrics, step=step)
    loss = weighted_mean(np.concatenate([part.losses for part in parts]), scores.weights)
    is_binary = are_binary(scores.labels, scores.weights)
    has_both = is_binary and len(np.unique(scores.labels[scores.weights > 0])) == 2
    return Evaluation(
        step=step,
        auc=scores.auc() if has_both else math.nan,
        log_loss=scores.log_loss() if is_binary and job.has_logits else math.nan,
        num_samples=len(scores.labels),
        metrics={metric.name: metric.of(scores) for metric in job.metrics},
        loss=math.nan if job.has_own_loss else loss,
    )


def ranking_of(scores: Scores, metrics: Sequence[Metric], *, step: int) -> Evaluation:
    """The figures of a full ranking. It has no loss and no AUC, which would need all scores at once.

    Raises:
      QualityError: as `evaluation_of`.
    """
    figures = {metric.name: metric.of(scores) for metric in metrics}
    return Evaluation(step=step, auc=math.nan, log_loss=math.nan, num_samples=len(scores.labels), metrics=figures)


def _evaluation_of_tasks(job: JobConfig, parts: Sequence[ScoredSamples], *, step: int) -> Evaluation:
    """Figures of each task, by names such as `click/auc`. A task without any labelled sample has none."""
    weights = np.concatenate([part.weights for part in parts])
    loss = weighted_mean(np.concatenate([part.losses for part in parts]), weights)
    by_host = [
        scores_by_task(job.tasks, part.scores, part.labels, part.weights, part.groups)
        for part in parts
        if len(part.weights)
    ]
    by_task = {task.label: Scores.concatenate([found[task.label] for found in by_host]) for task in job.tasks}
    figures: dict[str, float] = {}
    for task in job.tasks:
        figures |= task.figures(by_task[task.label])
        seen = predicted(task, by_task[task.label])
        of_task = [metric for metric in job.metrics if getattr(metric, "task", None) == task.label]
        if (seen.weights > 0).any():
            figures |= {metric.name: metric.of(seen) for metric in of_task}
    return Evaluation(
        step=step,
        auc=math.nan,
        log_loss=math.nan,
        num_samples=len(weights),
        metrics=figures,
        loss=math.nan if job.has_own_loss else loss,
    )


def _labelled(part: ScoredSamples) -> Scores:
    """Samples whose label is missing count for nothing."""
    weights = np.where(np.isnan(part.labels), np.float32(0), part.weights)
    return Scores(part.scores, part.labels, weights, part.groups, part.ranks)


def require_metric(job: JobConfig, config: CheckpointConfig, evaluation: Evaluation) -> None:
    """Refuses to go on where the best commits hang on a metric that evaluations do not have: none would ever be the
    best.

    Raises:
      ConfigurationError: with the metrics that are there.
    """
    metric = with_metric(job, config).metric
    if config.uses_metric and metric not in evaluation.values:
        reason = (
            "AUC needs labels 0 and 1, and some of both, in the evaluation data"
            if metric == "auc"
            else "It needs labels 0 and 1"
        )
        raise ConfigurationError(
            f"Found no {metric} in the evaluation after step {evaluation.step}, and it decides which commits are best. "
            f"{reason}. Expected one of "
            f"{', '.join(evaluation.values)}. Choose one of them (--metric, CheckpointConfig.metric)."
        )
