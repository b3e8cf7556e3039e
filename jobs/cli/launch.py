"""What `podembed train` and `podembed resume` do between flags and the trainer: defaults are chosen from the length of
the run, and the end is summed up.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from podembed.jobs.built_in import BUILT_IN_JOBS, parse_settings
from podembed.jobs.cli.data_arguments import data_arguments, plan_arguments
from podembed.jobs.cli.main import default_storage
from podembed.jobs.cli.summary import command_name, show_summary
from podembed.jobs.search_path import current_folder
from podembed.jobs.synthetic import DEFAULT_FOLDER
from podembed.orchestrator.api.config import (
    CheckpointConfig,
    ConfigurationError,
    RunConfig,
    ScalingConfig,
    WarmStart,
    check_policies,
)
from podembed.orchestrator.api.errors import EXIT_STOPPED
from podembed.orchestrator.api.intervals import epochs_of, whole_steps
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.commit.run_record import find_run
from podembed.orchestrator.decisions.table_plan import plan as plan_tables
from podembed.orchestrator.decisions.table_plan import render as render_plan
from podembed.orchestrator.decisions.table_plan import summary
from podembed.orchestrator.driver.console import ConsoleReporter
from podembed.orchestrator.inspect.inspect_run import format_bytes
from podembed.orchestrator.run.finished import finished
from podembed.orchestrator.run.policy_record import PolicyRecord, read_policies
from podembed.orchestrator.run.run import OpenRun, create_run, newest_commit, open_run
from podembed.orchestrator.trainer import check_hosts, fit
from podembed.workers.faults.plan import read_plan
from podembed.workers.job.job import JobReference
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

if TYPE_CHECKING:
    from podembed.jobs.cli.main import Plan, Resume, Train

COMMITS_A_RUN = 10
EVALUATIONS_A_RUN = 4
KEPT_COMMITS = 3
FEWEST_STEPS = 20  # between two commits or evaluations, unless a flag says otherwise


def train(command: Train) -> int:
    """Begins a run and trains it to its end. Returns the exit code."""
    scaling = _scaling(command, parse_hosts(command.hosts))
    _config(command, steps=1)  # what is wrong with the flags should be known before a folder is made
    has_data = bool(command.data or command.eval_data)
    job_name = command.job or ("criteo" if has_data else "synthetic")
    given = {}
    if has_data:
        given = data_arguments(
            job_name, command.data, command.eval_data, max_bad_lines=command.max_bad_lines, notice=print
        )
    reference = _reference(job_name, command.set, given)
    job = reference.resolve()
    check_hosts(job, scaling)
    check_policies(job, _config(command, steps=1))
    name = command.name or f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    storage = command.storage or default_storage()
    if not command.resume:
        _refuse_existing(f"{storage.rstrip('/')}/{name}")
    reporter = ConsoleReporter()
    with _told(reporter, "reading the index of the data"):
        run = create_run(
            f"{storage.rstrip('/')}/{name}",
            job,
            reference,
            warm_start=_warm_start(command),
            single_writer=command.single_writer,
        )
    run.take_over = command.resume
    return _fit(run, command, scaling, reporter)


@contextlib.contextmanager
def _told(reporter: ConsoleReporter, what: str) -> Iterator[None]:
    """Says what is being done; a terminal is as before when it is over, also after an error."""
    reporter.activity(what)
    try:
        yield
    finally:
        reporter.close()


def _warm_start(command: Train) -> WarmStart | None:
    if command.warm_start is not None:
        return WarmStart(source=command.warm_start, rules=command.warm_start_rules)
    if command.warm_start_rules:
        raise ConfigurationError(
            "Found --warm-start-rules without --warm-start. Expected a run to begin from. Pass --warm-start RUN."
        )
    return None


def _reference(job_name: str, settings: tuple[str, ...], given: dict[str, object]) -> JobReference:
    """The job's function with its arguments."""
    arguments = dict(parse_settings(settings)) | given
    if job_name == "synthetic":
        # The run record keeps the arguments, and a run may be resumed from another folder.
        arguments["folder"] = str(Path(str(arguments.get("folder", DEFAULT_FOLDER))).absolute())
    if job_name in BUILT_IN_JOBS:
        return JobReference(function=BUILT_IN_JOBS[job_name], arguments=arguments)
    return JobReference(function=job_name, arguments=arguments, folder=current_folder())


def plan(command: Plan) -> int:
    """Prints how tables would lie on so many hosts. Returns the exit code."""
    ScalingConfig(num_hosts=command.hosts)
    if command.run is None:
        job_name = command.job or ("criteo" if command.data else "synthetic")
        job = _reference(job_name, command.set, plan_arguments(job_name, command.data)).resolve()
        print(render_plan(plan_tables(job, num_hosts=command.hosts)))
        return 0
    if command.job or command.data or command.set:
        raise ConfigurationError(
            "Found RUN with --job, --data or --set. Expected one or the other: a run has its job recorded."
        )
    run = open_run(command.run, only_reads=True, job_folder=current_folder())
    base = newest_commit(run)
    previous = base.placement if base else None
    found = plan_tables(run.job, num_hosts=command.hosts, table_buckets=run.table_buckets, previous=previous)
    print(f"{base.hosts} hosts at commit {base.name}, {command.hosts} planned\n" if base else "no commit yet\n")
    print(render_plan(found))
    return 0


def _refuse_existing(url: str) -> None:
    """`train` begins runs; going on with one is `resume`, which asks the run itself what it is."""
    if find_run(Store(url)) is not None:
        raise ConfigurationError(
            f"Found a run in {url}. Expected none, since train begins a new one. Type: {command_name()} resume "
            f"{shlex.quote(url)}; "
            f"or choose another --name."
        )


def resume(command: Resume) -> int:
    """Goes on with a run. Returns the exit code."""
    _config(command, steps=1)  # what is wrong with the flags should be known before the storage is touched
    reporter = ConsoleReporter()
    with _told(reporter, "opening the run and reading the index of its data"):
        run = open_run(
            command.run,
            job_folder=current_folder(),
            take_over=command.take_over,
            accept_input_change=command.accept_input_change,
            allow_ancestor=command.allow_ancestor,
            single_writer=command.single_writer,
            settings=parse_settings(command.set),
        )
    head = newest_commit(run)
    hosts = parse_hosts(command.hosts) if command.hosts is not None else head.hosts if head else 1
    scaling = _scaling(command, 1 if command.in_process and command.hosts is None else hosts)
    return _fit(run, command, scaling, reporter)


def parse_hosts(text: str) -> int | tuple[int, int]:
    """`4`, or `2-8` for a range.

    Raises:
      ConfigurationError: it is neither.
    """
    least, separator, most = text.partition("-")
    if not least.isdecimal() or not (most.isdecimal() if separator else not most):
        raise ConfigurationError(f"Found --hosts {text}. Expected a number such as 4, or a range such as 2-8.")
    return (int(least), int(most)) if separator else int(least)


def parse_interval(flag: str, text: str, steps_per_epoch: int | None) -> int:
    """Steps of an interval: `500`, or epochs such as `1epoch`, `0.5epoch` and `2epochs`, which must be whole steps.

    Args:
      steps_per_epoch: None where it is not known yet; any number of epochs is whole then.

    Raises:
      ConfigurationError: it is neither, or no whole number of steps.
    """
    epochs = epochs_of(text)
    if epochs is None:
        try:
            return int(text)
        except ValueError as error:
            raise ConfigurationError(
                f"Found {flag} {text}. Expected steps such as 500, or epochs such as 1epoch or 0.5epoch."
            ) from error
    if epochs <= 0:
        raise ConfigurationError(f"Found {flag} {text}. Expected more than none, such as 1epoch.")
    return whole_steps(flag, epochs, steps_per_epoch or epochs.denominator, ConfigurationError)


def parse_resources(pairs: tuple[str, ...]) -> dict[str, float] | None:
    """`CPU=8 GPU=1` as Ray has it; None without any.

    Raises:
      ConfigurationError: a pair that is not a name and a number of at least 0.
    """
    resources: dict[str, float] = {}
    for pair in pairs:
        name, _, amount = pair.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = -1.0
        if not name or not 0 <= resources[name] < math.inf:
            raise ConfigurationError(
                f"Found --resources {pair}. Expected a resource of Ray and its amount for each host, such as CPU=8 "
                "GPU=1."
            )
    return resources or None


def _scaling(command: Train | Resume, hosts: int | tuple[int, int]) -> ScalingConfig:
    return ScalingConfig(
        num_hosts=hosts,
        threads_per_host=command.threads_per_host,
        resources_per_host=parse_resources(command.resources),
        in_process=command.in_process,
    )


def _config(
    command: Train | Resume, *, steps: int, recorded: PolicyRecord | None = None, steps_per_epoch: int | None = None
) -> RunConfig:
    """The policies that the flags ask for, with defaults for a run of so many steps.

    Args:
      recorded: what the run has kept so far; flags go before it.
      steps_per_epoch: None before it is known, when only the form of the flags is checked.

    Raises:
      ConfigurationError: a flag is out of its range.
    """

    def spread(flag: str, asked: str | None, parts: int) -> int:
        return max(FEWEST_STEPS, -(-steps // parts)) if asked is None else parse_interval(flag, asked, steps_per_epoch)

    def given(flag: str, asked: str | None) -> int | None:
        return None if asked is None else parse_interval(flag, asked, steps_per_epoch)

    keep, keep_best = command.keep, command.keep_best
    keep_every: int | str | None = given("--keep-every", command.keep_every)
    on_best = bool(keep_best)
    if recorded is not None:
        # None in the record keeps all commits.
        keep = recorded.num_to_keep if keep is None else keep
        keep_every = recorded.keep_every_steps if keep_every is None else keep_every
        on_best = recorded.on_best if keep_best is None else on_best
        keep_best = recorded.keep_best if keep_best is None else keep_best
    elif keep is None:
        keep = KEPT_COMMITS
    # Of a run that has kept nothing by a metric so far, the recorded one is only the default of its time.
    is_used = recorded is not None and recorded.config.uses_metric
    metric = command.metric or (recorded.metric if recorded and is_used else None)
    by_clock_alone = command.checkpoint_seconds is not None and command.checkpoint_every is None
    return RunConfig(
        checkpoint_config=CheckpointConfig(
            every_steps=None
            if by_clock_alone
            else spread("--checkpoint-every", command.checkpoint_every, COMMITS_A_RUN),
            every_seconds=command.checkpoint_seconds,
            on_best=on_best,
            metric=metric,
            metric_order=recorded.config.metric_order if recorded and metric == recorded.metric else None,
            num_to_keep=keep,
            keep_every_steps=keep_every,
            keep_best=keep_best or 0,
            full_every=command.full_every,
        ),
        eval_every_steps=spread("--eval-every", command.eval_every, EVALUATIONS_A_RUN),
        max_steps=given("--max-steps", command.max_steps),
        fault_plan=None if command.fault_plan is None else read_plan(command.fault_plan),
    )


def _fit(run: OpenRun, command: Train | Resume, scaling: ScalingConfig, reporter: ConsoleReporter) -> int:
    config = _config(
        command,
        steps=run.total_steps,
        recorded=_recorded_policies(run, reporter),
        steps_per_epoch=run.input_plan.steps_per_epoch,
    )
    started = time.monotonic()
    result = finished(run, config)
    if result is not None and run.settings_before is not None:
        reporter.notice(
            "settings not changed: no step is left to train with them. Give --set epochs=N, or a larger --max-steps"
        )
    if result is None:
        _introduce(run, scaling.least_hosts, reporter)
        result = fit(run, scaling=scaling, config=config, reporter=reporter)
    is_whole = result.stopped_by is None and result.step >= run.total_steps
    seconds = time.monotonic() - started
    show_summary(run, result, seconds=seconds, is_whole=is_whole, config=config.checkpoint_config)
    return EXIT_STOPPED if result.stopped_by else 0


def _recorded_policies(run: OpenRun, reporter: ConsoleReporter) -> PolicyRecord | None:
    """What the run has kept so far. Where the record is damaged, a record that keeps all: what it kept must not be
    deleted.
    """
    try:
        return read_policies(run.store)
    except DocumentRefused as error:
        reporter.notice(
            f"the record of which commits stay is damaged and ignored: {error.name} ({error.found}). All commits stay, "
            "unless flags say "
            f"otherwise (--keep, --keep-every, --keep-best)"
        )
        return PolicyRecord.of(CheckpointConfig(num_to_keep=None), generation=0)


def _introduce(run: OpenRun, num_hosts: int, reporter: ConsoleReporter) -> None:
    job = run.job
    rows = sum(table.num_rows for table in run.record.tables)
    size = sum(4 * table.num_rows * (table.dim + sum(table.slots.values())) for table in run.record.tables)
    evaluated = f", {run.eval_index.num_rows:,} for evaluation" if run.eval_index else ", none for evaluation"
    reporter.notice(f"job {job.name}: {run.train_index.num_rows:,} training samples{evaluated}")
    reporter.notice(
        f"{plural(len(run.record.tables), 'table')}, {rows:,} rows, {format_bytes(size)} with slots; batch "
        f"{job.batch_size:,}, "
        f"{plural(job.num_epochs, 'epoch')}"
    )
    reporter.notice(summary(plan_tables(job, num_hosts=num_hosts, table_buckets=run.table_buckets)))
    if job.best_auc is not None:
        reporter.notice(f"best reachable AUC on the evaluation samples: {job.best_auc:.4f} (the planted model's own)")
