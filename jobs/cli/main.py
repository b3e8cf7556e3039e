"""The command line: `podembed train | resume | plan | compile | inspect | prepare` and those of `jobs.cli.tools`.
Also as `python -m podembed`.

It turns flags into a job and its settings, calls the trainer, and turns outcomes into exit codes and words. It decides
nothing about training.
"""

from __future__ import annotations

# Before all others, which could be found in the current folder until it is off the search path.
import podembed.jobs.search_path  # noqa: F401

# isort: split

# Before what takes time: a signal that nobody has taken over ends the program without a word.
from podembed.jobs.command_signals import COMMAND_SIGNALS

# isort: split

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from podembed.jobs.chaos import command as chaos
from podembed.jobs.check_device import command as check_device
from podembed.jobs.cli import preflight, repeated, supervise, tools
from podembed.jobs.cli.unknown import unknown_in
from podembed.jobs.prepare import command as prepare_command
from podembed.version import describe, pages

EXIT_USAGE = 2  # as of flags that are not known
MOST_EXPECTED = 16  # hosts of one machine, in a run that goes on
EXIT_NO_READER = 141  # what a shell reports of a program that SIGPIPE ended


@dataclass(frozen=True, kw_only=True)
class _Training:
    """Flags of every command that trains."""

    threads_per_host: int | None = None
    """Threads of a host's kernels and CPU device."""
    resources: tuple[str, ...] = ()
    """Ray resources reserved for each host, such as CPU=8 GPU=1 or CPU=100 TPU=4. By default a part of the CPUs, and
    models run there.
    """
    topology: str | None = None
    """Topology of a TPU slice, such as 4x4: train on whole slices, with a host on each machine."""
    accelerator_type: str | None = None
    """Generation of the slices' chips, such as TPU-V6E."""
    slices: str | None = None
    """Slices that train together, a number or a range such as 1-4; one by default."""
    platform: str | None = None
    """cpu runs models on CPUs although accelerators are reserved, as on machines that only pretend to have some."""
    ask_cluster: bool = False
    """Ask the cluster's autoscaler for the most hosts or slices while the run lasts."""
    devices_per_host: int | None = None
    """Devices of each host's model. Where it runs on CPUs, so many are made. Default: all that are there."""
    mesh: tuple[str, ...] = ()
    """Axes of a host's devices, such as data=2,model=2, for models that declare how their parameters are cut."""
    sparse_cores: bool = False
    """Let SparseCores of the chips look sharded tables up, with jax-tpu-embedding: see docs/sparsecore.md."""
    in_process: bool = False
    """One host in this process, without Ray."""
    single_writer: bool = False
    """Accept a storage that cannot create files exclusively. Nothing stops a second driver then: see
    docs/operations.md.
    """
    checkpoint_every: str | None = None
    """Steps between commits, or epochs such as 1epoch or 0.5epoch; by default about ten per run, 5 s apart at least."""
    checkpoint_seconds: float | None = None
    """Seconds between commits, instead of steps or besides them."""
    keep: int | None = None
    """Newest commits kept. Default: as the run has kept them so far, at first 3."""
    keep_every: str | None = None
    """Also keep the first commit at or after each multiple of so many steps, or epochs such as 1epoch. Default: as so
    far, at first none.
    """
    keep_best: int | None = None
    """Also keep the K commits with the best --metric, and commit after each evaluation that is the best so far.
    Default: as so far, at first none.
    """
    metric: str | None = None
    """What best means: auc, log_loss, loss, or a metric of the job. Default: as so far, at first auc, or loss where the
    job declares one.
    """
    full_every: int = 1
    """Every so many commits hold all rows, those between only the rows that changed since the commit before."""
    eval_every: str | None = None
    """Steps between evaluations, or epochs such as 1epoch, where there is evaluation data; by default about four per
    run.
    """
    max_steps: str | None = None
    """Stop after this many steps of the whole run, or epochs such as 1epoch."""
    log: Literal["text", "json"] = "text"
    """json writes one object a line, for programs that gather logs."""
    metrics_port: int | None = None
    """Port of this machine where Prometheus scrapes the run's measurements. Default: none."""
    tensorboard: str | None = None
    """Folder of this machine for TensorBoard's event files of the run. Default: none."""
    tensorboard_all: bool = False
    """Write every series to --tensorboard, of each host, table and input, and not only about 30 that sum them up."""
    trace: str | None = None
    """Steps to trace, such as 20:25 for 20 to 24, or 20:25+jax: see docs/observability.md. Default: none."""
    fault_plan: str | None = None
    """Inject the faults of this file: see `podembed chaos`."""


@dataclass(frozen=True, kw_only=True)
class _NewRun:
    """Flags of a new run, which come first in the help."""

    job: str | None = None
    """`synthetic`, `criteo`, `movielens`, `drift`, one of docs/models.md such as `ncf`, or package.module:function that
    returns a JobConfig; by default criteo with --data, else synthetic.
    """
    data: tuple[str, ...] = ()
    """Training files or globs. criteo: text in Kaggle or 1TB form, plain or .gz, or Parquet; movielens, ncf and the
    like: the folder of ratings. Quote globs.
    """
    eval_data: tuple[str, ...] = ()
    """Evaluation files or globs."""
    max_bad_lines: int = 10
    """Malformed lines of text input that are put aside and named before the run refuses the files."""
    set: tuple[str, ...] = ()
    """Arguments of the job's function as name=value, values in JSON: --set epochs=2 learning_rate=0.02."""
    hosts: str = "1"
    """Hosts that train together: a number, or a range such as 2-8 for as many as the cluster has room for. Of a range,
    each machine has one host, or as many as --resources lets it have. A number of hosts on one machine share it.
    """
    name: str | None = None
    """Folder of the run below --storage, such as clicks or team/clicks; by default the job's name and the time."""
    warm_start: str | None = None
    """Begin from another run's newest commit, or from RUN@COMMIT, instead of with initial values."""
    warm_start_rules: tuple[str, ...] = ()
    """What is meant where its tables differ: TABLE=grow, TABLE=reinit, TABLE=rows, TABLE=rename=OLD, OLD=drop,
    @dense=params, @dense=reinit, @accept=TABLE.
    """
    storage: str | None = None
    """Where runs lie: a folder, or an fsspec URL such as gs://bucket/runs, that every host reaches. Default: .runs"""
    resume: bool = False
    """Go on with the run called --name if it is there already, also if its driver seems to be alive."""


@dataclass(frozen=True, kw_only=True)
class Train(_Training, _NewRun):
    """Begin a new run.

    Without --data, the built-in job `synthetic` trains DLRM on a generated Criteo-shaped set whose best reachable AUC
    is known.
    """


@dataclass(frozen=True, kw_only=True)
class _OldRun:
    """Flags of a run that goes on."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run."""
    set: tuple[str, ...] = ()
    """Arguments of the job that change from here on, as name=value: --set learning_rate=0.02 epochs=3. What changes
    shapes is refused.
    """
    hosts: str | None = None
    """Hosts, a number or a range such as 2-8; by default as many as the last commit had."""
    take_over: bool = False
    """Fence another driver that still holds the run."""
    allow_ancestor: bool = False
    """If the newest commit is damaged, go back to the newest one that is not; the steps since are done again."""
    accept_input_change: bool = False
    """Go on although data files changed since the run began, or what the job's code makes of columns and rows; row
    groups and vocabularies must still mean the same steps.
    """


@dataclass(frozen=True, kw_only=True)
class Resume(_Training, _OldRun):
    """Go on from the last commit of a run, with the same or another number of hosts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Show how tables would lie on so many hosts and why, what a step asks of them, and what memory and messages that
    takes. Starts no training; reads a batch of the data where that is at hand.

    With RUN: what `resume` on so many hosts would move. Without: a new run of the job.
    """

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """Folder or URL of a run."""
    job: str | None = None
    """As for train."""
    data: tuple[str, ...] = ()
    """As for train."""
    set: tuple[str, ...] = ()
    """As for train."""
    hosts: int = 1
    """Hosts to plan for."""
    topology: str | None = None
    """Topology of a TPU slice, such as 4x4: plan for whole slices, with a host on each machine."""
    accelerator_type: str | None = None
    """Generation of the slices' chips, such as TPU-V6E."""
    slices: int = 1
    """Slices to plan for."""
    devices_per_host: int | None = None
    """Devices of each host, which matters to tables that are cut over devices. With slices it is known."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """List a run's commits and tables, and how to read a table without podembed."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Resume, tyro.conf.subcommand("resume")]
    | Annotated[supervise.Supervise, tyro.conf.subcommand("supervise")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[preflight.Compile, tyro.conf.subcommand("compile")]
    | Annotated[check_device.CheckDevice, tyro.conf.subcommand("check-device")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[prepare_command.Prepare, tyro.conf.subcommand("prepare")]
    | Annotated[chaos.Chaos, tyro.conf.subcommand("chaos")]
    | tools.ToolCommand
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exits with 0 when all steps are done, else with a code of `orchestrator.api.run_errors`."""
    try:
        try:
            _main(arguments)
        finally:
            # Here, where a closed pipe can be met; at the interpreter's end it would print a traceback.
            sys.stdout.flush()
    except BrokenPipeError:
        # As after `| head`: who read the output has enough of it. What is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_NO_READER)


def _main(arguments: list[str] | None) -> None:
    own, supervised = supervise.split(sys.argv[1:] if arguments is None else arguments)
    if own[:1] == ["--version"]:
        if len(own) > 1 or supervised:
            print(f"podembed: Found {' '.join(own[1:])} behind --version. Expected nothing.", file=sys.stderr)
            sys.exit(EXIT_USAGE)
        print(describe())
        sys.exit(0)
    own = _gathered(own)
    command = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType]
        prog="podembed",
        description="Train JAX models whose embedding tables outgrow one machine. With --version: say which version "
        f"this is. Pages such as docs/operations.md lie in {pages()}.",
        args=own,
    )
    if isinstance(command, supervise.Supervise):
        command = replace(command, command=(*command.command, *supervised))
    elif supervised:
        sys.exit(f"podembed: Found `--` before {' '.join(supervised)!r}. Expected it only after supervise.")
    sys.exit(_run(command))


def _gathered(arguments: list[str]) -> list[str]:
    """See `jobs.cli.unknown` and `jobs.cli.repeated`."""
    kinds = {note.name: kind for kind, note in map(get_args, get_args(Command))}
    if (unknown := unknown_in(arguments, kinds)) is not None:
        print(f"podembed: {unknown}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    if not arguments or arguments[0] not in kinds:
        return arguments
    from podembed.orchestrator.api.config import ConfigurationError

    try:
        return [arguments[0], *repeated.gathered(arguments[1:], kinds[arguments[0]])]
    except ConfigurationError as error:
        print(f"podembed: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _run(command: Any) -> int:
    with _early_ray(command):
        return _run_beside(command)


def _early_ray(command: Any) -> contextlib.AbstractContextManager[None]:
    """Where a command will need a Ray cluster of its own, that one starts while the program is loaded."""
    if not isinstance(command, Train | Resume) or command.in_process or command.topology is not None:
        return contextlib.nullcontext()
    # As many as the last commit had, where none are given; there is room for that number.
    hosts = (command.hosts or str(MOST_EXPECTED)).partition("-")[0]
    if not hosts.isdecimal():
        return contextlib.nullcontext()
    from podembed.orchestrator.cluster.own_cluster import begun_early

    return begun_early(int(hosts))


def _run_beside(command: Any) -> int:
    # Imported late: `--help` should not wait for JAX.
    from podembed.jobs import outcomes
    from podembed.orchestrator.cluster import connection as ray_connection

    if isinstance(command, Train | Resume):
        from podembed.jobs.cli import launch  # noqa: F401
    COMMAND_SIGNALS.begin()
    code = outcomes.exit_code(lambda: _unless_ended(command))
    COMMAND_SIGNALS.leave_with(code)
    if ray_connection.is_left_behind():
        # All that is the program's is closed; the interpreter's end would wait for Ray's threads, and they for a head
        # that is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _unless_ended(command: Any) -> int:
    try:
        return _dispatch(command)
    except BaseException:
        # A library may make an error of its own of the interrupt, as where its import was cut short.
        if (code := COMMAND_SIGNALS.exit_code) is None:
            raise
        return code


def _dispatch(command: Any) -> int:
    _refuse_empty(command)
    if isinstance(command, chaos.Chaos):
        return chaos.run(command, command_line=main)
    if isinstance(command, tools.Tool):
        return tools.run(command)
    if isinstance(command, supervise.Supervise):
        return supervise.run(command)
    if isinstance(command, preflight.Compile):
        return preflight.compile_job(command, os.environ)
    if isinstance(command, check_device.CheckDevice):
        return check_device.run(command, os.environ, monotonic_s=time.monotonic)
    if isinstance(command, prepare_command.Prepare):
        return prepare_command.run(command)
    if isinstance(command, Inspect):
        from podembed.orchestrator.api.run_errors import EXIT_CONFIGURATION
        from podembed.orchestrator.run.reference import open_run_store
        from podembed.tools.inspect.inspect_run import describe, render

        description = describe(open_run_store(command.run), now_unix_s=time.time())
        print(render(description))
        return 0 if description.record else EXIT_CONFIGURATION
    from podembed.jobs.cli import launch, planning

    run: Any = {Plan: planning.plan, Train: launch.train, Resume: launch.resume}[type(command)]
    return run(command)


def _refuse_empty(command: Any) -> None:
    """A flag with an empty value is mostly a variable of a script that is not set; it must not count as left out.

    Raises:
      ConfigurationError: it names the flag.
    """
    from podembed.orchestrator.api.config import ConfigurationError

    if isinstance(command, supervise.Supervise):
        return  # what it runs may take empty arguments
    for name, annotation in get_type_hints(type(command), include_extras=True).items():
        value = getattr(command, name, None)
        if value == "" or (isinstance(value, tuple) and "" in value):
            flag = name.upper() if "Positional" in str(annotation) else "--" + name.replace("_", "-")
            raise ConfigurationError(f"Found {flag} ''. Expected a value. Leave it out, or set the variable behind it.")


def default_storage() -> str:
    """`.runs` here; in a Ray job, whose working folder is a copy that Ray deletes, a folder in the home."""
    return os.path.expanduser("~/.podembed/runs") if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") else ".runs"


if __name__ == "__main__":
    main()
