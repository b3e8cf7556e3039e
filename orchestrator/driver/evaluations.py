"""From the scored samples of all hosts to the figures of an evaluation. Numbers only: no Ray, no clock.

AUC and log loss are for labels 0 and 1. Other labels, or one of the two alone, are no fault of the run: what has no
meaning is left out. So is a metric of the job, with the reason.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.policy_checks import early_stop_of, with_metric
from podembed.orchestrator.api.result import Evaluation
from podembed.workers.declared_types import plain_number, shown
from podembed.workers.host.spec import ScoredSamples
from podembed.workers.job.job import JobConfig
from podembed.workers.job.quality import FaultyScores, QualityError, Scores, are_binary, weighted_mean
from podembed.workers.job.ranking import Metric
from podembed.workers.job.tasks import predicted, scores_by_task
from podembed.workers.liveness.carried_error import words_of


def evaluation_of(job: JobConfig, parts: Sequence[ScoredSamples], *, step: int) -> Evaluation:
    """The figures of all samples. One that has no meaning on them is left out, with the reason.

    Raises:
      FaultyScores: a score is NaN, or of a kind that a metric cannot judge.
    """
    if job.tasks:
        return _evaluation_of_tasks(job, parts, step=step)
    scores = Scores.concatenate([_labelled(part) for part in parts])
    if job.ranks_all:
        return ranking_of(scores, job.metrics, step=step)
    found = _Figures()
    found.take("loss", lambda: _mean_loss(parts, scores.weights))
    is_binary = are_binary(scores.labels, scores.weights)
    if is_binary and len(np.unique(scores.labels[scores.weights > 0])) == 2:
        found.take("auc", scores.auc)
    if is_binary and job.has_logits:
        found.take("log_loss", scores.log_loss)
    own = _Figures.of(job.metrics, scores)
    return Evaluation(
        step=step,
        auc=found.values.get("auc", math.nan),
        log_loss=found.values.get("log_loss", math.nan),
        num_samples=len(scores.labels),
        metrics=own.values,
        loss=math.nan if job.has_own_loss else found.values.get("loss", math.nan),
        missing={name: why for name, why in found.missing.items() if name != "loss" or not job.has_own_loss}
        | own.missing,
    )


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures by name, and why others are missing. Mutated by `take`."""

    values: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(metrics: Iterable[Metric], scores: Scores) -> _Figures:
        found = _Figures()
        for metric in metrics:
            found.take(metric.name, partial(_figure_of, metric, scores))
        return found

    def take(self, name: str, figure: Callable[[], float]) -> None:
        """Raises:
        FaultyScores: it is not for want of a meaning that there is no figure.
        """
        try:
            self.values[name] = figure()
        except FaultyScores:
            raise
        except QualityError as error:
            self.missing[name] = str(error)


def _figure_of(metric: Metric, scores: Scores) -> float:
    """The figure of a metric, which may be the user's own, as a float that goes into records.

    Raises:
      QualityError: there is none, or something else than one number.
    """
    remedy = "Mend it, or leave the metric out."
    try:
        made: Any = metric.of(scores)
    except QualityError:
        raise
    except (Exception, SystemExit) as error:
        # It costs this figure, and not the run: the steps before it are good.
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise QualityError(
            f"Found {type(error).__name__}: {words_of(error).rstrip('.')}, raised in line {at.lineno} of "
            f"{at.filename}. Expected one number. {remedy}"
        ) from error
    number = plain_number(made)
    if number is None:
        kind = f"an array of shape {list(made.shape)}" if hasattr(made, "shape") else shown(made)
        raise QualityError(f"Found {kind}, which its `of` returned. Expected one number. {remedy}")
    try:
        return float(number)
    except OverflowError:
        raise QualityError(
            f"Found a whole number that is too large for a float, which its `of` returned. Expected a number. {remedy}"
        ) from None


def _mean_loss(parts: Sequence[ScoredSamples], weights: np.ndarray) -> float:
    return weighted_mean(np.concatenate([part.losses for part in parts]), weights)


def ranking_of(scores: Scores, metrics: Sequence[Metric], *, step: int) -> Evaluation:
    """The figures of a full ranking. It has no loss and no AUC, which would need all scores at once.

    Raises:
      FaultyScores: as `evaluation_of`.
    """
    found = _Figures.of(metrics, scores)
    return Evaluation(
        step=step,
        auc=math.nan,
        log_loss=math.nan,
        num_samples=len(scores.labels),
        metrics=found.values,
        missing=found.missing,
    )


def _evaluation_of_tasks(job: JobConfig, parts: Sequence[ScoredSamples], *, step: int) -> Evaluation:
    """Figures of each task, by names such as `click/auc`. A task without any labelled sample has none."""
    weights = np.concatenate([part.weights for part in parts])
    by_host = [
        scores_by_task(job.tasks, part.scores, part.labels, part.weights, part.groups)
        for part in parts
        if len(part.weights)
    ]
    by_task = {task.label: Scores.concatenate([found[task.label] for found in by_host]) for task in job.tasks}
    figures: dict[str, float] = {}
    missing: dict[str, str] = {}
    for task in job.tasks:
        seen = predicted(task, by_task[task.label])
        of_task = [metric for metric in job.metrics if getattr(metric, "task", None) == task.label]
        if not (seen.weights > 0).any():
            names = [*task.figure_names, *(metric.name for metric in of_task)]
            missing |= dict.fromkeys(names, f"Found no sample that has the label {task.label!r}. Expected some.")
            continue
        found = _Figures.of(of_task, seen)
        figures |= task.figures(by_task[task.label]) | found.values
        missing |= found.missing
    found = _Figures()
    found.take("loss", lambda: _mean_loss(parts, weights))
    has_loss = not job.has_own_loss
    return Evaluation(
        step=step,
        auc=math.nan,
        log_loss=math.nan,
        num_samples=len(weights),
        metrics=figures,
        loss=found.values.get("loss", math.nan) if has_loss else math.nan,
        missing=missing | (found.missing if has_loss else {}),
    )


def _labelled(part: ScoredSamples) -> Scores:
    """Samples whose label is missing count for nothing."""
    weights = np.where(np.isnan(part.labels), np.float32(0), part.weights)
    return Scores(part.scores, part.labels, weights, part.groups, part.ranks)


def require_metric(job: JobConfig, config: CheckpointConfig, evaluation: Evaluation) -> None:
    """Refuses to go on without a figure on which the best commits, or the end of training, hang.

    No commit would ever be the best, or training would end because of the data.

    Raises:
      ConfigurationError: with the reason, and the figures that are there.
    """
    best, stop = with_metric(job, config).metric, early_stop_of(job, config)
    asked = [(best, "which commits are best")] if config.uses_metric else []
    asked += [(stop.metric, "when training ends")] if stop.policy is not None else []
    for metric, what in asked:
        if metric is None or metric in evaluation.values:
            continue
        reason = (
            "AUC needs labels 0 and 1, and some of both, in the evaluation data."
            if metric == "auc"
            else "It needs labels 0 and 1."
        )
        reason = evaluation.missing.get(metric, reason)
        raise ConfigurationError(
            f"Found no {metric} in the evaluation after step {evaluation.step}, and it decides {what}. {reason} "
            f"Expected one of {', '.join(evaluation.values) or 'the figures that other data has'}. Choose one of them "
            "(--metric, CheckpointConfig.metric, EarlyStopping.metric), or evaluate on other data."
        )
