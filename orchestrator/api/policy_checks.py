"""Which settings go with which job, and with each other: asked before anything is made."""

from __future__ import annotations

from dataclasses import replace

from podembed.orchestrator.api.config import (
    DEFAULT_METRIC,
    CheckpointConfig,
    ConfigurationError,
    RunConfig,
    ScalingConfig,
)
from podembed.orchestrator.api.early_stopping import EarlyStop
from podembed.orchestrator.api.save_policies import declared_orders
from podembed.workers.declared_types import shown
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference


def check_policies(job: JobConfig, config: RunConfig) -> None:
    """Refuses policies that do not go with a job; asked before anything is made.

    Raises:
      ConfigurationError: commits that follow the clock, with stale lookups; or the best commits by a metric that the
        job does not have.
    """
    with_metric(job, config.checkpoint_config)
    _check_stopping(job, config)
    commits = config.checkpoint_config
    by_clock = {name: getattr(commits, name) for name in ("every_seconds", "seconds_apart") if getattr(commits, name)}
    for name, seconds in by_clock.items() if job.staleness else ():
        raise ConfigurationError(
            f"Found {name}={seconds} with staleness={job.staleness}. Expected commits at steps: a stale lookup is not "
            "made across a commit, so numbers would follow the clock. Use every_steps alone (--checkpoint-every), or "
            "staleness 0."
        )


def with_metric(job: JobConfig, config: CheckpointConfig) -> CheckpointConfig:
    """The same with a metric of the job, and whether its highest or lowest value is the best.

    Raises:
      ConfigurationError: something hangs on a metric that no evaluation of the job can have.
    """
    own = {metric.name: metric for metric in job.metrics}
    of_tasks = [name for task in job.tasks for name in task.figure_names]
    known = [
        *(of_tasks or ["auc"]),
        *(["log_loss"] if job.has_logits else []),
        *([] if job.has_own_loss else ["loss"]),
        *own,
    ]
    metric = config.metric or (DEFAULT_METRIC if job.loss is None and not job.tasks else "loss")
    if config.uses_metric and metric not in known:
        logits = " With a loss of your own log_loss is one of JobConfig.metrics: podembed.LogLoss()."
        raise ConfigurationError(
            f"Found metric={metric!r} for the best commits of job '{job.name}'. Expected one that its evaluations "
            f"have: {', '.join(known)}. Choose one of them (--metric, CheckpointConfig.metric), or declare it in "
            f"JobConfig.metrics.{logits if metric == 'log_loss' else ''}"
        )
    order = config.metric_order or declared_orders(job.metrics).get(metric)
    return replace(config, metric=metric, metric_order=order)


def early_stop_of(job: JobConfig, config: CheckpointConfig) -> EarlyStop:
    """What follows the evaluations of a job, with the metric by which they are compared.

    Raises:
      ConfigurationError: no evaluation of the job has it.
    """
    policy = job.early_stopping
    if policy is None or policy.metric in (None, config.metric):
        asked = replace(config, on_best=config.on_best or policy is not None)
    else:
        asked = replace(config, on_best=True, metric=policy.metric, metric_order=None)
    found = with_metric(job, asked)
    return EarlyStop(policy, metric=found.metric or DEFAULT_METRIC, order=found.metric_order)


def _check_stopping(job: JobConfig, config: RunConfig) -> None:
    """Refuses early stopping of a run that has no evaluations on the way.

    Raises:
      ConfigurationError: nothing would ever stop it.
    """
    if job.early_stopping is None:
        return
    early_stop_of(job, config.checkpoint_config)
    if not job.data.eval_paths:
        raise ConfigurationError(
            f"Found early_stopping in job '{job.name}', whose data has no eval_paths. Expected evaluation data, by "
            "which it stops. Pass eval_paths to its data, or leave early_stopping out."
        )
    if config.eval_every_steps is None:
        raise ConfigurationError(
            f"Found early_stopping in job '{job.name}', and no evaluations before the end. Expected some on the way. "
            "Give RunConfig(eval_every_steps='1epoch') (--eval-every)."
        )


def check_hosts(job: JobConfig, scaling: ScalingConfig) -> None:
    """Refuses more hosts than there are lanes to read, and SparseCores without a table for them.

    Raises:
      ConfigurationError: a host, or the SparseCores, would have nothing to do.
    """
    if scaling.most_hosts > job.num_lanes:
        found = f"up to {scaling.most_hosts}" if scaling.is_range else scaling.most_hosts
        slices = scaling.slices
        whence = "" if slices is None else f", {slices.hosts} for each slice of {slices},"
        fewer = "hosts" if slices is None else "slices (--slices)"
        raise ConfigurationError(
            f"Found {found} hosts{whence} for the {job.num_lanes} lanes of job '{job.name}'. Expected at most one host "
            f"a lane. Use fewer {fewer}, or begin a new run with JobConfig(num_lanes=...) of at least "
            f"{scaling.most_hosts}."
        )
    if scaling.sparse_cores and not any(table.place in ("sharded", "auto") for table in job.tables):
        raise ConfigurationError(
            f"Found sparse_cores, and no table of job '{job.name}' on the chips. Expected one for SparseCores to look "
            "up. Declare TableConfig(place='sharded'), or leave sparse_cores (--sparse-cores) out."
        )


def check_storage(url: str, scaling: ScalingConfig) -> None:
    """Refuses a run in memory for hosts that are other processes: each would see files of its own.

    Raises:
      ConfigurationError: the storage cannot be shared.
    """
    if url.startswith("memory://") and not scaling.in_process:
        raise ConfigurationError(
            f"Found {url} for hosts in processes of their own. Expected storage that all of them reach. "
            f"Use a folder or an object store, or one host with in_process=True (--in-process)."
        )


def check_job(job: object) -> None:
    """Refuses what is no job.

    Raises:
      ConfigurationError: naming what it is.
    """
    if not isinstance(job, JobConfig | JobReference):
        raise ConfigurationError(
            f"Found job={shown(job)} for Trainer. Expected a JobConfig, or a JobReference to the function that returns "
            "one. Call the function that makes the job, and pass what it returns."
        )
