"""What `podembed train` and `podembed resume` do between flags and the trainer: data that is text becomes Parquet, defaults are chosen
from the length of the run, and the end is summed up.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.cli import BUILT_IN_JOBS, default_storage, parse_settings
from jobs.synthetic import DEFAULT_FOLDER
from orchestrator.config import CheckpointConfig, ConfigurationError, Result, RunConfig, ScalingConfig
from orchestrator.errors import EXIT_STOPPED
from orchestrator.inspect_run import format_bytes
from orchestrator.progress import ConsoleReporter
from orchestrator.run_folder import OpenRun, create_run, last_num_hosts, open_run
from orchestrator.run_record import find_run
from orchestrator.trainer import check_hosts, fit
from workers.input import training_plan
from workers.job import JobReference
from workers.storage import Store

if TYPE_CHECKING:
    from jobs.cli import Resume, Train

COMMITS_A_RUN = 10
EVALUATIONS_A_RUN = 4
FEWEST_STEPS = 20  # between two commits or evaluations, unless asked for


def train(command: Train) -> int:
    """Begins a run and trains it to its end. Returns the exit code."""
    scaling = _scaling(command, command.hosts)
    _config(command, steps=1)  # what is wrong with the flags should be known before a folder is made
    arguments = dict(parse_settings(command.set))
    has_data = bool(command.data or command.eval_data)
    job_name = command.job or ("criteo" if has_data else "synthetic")
    if has_data:
        arguments |= _data_arguments(command, job_name)
    if job_name == "synthetic":
        # The run record keeps the arguments, and a run may be resumed from another folder.
        arguments["folder"] = str(Path(str(arguments.get("folder", DEFAULT_FOLDER))).absolute())
    reference = JobReference(function=BUILT_IN_JOBS.get(job_name, job_name), arguments=arguments)
    job = reference.resolve()
    check_hosts(job, scaling)
    name = command.name or f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    storage = command.storage or default_storage()
    _refuse_existing(f"{storage.rstrip('/')}/{name}")
    run = create_run(f"{storage.rstrip('/')}/{name}", job, reference)
    return _fit(run, command, scaling)


def _refuse_existing(url: str) -> None:
    """`train` begins runs; going on with one is `resume`, which asks the run itself what it is."""
    if find_run(Store(url)) is not None:
        raise ConfigurationError(
            f"Found a run in {url}. Expected none, since train begins a new one. Type: {_command()} resume {shlex.quote(url)}; "
            f"or choose another --name."
        )


def resume(command: Resume) -> int:
    """Goes on with a run. Returns the exit code."""
    run = open_run(
        command.run,
        take_over=command.take_over,
        accept_input_change=command.accept_input_change,
        allow_ancestor=command.allow_ancestor,
    )
    hosts = command.hosts if command.hosts is not None else last_num_hosts(run) or 1
    return _fit(run, command, _scaling(command, 1 if command.in_process and command.hosts is None else hosts))


def _scaling(command: Train | Resume, hosts: int) -> ScalingConfig:
    return ScalingConfig(num_hosts=hosts, threads_per_host=command.threads_per_host, in_process=command.in_process)


def _config(command: Train | Resume, *, steps: int) -> RunConfig:
    """The policies that the flags ask for, with defaults for a run of so many steps.

    Raises:
      ConfigurationError: a flag is out of its range.
    """

    def spread(asked: int | None, parts: int) -> int:
        return max(FEWEST_STEPS, -(-steps // parts)) if asked is None else asked

    return RunConfig(
        checkpoint_config=CheckpointConfig(
            every_steps=spread(command.checkpoint_every, COMMITS_A_RUN),
            num_to_keep=command.keep,
            full_every=command.full_every,
        ),
        eval_every_steps=spread(command.eval_every, EVALUATIONS_A_RUN),
        max_steps=command.max_steps,
    )


def _fit(run: OpenRun, command: Train | Resume, scaling: ScalingConfig) -> int:
    reporter = ConsoleReporter()
    config = _config(command, steps=_total_steps(run))
    _introduce(run, reporter)
    started = time.monotonic()
    result = fit(run, scaling=scaling, config=config, reporter=reporter)
    _sum_up(run, result, seconds=time.monotonic() - started)
    return EXIT_STOPPED if result.stopped_by else 0


def _total_steps(run: OpenRun) -> int:
    job = run.job
    plan = training_plan(run.train_index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed)
    return plan.steps_per_epoch * job.num_epochs


def _introduce(run: OpenRun, reporter: ConsoleReporter) -> None:
    job = run.job
    rows = sum(table.num_rows for table in run.record.tables)
    size = sum(4 * table.num_rows * (table.dim + sum(table.slots.values())) for table in run.record.tables)
    evaluated = f", {run.eval_index.num_rows:,} for evaluation" if run.eval_index else ", none for evaluation"
    reporter.notice(
        f"job {job.name}: {run.train_index.num_rows:,} training samples{evaluated}; {len(run.record.tables)} tables, {rows:,} rows, "
        f"{format_bytes(size)} with slots; batch {job.batch_size}, {job.num_epochs} epoch{'s' if job.num_epochs > 1 else ''}"
    )
    if job.best_auc is not None:
        reporter.notice(f"best reachable AUC on the evaluation samples: {job.best_auc:.4f} (the planted model's own)")


def _sum_up(run: OpenRun, result: Result, *, seconds: float) -> None:
    """The end summary: what was done, how good it is, where it lies, what to type next."""
    console = Console(highlight=False)
    show = lambda text: console.print(text, soft_wrap=True, markup=False)  # noqa: E731
    show("")
    show(
        f"{'stopped by ' + result.stopped_by if result.stopped_by else 'done'} at step {result.step} of {result.total_steps}"
    )
    show(
        f"  trained      {result.num_samples:,} samples in {seconds:.1f} s all in all, {result.samples_per_s:,.0f} samples/s "
        f"(median over windows)"
    )
    if result.losses:
        last = sorted(result.losses)[-20:]
        show(
            f"  loss         {sum(result.losses[step] for step in last) / len(last):.4f} (mean of the last {len(last)} steps)"
        )
    if result.evaluations:
        final = result.evaluations[-1]
        show(f"  evaluation   AUC {final.auc:.4f}, log loss {final.log_loss:.4f} after step {final.step}")
        if run.job.best_auc is not None:
            share = (final.auc - 0.5) / (run.job.best_auc - 0.5)
            show(f"  reachable    AUC {run.job.best_auc:.4f}; reached {share:.3f} of its lift over 0.5")
    if result.recoveries:
        show(
            f"  recoveries   {len(result.recoveries)}; {sum(r.discarded_steps for r in result.recoveries)} steps discarded and done again"
        )
    total_s = sum(result.phase_s.values())
    if total_s:
        longest = sorted(result.phase_s.items(), key=lambda item: -item[1])[:6]
        show("  time         " + ", ".join(f"{phase} {spent / total_s:.0%}" for phase, spent in longest))
    show(f"  run          {result.path}")
    show(f"  next         {_command()} inspect {shlex.quote(_short_path(result.path))}")
    if result.stopped_by or result.step < _total_steps(run):
        show(
            f"               {_command()} resume {shlex.quote(_short_path(result.path))}   (--hosts N for another number)"
        )


def _command() -> str:
    program = os.path.basename(sys.argv[0])
    if program != "podembed":
        return "python -m jobs.cli"
    return sys.argv[0] if os.path.dirname(sys.argv[0]) else "podembed"


def _short_path(path: str) -> str:
    try:
        relative = os.path.relpath(path)
    except ValueError:
        return path
    return relative if "://" not in path and not relative.startswith("..") else path


def _data_arguments(command: Train, job_name: str) -> dict[str, object]:
    """Arguments `data`, `eval_data` and `columns` for jobs that read files; text is converted first."""
    if not command.data:
        raise ConfigurationError("Found --eval-data without --data. Expected training files as well. Pass --data GLOB.")
    data, columns = _as_parquet(command.data, command.max_bad_lines)
    arguments: dict[str, object] = {"data": data}
    if command.eval_data:
        arguments["eval_data"], eval_columns = _as_parquet(command.eval_data, command.max_bad_lines)
        if eval_columns != columns:
            raise ConfigurationError("Found training and evaluation files with different columns. Expected the same.")
    if job_name == "criteo":
        arguments["columns"] = columns
    return arguments


def _as_parquet(patterns: Sequence[str], max_bad_lines: int) -> tuple[list[str], str]:
    """Parquet files for the given ones, and whose column names they have."""
    from jobs.criteo_files import prepare_files

    return prepare_files(patterns, cache_folder=Path(".data/criteo-text"), max_bad_lines=max_bad_lines, notice=print)
