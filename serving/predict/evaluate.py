"""`evaluate`: the figures of a commit on data, as the run itself would find them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.result import Evaluation
from podembed.orchestrator.driver.evaluations import evaluation_of
from podembed.serving.predict.batches import all_of, log_of, looked_up
from podembed.serving.predict.committed_model import KEPT_BYTES, CommittedModel, CommittedRows, with_commit
from podembed.serving.predict.pooled_rows import PooledRows
from podembed.serving.predict.trained_forward import SCORED_PARTS, TrainedForward
from podembed.serving.predict.trained_kinds import index_as_trained
from podembed.serving.row_form import RowForm
from podembed.workers.data.bad_rows import BadRow
from podembed.workers.data.config import InputData
from podembed.workers.declared_types import several
from podembed.workers.device.dense_half import DenseStateError, OtherPrecision
from podembed.workers.host.windows import ScoredParts
from podembed.workers.input.sources import open_evaluation
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import place


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEvaluation:
    """Figures of a commit.

    Attributes:
      commit: its name.
      paths: paths of the data.
      bad_rows: malformed rows, which were left out.
    """

    commit: str
    paths: tuple[str, ...]
    evaluation: Evaluation
    bad_rows: tuple[BadRow, ...]


def evaluate(
    run: str | os.PathLike[str],
    *,
    data: str | Sequence[str] = (),
    commit: str | None = None,
    job: JobConfig | None = None,
    folder: str = "",
    kept_bytes: int = KEPT_BYTES,
) -> CommitEvaluation:
    """Judges a commit of a run, also of one that is in training: nothing is written, and no lease is taken.

    Memory is `kept_bytes`, the rows of a window of batches, and a score for each sample.

    Args:
      run: folder or URL of a run, for its newest commit, or `RUN@COMMIT`.
      data: paths or globs with the columns of the job; without any, its evaluation data.
      commit: name of the commit, or its step.
      job: job of a run that was started with a job as a value.
      folder: where the job's module may lie if it is not installed.
      kept_bytes: bytes of tables, in memory.

    Raises:
      ConfigurationError: no run, no commit, no job, or no evaluation data.
      InputError: the data cannot be read, or a column has another kind of values than in training.
      ChunkDamaged: the commit is damaged.
      QualityError: a score is no number. A figure that has no meaning on these samples is left out, with the reason.
    """

    def judge(model: CommittedModel) -> CommitEvaluation:
        return figures_of(model, data=tuple(map(place, several(data))), kept_bytes=kept_bytes)

    return with_commit(run, judge, commit=commit, job=job, folder=folder)


def figures_of(
    model: CommittedModel, *, data: Sequence[str] = (), kept_bytes: int = KEPT_BYTES, form: RowForm | None = None
) -> CommitEvaluation:
    """As `evaluate`, of a commit that is open.

    Args:
      form: form in which a copy has the rows; None for that of the run.
    """
    job, declared = model.job, data_of(model.job, data)
    index = index_as_trained(model, declared)
    log = log_of(declared)
    # The device program, and with it the last bit of a score, is that of a run on one host, which has all lanes.
    try:
        forward = TrainedForward(job, model.dense(SCORED_PARTS))
    except OtherPrecision as error:
        raise ConfigurationError(f"{error} It is the model of {model.state.location}.") from error
    except DenseStateError as error:
        raise ConfigurationError(f"{error} The job's function has changed since {model.state.location}.") from error
    rows = PooledRows(job, CommittedRows(model, kept_bytes=kept_bytes, form=form))
    parts = ScoredParts(job)
    opened = open_evaluation(job, None, index, range(job.num_lanes), data=declared, bad_rows=log)
    for number, found in enumerate(looked_up(all_of(*opened), rows)):
        parts.add(found.batch, forward.scores(found, number=number), number=number)
    bad_rows = log.take()
    evaluation = evaluation_of(job, [replace(parts.joined(), bad_rows=bad_rows)], step=model.state.manifest.step)
    return CommitEvaluation(
        commit=model.state.manifest.name, paths=tuple(declared.paths), evaluation=evaluation, bad_rows=bad_rows
    )


def data_of(job: JobConfig, paths: Sequence[str]) -> InputData:
    if paths:
        return replace(job.resolved_data, paths=tuple(paths), eval_paths=())
    if not job.data.eval_paths:
        raise ConfigurationError(
            f"Found no evaluation data in the job '{job.name}'. Expected some to judge by. Pass --data GLOB, or "
            "declare eval_paths."
        )
    return job.resolved_data.for_evaluation()
