"""The end of `podembed train` and `podembed resume` in words: what was done, how good it is, where it lies, what to
type next.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podembed.jobs.reporters.console import LastingConsole
from podembed.jobs.reporters.json_log import SUMMARY, JsonReporter
from podembed.orchestrator.api.config import DEFAULT_METRIC, CheckpointConfig, ScalingConfig
from podembed.orchestrator.api.policy_checks import with_metric
from podembed.orchestrator.api.result import Result, is_same_loss
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.events.progress import NO_FIGURE, figures
from podembed.orchestrator.events.reporter import Reporter
from podembed.orchestrator.run.history_record import HistoryRecord, read_history
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.storage_errors import StorageError

LINE_WIDTH = 80


def show_summary(
    run: OpenRun,
    result: Result,
    reporter: Reporter,
    *,
    seconds: float,
    is_whole: bool,
    config: CheckpointConfig,
    scaling: ScalingConfig,
) -> None:
    """Says how a run ended, as the reporter says things.

    Args:
      seconds: all in all, from the start of the command.
      is_whole: whether nothing is left to train.
      config: has the metric by which evaluations are compared.
      scaling: where it trained; the command that goes on names its slices.
    """
    try:
        history, commits = read_history(run.store).cut(result.step), read_lineage(run.store)
    except (StorageError, OSError):
        # The run ended well; its last words do not turn that into an error.
        history, commits = HistoryRecord(), ()
    told = summary(
        run.job,
        result,
        history,
        commits,
        seconds=seconds,
        is_whole=is_whole,
        config=with_metric(run.job, config),
        scaling=scaling,
    )
    if isinstance(reporter, JsonReporter):
        reporter.line(SUMMARY, "\n".join(told), _values(result, seconds=seconds, is_whole=is_whole))
        return
    console = LastingConsole(highlight=False)
    for line in ("", *told):
        # Paths and commands are copied, so a line is never broken.
        console.print(line, soft_wrap=True, markup=False)


def _values(result: Result, *, seconds: float, is_whole: bool) -> dict[str, Any]:
    evaluation = result.evaluations[-1].values if result.evaluations else {}
    return {
        "run": result.path,
        "step": result.step,
        "steps_planned": result.total_steps,
        "is_whole": is_whole,
        "samples": result.num_samples,
        "samples_per_second": result.samples_per_s,
        "median_samples_per_second": result.median_samples_per_s,
        "seconds": seconds,
        "commit": result.commit,
        "stopped_by": result.stopped_by,
        "recoveries": len(result.recoveries),
        "failed_saves": result.failed_saves,
        "evaluation": {name: value for name, value in evaluation.items() if math.isfinite(value)},
    }


def summary(
    job: JobConfig,
    result: Result,
    history: HistoryRecord,
    commits: Sequence[str],
    *,
    seconds: float,
    is_whole: bool,
    config: CheckpointConfig,
    scaling: ScalingConfig,
) -> Iterator[str]:
    """The lines of `show_summary`.

    Args:
      history: history of the whole run.
      commits: names of those that are kept.
      config: has the metric by which evaluations are compared.
    """
    if result.step > result.total_steps:
        yield f"nothing left to train: the commit is of step {result.step}, and the run was"
        yield f"to end at {result.total_steps}"
    elif not result.num_windows and result.stopped_early is not None:
        yield f"nothing left to train: stopped early at step {result.step} of {result.total_steps},"
        yield f"since {result.stopped_early}"
    elif not result.num_windows and result.stopped_by is None:
        yield f"nothing left to train: all {result.total_steps:,} steps are done"
    elif not result.num_windows:
        # Windows that were lost count for nothing, but their time was spent.
        when = "in a recovery" if result.trained_s else "before a step was trained"
        stands = f"the run stands at step {result.step} of {result.total_steps}" if result.step else "none is trained"
        stands = "no step of it is committed" if result.trained_s and not result.step else stands
        yield f"stopped by {result.stopped_by} {when}: {stands}"
    else:
        end = f"stopped by {result.stopped_by}" if result.stopped_by else "done"
        end = "stopped early" if result.stopped_early else end
        yield f"{end} at step {result.step} of {result.total_steps}, {seconds:.1f} s all in all"
    yield from _rates(result)
    if result.losses:
        last = sorted(result.losses)[-20:]
        mean = sum(result.losses[step] for step in last) / len(last)
        yield f"  loss         {mean:.4f} (mean of the last {plural(len(last), 'step')})"
    yield from _quality(job, result, history, commits, config)
    if result.recoveries:
        discarded = sum(recovery.discarded_steps for recovery in result.recoveries)
        yield f"  recoveries   {len(result.recoveries)}; {plural(discarded, 'step')} discarded and done again"
    if result.failed_saves:
        yield f"  storage      {plural(result.failed_saves, 'save')} failed; the last step is committed"
    if result.phase_s:
        yield _phases(result.phase_s)
    yield f"  commit       {result.commit or 'none yet: resume begins with the first step'}"
    yield f"  run          {result.path}"
    yield f"  next         {command_name()} inspect {shlex.quote(_short_path(result.path))}"
    if not is_whole:
        yield from _goes_on(f"{command_name()} resume {shlex.quote(_short_path(result.path))}", scaling)


def _goes_on(command: str, scaling: ScalingConfig) -> Iterator[str]:
    """The command that goes on with a run. Without its flags, hosts would be counted and slices left alone."""
    if scaling.slices is None:
        yield f"               {command}"
        yield "               (--hosts N for another number, MIN-MAX for a range)"
        return
    number = scaling.num_slices if isinstance(scaling.num_slices, int) else "-".join(map(str, scaling.num_slices))
    platform = f" --platform {scaling.platform}" if scaling.platform else ""
    yield f"               {command} \\"
    yield f"                 --topology {scaling.topology} --accelerator-type {scaling.accelerator_type} \\"
    yield f"                 --slices {number}{platform}"
    yield "               (--slices N for another number, MIN-MAX for a range)"


def _quality(
    job: JobConfig, result: Result, history: HistoryRecord, commits: Sequence[str], config: CheckpointConfig
) -> Iterator[str]:
    """The last evaluation of this call, or else of the run, and the best one of the run with its commit."""
    if result.evaluations:
        final = result.evaluations[-1]
        losses = [f"{name} {value:.4f}" for name, value in final.losses.items()]
        quality = ", ".join([*figures(final, job.baseline), *losses])
        yield f"  evaluation   {quality or NO_FIGURE} after step {final.step}"
        if job.best_auc is not None and not math.isnan(final.auc):
            share = (final.auc - 0.5) / (job.best_auc - 0.5)
            yield f"  reachable    AUC {job.best_auc:.4f}; reached {share:.3f} of its lift over 0.5"
    elif history.evaluations:
        last = history.evaluations[-1]
        quality = ", ".join(f"{metric_label(name)} {value:.4f}" for name, value in without_repeated(last.metrics))
        yield f"  evaluation   {quality} after step {last.step}"
    metric = config.metric or DEFAULT_METRIC
    best = history.best(metric, config.metric_order)
    if best is not None:
        commit = _commit_of(best.step, commits)
        yield f"  best         {metric_label(metric)} {best.metrics[metric]:.4f} after step {best.step}, {commit}"


def _commit_of(step: int, commits: Sequence[str]) -> str:
    found = [name for name in commits if (parse_commit_name(name) or (0, 0))[0] == step]
    return f"commit {found[0]}" if found else "no commit of it is kept"


def without_repeated(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Names and values but for a loss that is the log loss, as evaluations print them."""
    repeats = is_same_loss(metrics.get("loss", math.nan), metrics.get("log_loss", math.nan))
    return [(name, value) for name, value in metrics.items() if not (repeats and name == "loss")]


def metric_label(name: str) -> str:
    """As evaluations print it."""
    return {"auc": "AUC", "log_loss": "log loss"}.get(name, name)


def _phases(phase_s: Mapping[str, float]) -> str:
    """Shares of the longest phases of the steps, as many as fit a line."""
    total_s = sum(phase_s.values()) or 1.0
    line = "  time         "
    for phase, spent_s in sorted(phase_s.items(), key=lambda item: -item[1]):
        part = f"{phase} {spent_s / total_s:.0%}, "
        if len(line) + len(part) - 2 > LINE_WIDTH:
            break
        line += part
    return line.rstrip(", ")


def _rates(result: Result) -> Iterator[str]:
    """Samples over seconds, and what is in these seconds; beside it how fast it went while nothing was in the way."""
    if not result.num_windows:
        return
    recoveries = len(result.recoveries)
    within = f", with {recoveries} recover{'y' if recoveries == 1 else 'ies'}" if recoveries else ""
    yield (
        f"  trained      {result.num_samples:,} samples in {result.trained_s:.1f} s: "
        f"{result.samples_per_s:,.0f} samples/s"
    )
    yield f"               (first step to last{within}; starting and evaluating left out)"
    yield (f"               {result.median_samples_per_s:,.0f} samples/s in the median step, without starts")
    if result.is_short:
        yield "               a short run: its rates say little about a longer one"


def command_name() -> str:
    """How this program was called, for commands that one can copy."""
    program = os.path.basename(sys.argv[0])
    if program != "podembed":
        return "python -m podembed"
    return sys.argv[0] if os.path.dirname(sys.argv[0]) else "podembed"


def _short_path(path: str) -> str:
    try:
        relative = os.path.relpath(path)
    except ValueError:
        return path
    return relative if "://" not in path and not relative.startswith("..") else path
