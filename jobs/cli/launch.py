"""What `podembed train` and `resume` do between flags and the trainer.

`train` makes a run, `resume` opens one, and `jobs.cli.fitting` trains it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from podembed.jobs.built_in import parse_settings
from podembed.jobs.cli.data_arguments import data_arguments
from podembed.jobs.cli.fitting import command_began_s, fit_run
from podembed.jobs.cli.job_choice import job_reference
from podembed.jobs.cli.main import default_storage
from podembed.jobs.cli.settings import named_by_flags, parse_hosts, run_config, scaling_config
from podembed.jobs.cli.summary import command_name
from podembed.jobs.reporters.console import ConsoleReporter
from podembed.jobs.reporters.json_log import JsonReporter
from podembed.jobs.search_path import current_folder
from podembed.orchestrator.api.config import ConfigurationError, RunConfig, WarmStart
from podembed.orchestrator.api.policy_checks import check_hosts, check_policies
from podembed.orchestrator.commit.run_record import find_run
from podembed.orchestrator.events.reporter import Reporter, tell
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.workers.storage.store import Store

if TYPE_CHECKING:
    from podembed.jobs.cli.main import Resume, Train


def train(command: Train) -> int:
    """Begins a run and trains it to its end. Returns the exit code."""
    scaling = scaling_config(command, parse_hosts(command.hosts))
    with named_by_flags():
        RunConfig(name=command.name)
    run_config(command, steps=1)  # what is wrong with the flags should be known before a folder is made
    has_data = bool(command.data or command.eval_data)
    job_name = command.job or ("criteo" if has_data else "synthetic")
    given = {}
    if has_data:
        given = data_arguments(
            job_name, command.data, command.eval_data, max_bad_lines=command.max_bad_lines, notice=print
        )
    reference = job_reference(job_name, command.set, given)
    reporter = reporter_for(command.log)
    with _told(reporter, f"loading the job {job_name} and what it imports; a built-in one makes its data once"):
        job = reference.resolve()
    check_hosts(job, scaling)
    check_policies(job, run_config(command, steps=1, is_stale=job.staleness > 0))
    name = command.name or f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    storage = command.storage or default_storage()
    if not command.resume:
        _refuse_existing(f"{storage.rstrip('/')}/{name}")
    with _told(reporter, "reading the index of the data"):
        run = create_run(
            f"{storage.rstrip('/')}/{name}",
            job,
            reference,
            warm_start=_warm_start(command),
            single_writer=command.single_writer,
            take_over=command.resume,
            emit=partial(tell, reporter),
        )
    return fit_run(run, command, scaling, reporter)


@contextlib.contextmanager
def _told(reporter: Reporter, what: str) -> Iterator[None]:
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


def _refuse_existing(url: str) -> None:
    """`train` begins runs; going on with one is `resume`, which asks the run itself what it is."""
    if find_run(Store(url)) is not None:
        raise ConfigurationError(
            f"Found a run in {url}. Expected none, since train begins a new one. Type: {command_name()} resume "
            f"{shlex.quote(url)}; or choose another --name."
        )


def resume(command: Resume) -> int:
    """Goes on with a run. Returns the exit code."""
    run_config(command, steps=1)  # what is wrong with the flags should be known before the storage is touched
    reporter = reporter_for(command.log)
    with _told(reporter, "opening the run, loading its job and reading the index of its data"):
        run = open_run(
            command.run,
            job_folder=current_folder(),
            take_over=command.take_over,
            accept_input_change=command.accept_input_change,
            allow_ancestor=command.allow_ancestor,
            single_writer=command.single_writer,
            settings=parse_settings(command.set),
            emit=partial(tell, reporter),
        )
    head = run.newest_commit()
    hosts = parse_hosts(command.hosts) if command.hosts is not None else head.hosts if head else 1
    is_counted = not command.in_process and command.topology is None
    scaling = scaling_config(command, hosts if is_counted or command.hosts is not None else 1)
    return fit_run(run, command, scaling, reporter)


def reporter_for(log: Literal["text", "json"]) -> Reporter:
    """As `--log` wants it."""
    return JsonReporter() if log == "json" else ConsoleReporter(began_s=command_began_s())
