"""Whether a run has nothing left to do, told from its folder alone: no cluster, no lease and no compilation is needed
to say so.
"""

from __future__ import annotations

from dataclasses import replace

from podembed.orchestrator.api.config import RunConfig
from podembed.orchestrator.api.policy_checks import early_stop_of
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.run.history_record import read_history
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.storage.storage_errors import StorageError

OWES_EVALUATION = "owes_evaluation"
"""Among the counters of a commit: a signal cut off the evaluation that belongs to it, and others wait for its figures.
"""


def finished(run: OpenRun, config: RunConfig, head: Manifest | None) -> Result | None:
    """The result of `fit` for a run whose steps are all committed, and whose end is evaluated where that is
    requested. None for any other.

    A run whose driver was lost between its last commit and its last evaluation is not finished: the evaluation is still
    owed.

    Args:
      head: the newest commit.
    """
    total_steps = config.last_step(run.total_steps)
    if head is None:
        return None
    early = early_stop_of(run.job, config.checkpoint_config)
    early.begin(head.counters, head.metrics)
    if early.is_due:
        return replace(untrained(run, config, head), stopped_early=early.reason)
    if head.step < total_steps:
        return None
    owes_evaluation = config.evaluate_at_end and run.eval_index is not None and head.step == total_steps
    if OWES_EVALUATION in head.counters or (owes_evaluation and not _is_evaluated(run, head.step)):
        return None
    return untrained(run, config, head)


def untrained(run: OpenRun, config: RunConfig, head: Manifest | None, *, stopped_by: str | None = None) -> Result:
    """The result of `fit` for a call that trained nothing.

    Args:
      head: the newest commit; None where there is none.
      stopped_by: who asked the call to end before it trained.
    """
    return Result(
        path=run.url,
        step=head.step if head else 0,
        total_steps=config.last_step(run.total_steps),
        num_samples=0,
        samples_per_s=0.0,
        losses={},
        evaluations=(),
        recoveries=(),
        phase_s={},
        commit=head.name if head else None,
        stopped_by=stopped_by,
        staleness=run.job.staleness,
    )


def _is_evaluated(run: OpenRun, step: int) -> bool:
    try:
        return any(made.step == step for made in read_history(run.store).evaluations)
    except StorageError:
        # A damaged history is no reason to refuse the run; evaluating once more writes a good one.
        return False
