"""`rank_all`: where the item of each sample ranks among all items, in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.result import Evaluation
from podembed.orchestrator.driver.evaluations import ranking_of
from podembed.serving.figures.of_groups import MRR, GroupedAUC, HitRateAt, NDCGAt
from podembed.serving.predict.batches import log_of, read_batches
from podembed.serving.predict.committed_model import KEPT_BYTES, CommittedModel, with_commit
from podembed.serving.predict.evaluate import CommitEvaluation, data_of
from podembed.serving.predict.full_ranking import FullRanking
from podembed.serving.predict.trained_kinds import index_as_trained
from podembed.workers.declared_types import several
from podembed.workers.input.reader import evaluation_plan
from podembed.workers.job.candidates import SAMPLE, RankCounts
from podembed.workers.job.job import JobConfig
from podembed.workers.job.quality import Scores
from podembed.workers.job.ranking import Metric, RecallAt
from podembed.workers.storage.store import place


def rank_all(
    run: str | os.PathLike[str],
    *,
    feature: str | None = None,
    data: str | Sequence[str] = (),
    items: str | Sequence[str] = (),
    without: str | Sequence[str] | None = None,
    users: str | None = None,
    at: int | Sequence[int] = (10,),
    commit: str | None = None,
    job: JobConfig | None = None,
    folder: str = "",
    kept_bytes: int = KEPT_BYTES,
) -> CommitEvaluation:
    """Ranks the first item of each sample whose label is above 0 among all items: HR, NDCG and recall at k, MRR, GAUC.

    The hit rate counts samples. The other figures are means over users, as in He et al., LightGCN, 2020: all samples of
    a user are one list with several items of label 1. Where nothing says which feature is the user, each sample is a
    list of its own, and recall is left out: it would be the hit rate.

    Items with the score of a sample's own one are in any order: a figure is its mean over all orders. Everything else
    that the sample has stays as it is, so the model must know an item by that feature alone.

    Args:
      run: folder or URL of a run, for its newest commit, or `RUN@COMMIT`.
      feature: feature of the items; None for the candidates of the job.
      data: paths or globs with the columns of the job; without any, its evaluation data.
      items: files with the column of the items, which alone are ranked then; without any, all rows of the table.
      without: items that are left out. Of a feature such as the user, those of training samples of the same user whose
        label is above 0. Of a feature of the items' table, such as a history, those that the sample itself has. None
        stands for `without_positives_of` of the job's negatives. The sample's own item is always ranked.
      users: the feature of the users over whom figures are averaged; None for the one by which items are left out.
      at: each k.
      commit: name of the commit, or its step.
      job: job of a run that was started with a job as a value.
      folder: where the job's module may lie if it is not installed.
      kept_bytes: bytes of tables, in memory.

    Raises:
      ConfigurationError: no run, no commit, no job, no evaluation data, or scores that are not those of single items.
      InputError: the data cannot be read, or a column has another kind of values than in training.
      ChunkDamaged: the commit is damaged.
      QualityError: a score is no number. A figure that has no meaning on these samples is left out, with the reason.
    """

    def judge(model: CommittedModel) -> CommitEvaluation:
        ranking = FullRanking(model, feature=feature, items=items, without=without, kept_bytes=kept_bytes)
        paths = tuple(map(place, several(data)))
        return _ranked(model, ranking, paths, at=several(at), users=_users(model.job, users) or ranking.users)

    return with_commit(run, judge, commit=commit, job=job, folder=folder)


def _users(job: JobConfig, users: str | None) -> str | None:
    if users is not None and users not in job.features:
        raise ConfigurationError(
            f"Found --users {users}. Expected a feature of the job, one of {list(job.features)}. Name the one that has "
            "the user of each sample."
        )
    return users


def _metrics(job: JobConfig, at: Sequence[int], users: str | None) -> list[Metric]:
    """What is printed, each name once: hit rates of samples, and what else there is over users."""
    by = users or SAMPLE
    metrics: list[Metric] = [HitRateAt(k) for k in at]
    metrics += [kind(k, group_by=by) for k in at for kind in (NDCGAt, RecallAt)]
    metrics += [MRR(group_by=by), GroupedAUC(group_by=by)]
    for own in job.metrics:
        if own.group_by == SAMPLE and isinstance(own, NDCGAt | RecallAt):
            metrics.append(replace(own, group_by=by))
        elif own.group_by == SAMPLE or (job.ranks_all and own.group_by is not None):
            metrics.append(own)
    found: dict[str, Metric] = {}
    for metric in metrics:
        found.setdefault(metric.name, metric)
    return [*found.values()]


def _ranked(
    model: CommittedModel, ranking: FullRanking, paths: Sequence[str], *, at: Sequence[int], users: str | None
) -> CommitEvaluation:
    job = model.job
    metrics = _metrics(job, at, users)
    is_hit_rate = {metric.name for metric in metrics if isinstance(metric, RecallAt) and metric.group_by == SAMPLE}
    metrics = [metric for metric in metrics if metric.name not in is_hit_rate]
    features = [*dict.fromkeys(metric.group_by for metric in metrics if metric.group_by not in (None, SAMPLE))]
    declared = data_of(ranking.job, paths)
    index, log = index_as_trained(model, declared), log_of(declared)
    plan = evaluation_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size)
    parts, counts = [], RankCounts()
    for found in ranking.looked_up(read_batches(declared, index, plan, bad_rows=log)):
        own = ranking.positives(found)
        counts.add(own.scores, own.is_candidate, is_first=True)
        for block in ranking.blocks(found):
            counts.add(block.scores, block.is_candidate, is_first=False)
        samples = np.flatnonzero(~found.batch.is_padding & counts.has_positive)
        scores, ranks = counts.result(samples)
        labels = found.batch.labels[samples]
        weights = np.where(np.isnan(labels), np.float32(0), found.batch.weights[samples])
        groups = {name: found.batch.only_ids(name, samples) for name in features}
        groups[SAMPLE] = found.batch.sample_ids[samples]
        parts.append(Scores(scores, labels, weights, groups, ranks))
    evaluation: Evaluation = ranking_of(Scores.concatenate(parts), metrics, step=model.state.manifest.step)
    why = (
        "Found no feature that says which samples are of one user. Expected one to average over users. Pass --users "
        "FEATURE."
    )
    evaluation = replace(evaluation, missing={**evaluation.missing, **dict.fromkeys(sorted(is_hit_rate), why)})
    return CommitEvaluation(
        commit=model.state.manifest.name, paths=tuple(declared.paths), evaluation=evaluation, bad_rows=log.take()
    )
