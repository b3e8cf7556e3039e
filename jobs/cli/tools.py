"""The commands that look at a run's commits or tidy them: `podembed fsck | diff | export | extract | compact | prune`.

None of them trains or needs JAX. What they do is in `orchestrator`; here are their flags and what they print.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from podembed.orchestrator.run.policy_record import PolicyRecord

EXIT_DIFFERENT = 1


@dataclass(frozen=True, kw_only=True)
class Fsck:
    """Read every byte of a run's commits, or of checkpoints saved step by step, and say what is damaged.

    Changes nothing. Exits with 1 if anything is.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run; or of one checkpoint of the step-by-step mode, or of those called ckpt-N."""
    commit: str | None = None
    """Check this commit alone."""
    all: bool = False
    """Also check commits that do not count."""
    values: bool = False
    """Also look for NaN and infinity in the newest commit, or in that of --commit. They are told, but are no damage."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Say what differs between two commits, of one run or of two. Exits with 1 if their states differ."""

    one: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """A run, for its newest commit, or RUN@COMMIT."""
    other: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """The same, for the commit to compare with."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a table to a file for other programs, rows in order, without holding the table in memory."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    table: str
    """Name of the table."""
    out: str
    """File to write; it appears when it is complete."""
    format: Literal["npy", "parquet", "safetensors"] = "npy"
    """npy: one array, or records with --slots. parquet: columns id, rows and the slots. safetensors: tensors rows and
    the slots.
    """
    slots: bool = False
    """Also write the optimizer's state."""
    commit: str | None = None
    """Commit to read; by default the newest that counts."""
    force: bool = False
    """Replace a file that is there."""


@dataclass(frozen=True, kw_only=True)
class Extract:
    """Print single rows of a table, reading only the buckets in which they lie."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    table: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")]
    """Name of the table."""
    ids: Annotated[tuple[int, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ID...")]
    """Numbers of rows."""
    slots: bool = True
    """Also print the optimizer's state."""
    commit: str | None = None
    """Commit to read; by default the newest that counts."""


@dataclass(frozen=True, kw_only=True)
class Compact:
    """Write the newest commit of a run whole, where it is a chain of deltas. No driver may be at work."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run."""
    single_writer: bool = False
    """Accept a storage that cannot create files exclusively, where nothing keeps a driver out meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Delete old commits and leftovers of a run. No driver may be at work."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run."""
    keep: int
    """Newest commits to keep, at least 2. Others go, unless one of the next two asks for them."""
    keep_every: str | None = None
    """Also keep the first commit at or after each multiple of so many steps, or epochs such as 1epoch. Default: as the
    run does; 0 for none.
    """
    keep_best: int | None = None
    """Also keep so many commits with the best metric. Default: as the run does; 0 for none."""
    single_writer: bool = False
    """Accept a storage that cannot create files exclusively, where nothing keeps a driver out meanwhile."""


Tool = Fsck | Diff | Export | Extract | Compact | Prune

ToolCommand = (
    Annotated[Fsck, tyro.conf.subcommand("fsck")]
    | Annotated[Diff, tyro.conf.subcommand("diff")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Extract, tyro.conf.subcommand("extract")]
    | Annotated[Compact, tyro.conf.subcommand("compact")]
    | Annotated[Prune, tyro.conf.subcommand("prune")]
)


def run(command: Tool) -> int:
    """Carries out a command and returns its exit code.

    Raises:
      ConfigurationError, StorageError, RunIsHeld: see `orchestrator.outcomes` for the words and codes.
    """
    match command:
        case Fsck():
            return _fsck(command)
        case Diff():
            return _diff(command)
        case Export():
            return _export(command)
        case Extract():
            return _extract(command)
        case Compact():
            return _compact(command)
        case Prune():
            return _prune(command)


def _fsck(command: Fsck) -> int:
    from podembed.orchestrator.inspect.fsck import check_run, render
    from podembed.orchestrator.run.reference import is_run
    from podembed.workers.stepwise.checkpoint import saved_paths
    from podembed.workers.storage.store import Store

    saved = [] if is_run(Store(command.run)) else saved_paths(command.run)
    if saved:
        return _fsck_saved(command, saved)
    check = check_run(
        command.run,
        commit=command.commit,
        include_uncounted=command.all,
        on_commit=lambda checked: print(f"read {checked.name}", file=sys.stderr),
    )
    print(render(check))
    if not check.is_intact:
        return EXIT_DIFFERENT
    if command.values:
        _tell_values(command.run, command.commit)
    return 0


def _fsck_saved(command: Fsck, paths: list[str]) -> int:
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.orchestrator.inspect.fsck_saved import check_saves, render

    if command.commit is not None or command.all or command.values:
        raise ConfigurationError(
            f"Found --commit, --all or --values for {command.run}, which holds checkpoints of the step-by-step mode. "
            "Expected a run for them, since "
            "only runs have commits. Leave the flags out."
        )
    checked = check_saves(paths, on_save=lambda save: print(f"read {save.location}", file=sys.stderr))
    print(render(checked))
    return 0 if all(save.is_intact for save in checked) else EXIT_DIFFERENT


def _tell_values(run: str, commit: str | None) -> None:
    from podembed.orchestrator.inspect.scan_values import scan_values
    from podembed.orchestrator.run.reference import open_commit

    state = open_commit(run, commit=commit)
    findings = scan_values(state)
    print(f"\nValues of {state.manifest.name}: {'all finite' if not findings else 'NOT ALL FINITE'}")
    for finding in findings:
        print(f"  {finding.describe()}")


def _diff(command: Diff) -> int:
    from podembed.orchestrator.inspect.diff import diff, render
    from podembed.orchestrator.run.reference import open_commit

    difference = diff(open_commit(command.one), open_commit(command.other))
    print(render(difference))
    return 0 if difference.is_equal else EXIT_DIFFERENT


def _export(command: Export) -> int:
    from podembed.orchestrator.api.text import printable
    from podembed.orchestrator.inspect.describe import export
    from podembed.orchestrator.inspect.inspect_run import format_bytes
    from podembed.orchestrator.run.reference import open_commit

    written = export(
        open_commit(command.run, commit=command.commit),
        command.table,
        format=command.format,
        out=command.out,
        with_slots=command.slots,
        force=command.force,
    )
    arrays = ", ".join(f"{name} [{written.num_rows}, {width}]" for name, width in written.widths.items())
    size = format_bytes(written.size_bytes)
    print(printable(f"{written.path}: {arrays} of table '{written.table}' at {written.commit}, {size}"))
    return 0


def _extract(command: Extract) -> int:
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.orchestrator.inspect.extract import extract, render
    from podembed.orchestrator.run.reference import open_commit

    if not command.ids:
        raise ConfigurationError(
            "Found no row number. Expected at least one. Add some: podembed extract RUN TABLE 7 42."
        )
    state = open_commit(command.run, commit=command.commit)
    print(render(extract(state, command.table, command.ids, with_slots=command.slots)))
    return 0


def _compact(command: Compact) -> int:
    from podembed.orchestrator.inspect.compact import compact
    from podembed.orchestrator.inspect.inspect_run import format_bytes

    manifest = compact(command.run, single_writer=command.single_writer)
    print(f"{manifest.name} is a full commit of {format_bytes(manifest.size_bytes)}")
    return 0


def _prune(command: Prune) -> int:
    from podembed.orchestrator.api.config import CheckpointConfig
    from podembed.orchestrator.inspect.inspect_run import format_bytes
    from podembed.orchestrator.inspect.prune import prune

    also, recorded = None, _recorded_policies(command)
    if command.keep_every is not None or command.keep_best is not None:
        own = CheckpointConfig() if recorded is None else recorded.config
        also = CheckpointConfig(
            keep_every_steps=own.keep_every_steps if command.keep_every is None else _keep_every(command),
            keep_best=own.keep_best if command.keep_best is None else command.keep_best,
            metric=own.metric,
            metric_order=own.metric_order,
        ).keep_policies
    removal = prune(
        command.run,
        num_to_keep=command.keep,
        also=also,
        single_writer=command.single_writer,
    )
    for name in removal.commits:
        print(f"deleted commit {name}")
    for name in sorted(set(removal.attempts) - set(removal.commits)):
        print(f"deleted attempt {name}")
    print(f"{removal.num_files:,} files, {format_bytes(removal.num_bytes)} deleted")
    return 0


def _keep_every(command: Prune) -> int | None:
    """The steps of `--keep-every`; None for 0.

    Raises:
      ConfigurationError: it is neither steps nor whole steps of the run's epochs.
    """
    from podembed.jobs.cli.launch import parse_interval
    from podembed.orchestrator.api.intervals import epochs_of
    from podembed.orchestrator.commit.run_record import read_run
    from podembed.orchestrator.run.reference import open_run_store

    text = command.keep_every or ""
    # The record is needed for nothing else, so where it is damaged steps will still do.
    is_epochs = epochs_of(text) is not None
    steps_per_epoch = read_run(open_run_store(command.run)).steps_per_epoch if is_epochs else None
    return parse_interval("--keep-every", text, steps_per_epoch) or None


def _recorded_policies(command: Prune) -> PolicyRecord | None:
    """What the run keeps besides its newest commits.

    Raises:
      ConfigurationError: the record is damaged, and the flags do not say it.
    """
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.orchestrator.run.policy_record import read_policies
    from podembed.orchestrator.run.reference import open_run_store
    from podembed.workers.storage.strict_json import DocumentRefused

    try:
        return read_policies(open_run_store(command.run))
    except DocumentRefused as error:
        if command.keep_every is not None and command.keep_best == 0:
            return None
        raise ConfigurationError(
            f"Found {error.found} in {error.name}. Expected the record of which commits the run keeps besides its "
            "newest. Say it with --keep-every N "
            f"(0 for none) and --keep-best 0; which metric was to be best, nobody knows any more."
        ) from error
