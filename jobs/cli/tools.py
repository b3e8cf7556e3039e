"""The commands that look at a run or tidy its commits: `podembed fsck | health | diff | export | import | extract |
compact | forget | prune`.

None of them trains, and those here need no JAX. `jobs.cli.scoring` has the ones that score data, `jobs.cli.watching`
those that show a run. Here are their flags.
`jobs.cli.looking` and `jobs.cli.tidying` call the tools of `tools.inspect` and print what they answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from podembed.jobs.cli import publishing, scoring, watching

EXIT_ALARM = 1


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
    """Also look for NaN and infinity in the newest commit, or in that of --commit. They are reported, but no damage."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """Say what a run's measurements show to be wrong, with numbers and remedies. Also of one that trains.

    Changes nothing. Exits with 1 if an alarm stands.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Say what differs between two commits, of one run or of two. Exits with 1 if their states differ."""

    one: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """A run, for its newest commit, or RUN@COMMIT."""
    other: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """The same, for the commit to compare with."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a table to a file for other programs, rows in order, without holding the table in memory. With --layout
    sparsecore: write tables as jax-tpu-embedding lays them out, for `podembed import` and docs/sparsecore.md.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    table: str | None = None
    """Name of the table. With --layout sparsecore all tables by default."""
    out: str
    """File to write, or folder with --layout; it appears when it is complete."""
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
    layout: Literal["rows", "sparsecore"] = "rows"
    """rows: in order, in one file. sparsecore: stacked, rotated and sharded, in a folder."""
    chips: int | None = None
    """TPU chips of the model that will train the tables; with --layout sparsecore."""
    cores: int | None = None
    """SparseCores of a chip: 4 of v5p, 2 of v6e and 7x."""
    stack: tuple[str, ...] = ()
    """Tables that share a stack, in its order: --stack users,items ads,queries. Others have a stack of their own."""
    spec: str | None = None
    """A model's own layout, in place of --chips, --cores and --stack: a file with its EmbeddingSpecProto."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a run with one commit of tables in the layout of jax-tpu-embedding, for `podembed train --warm-start`."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """What `podembed export --layout sparsecore` wrote, or a program in its form; see docs/sparsecore.md."""
    out: str
    """Folder or URL of the run, where there is none yet."""
    single_writer: bool = False
    """Accept a storage that cannot create files exclusively."""


@dataclass(frozen=True, kw_only=True)
class Extract:
    """Print single rows of a table, reading only the buckets in which they lie."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    table: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")]
    """Name of the table."""
    ids: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ID...")]
    """Numbers of rows; of a table with a capacity keys, numbers or texts ('text:7' is the text of a number)."""
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
class Forget:
    """Remove keys of a table with a capacity: a newest commit without them. No driver may be at work.

    Older commits that still hold one are listed; `podembed prune --holding` deletes them.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run."""
    table: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")]
    """Name of the table."""
    keys: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="KEY...")]
    """Numbers or texts ('text:7' is the text of a number)."""
    single_writer: bool = False
    """Accept a storage that cannot create files exclusively, where nothing keeps a driver out meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Delete old commits and leftovers of a run. No driver may be at work."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run."""
    keep: int | None = None
    """Newest commits to keep, at least 2. Others go, unless one of the next two asks for them."""
    holding: tuple[str, ...] = ()
    """A table with a capacity and some of its keys: --holding items 42 shoes. Commits that hold one of them go,
    whatever would keep them. Without --keep all others stay.
    """
    keep_every: str | None = None
    """Also keep the first commit at or after each multiple of so many steps, or epochs such as 1epoch. Default: as the
    run does; 0 for none.
    """
    keep_best: int | None = None
    """Also keep so many commits with the best metric. Default: as the run does; 0 for none."""
    single_writer: bool = False
    """Accept a storage that cannot create files exclusively, where nothing keeps a driver out meanwhile."""


Tool = (
    Fsck
    | Health
    | Diff
    | Export
    | Import
    | Extract
    | Compact
    | Forget
    | Prune
    | scoring.Scoring
    | publishing.Publishing
    | watching.Watching
)

ToolCommand = (
    Annotated[Fsck, tyro.conf.subcommand("fsck")]
    | Annotated[Health, tyro.conf.subcommand("health")]
    | Annotated[Diff, tyro.conf.subcommand("diff")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Import, tyro.conf.subcommand("import")]
    | Annotated[Extract, tyro.conf.subcommand("extract")]
    | Annotated[Compact, tyro.conf.subcommand("compact")]
    | Annotated[Forget, tyro.conf.subcommand("forget")]
    | Annotated[Prune, tyro.conf.subcommand("prune")]
    | scoring.ScoringCommand
    | publishing.PublishingCommand
    | watching.WatchingCommand
)


def run(command: Tool) -> int:
    """Carries out a command and returns its exit code.

    Raises:
      ConfigurationError, StorageError, RunIsHeld: see `jobs.outcomes` for the words and codes.
    """
    # Imported late: `--help` should not wait for them.
    from podembed.jobs.cli import looking, tidying

    match command:
        case Fsck():
            return looking.fsck(command)
        case Health():
            return _health(command)
        case Diff():
            return looking.diff(command)
        case Export():
            return looking.export(command)
        case Import():
            return looking.import_tables(command)
        case Extract():
            return looking.extract(command)
        case Compact():
            return tidying.compact(command)
        case Forget():
            return tidying.forget(command)
        case Prune():
            return tidying.prune(command)
        case watching.Report() | watching.Top():
            return watching.run(command)
        case scoring.Evaluate() | scoring.Predict() | scoring.ExportModel():
            return scoring.run(command)
        case _:
            return publishing.run(command)


def _health(command: Health) -> int:
    from podembed.orchestrator.api.clock import SYSTEM_CLOCK
    from podembed.orchestrator.api.text import printable
    from podembed.orchestrator.run.reference import open_run_store
    from podembed.tools.health.check import check_health, render

    found = check_health(open_run_store(command.run), now_unix_s=SYSTEM_CLOCK.wall_s())
    print(printable(render(found)))
    return 0 if found.is_healthy else EXIT_ALARM
