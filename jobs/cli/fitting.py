"""From an open run to its summary: what `train` and `resume` have in common once the run is there."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from podembed.jobs.cli.settings import run_config
from podembed.jobs.cli.summary import show_summary
from podembed.jobs.fitting import fit
from podembed.jobs.search_path import is_the_command
from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.api.run_errors import EXIT_STOPPED
from podembed.orchestrator.api.text import format_bytes, plural
from podembed.orchestrator.decisions.table_plan import summary
from podembed.orchestrator.events.reporter import Reporter, tell
from podembed.orchestrator.planning.recorded import planned
from podembed.orchestrator.run.finished import finished
from podembed.orchestrator.run.policy_record import policies_to_keep
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.liveness.process_statistics import process_age_s

if TYPE_CHECKING:
    from podembed.jobs.cli.main import Resume, Train


def fit_run(run: OpenRun, command: Train | Resume, scaling: ScalingConfig, reporter: Reporter) -> int:
    config = run_config(
        command,
        steps=run.total_steps,
        recorded=policies_to_keep(run.store, partial(tell, reporter)),
        steps_per_epoch=run.input_plan.steps_per_epoch,
        is_stale=run.job.staleness > 0,
    )
    started = command_began_s()
    result = finished(run, config, run.newest_commit())
    if result is not None and run.settings_before is not None:
        reporter.notice(
            "settings not changed: no step is left to train with them. Give --set epochs=N, or a larger --max-steps"
        )
    if result is None:
        introduce(run, scaling, reporter)
        result = fit(run, scaling=scaling, config=config, reporter=reporter)
    is_whole = result.stopped_by is None and (result.step >= run.total_steps or result.stopped_early is not None)
    seconds = time.monotonic() - started
    show_summary(
        run,
        result,
        reporter,
        seconds=seconds,
        is_whole=is_whole,
        config=config.checkpoint_config,
        scaling=scaling,
    )
    return EXIT_STOPPED if result.stopped_by else 0


def command_began_s() -> float:
    """The moment of the command, by `time.monotonic`: this process began then, but for a program that uses the command
    line.
    """
    return time.monotonic() - (process_age_s() if is_the_command() else 0.0)


def introduce(run: OpenRun, scaling: ScalingConfig, reporter: Reporter) -> None:
    job = run.job
    rows = sum(table.num_rows for table in run.record.tables)
    size = sum(4 * table.num_rows * (table.dim + sum(table.slots.values())) for table in run.record.tables)
    evaluated = f", {run.eval_index.num_rows:,} for evaluation" if run.eval_index else ", none for evaluation"
    reporter.notice(f"job {job.name}: {run.train_index.num_rows:,} training samples{evaluated}")
    reporter.notice(
        f"{plural(len(run.record.tables), 'table')}, {rows:,} rows, {format_bytes(size)} with slots; batch "
        f"{job.batch_size:,}, {plural(job.num_epochs, 'epoch')}"
    )
    # The places of others are told when the devices are known.
    if all(table.place != "auto" for table in job.tables):
        placed = planned(
            run,
            run.newest_commit(),
            num_hosts=scaling.least_hosts,
            parts_per_host=scaling.devices.sample_multiple,
        )
        at_least = "" if not scaling.is_range else f" (on {plural(scaling.least_hosts, 'host')})"
        reporter.notice(f"{summary(placed)}{at_least}")
    if job.best_auc is not None:
        reporter.notice(f"best reachable AUC on the evaluation samples: {job.best_auc:.4f} (the planted model's own)")
