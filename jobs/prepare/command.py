"""`podembed prepare`: its flags, its progress, and what it prints at the end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from podembed.jobs.prepare.settings import PrepareSettings


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Turn text into Parquet with final ids, in several processes. Repeat the command to go on where it was cut off."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT...")]
    """Files or globs, plain or .gz. Quote globs."""
    out: str
    """Folder to write; it appears when it is complete."""
    form: Literal["criteo", "csv"] = "criteo"
    """criteo: click logs in Kaggle or 1TB form. csv: comma-separated values with a header, a row a line."""
    ids: Literal["hash", "vocabulary"] | None = None
    """What becomes of the values of categorical fields: rows by a hash, or a row of its own for each frequent value.
    Default: hash
    """
    hash_fields: tuple[str, ...] = ()
    """Fields that are hashed although --ids is vocabulary."""
    min_count: int | None = None
    """How often a value must occur to be in the vocabulary. Default: 10"""
    max_rows: int | None = None
    """Rows of each hashed table, by default 200000; the most that a vocabulary's table may have."""
    label: str | None = None
    """csv: column of the label."""
    dense: tuple[str, ...] = ()
    """csv: columns of numbers, taken as they are."""
    dense_log1p: tuple[str, ...] = ()
    """csv: columns of counts, of which training takes log(1 + x)."""
    fields: tuple[str, ...] = ()
    """csv: categorical columns."""
    like: str | None = None
    """A prepared folder whose columns, tables and vocabularies are taken over, as evaluation data needs."""
    workers: int | None = None
    """Processes; by default one for each processor."""
    max_bad_lines: int = 10
    """Malformed lines that are put aside before it stops and names them."""
    rows_per_group: int | None = None
    """Rows of a Parquet row group, the unit of reading and shuffling. Default: 32768"""


def run(command: Prepare) -> int:
    """Carries out the command and returns its exit code.

    Raises:
      ConfigurationError: the flags do not fit together.
      PrepareError, InputError, FolderError: see `jobs.prepare.preparation.prepare`.
    """
    from rich.console import Console

    from podembed.jobs.prepare.preparation import PAGE_NAME, prepare
    from podembed.jobs.prepare.progress import Bars
    from podembed.orchestrator.api.text import format_bytes

    console = Console(highlight=False)
    settings = settings_of(command)
    with Bars(console) as show:
        done = prepare(
            [_absolute(source) for source in command.sources],
            Path(command.out).expanduser().absolute(),
            settings,
            workers=command.workers or len(os.sched_getaffinity(0)),
            max_bad_lines=command.max_bad_lines,
            like=None if command.like is None else Path(command.like).expanduser(),
            on_progress=show,
        )
    report = done.report

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    if done.was_there:
        say("was prepared already")
    elif done.resumed_pieces:
        say(f"went on from an earlier call, which had finished {done.resumed_pieces} of the parts")
    say(f"  lines     {report['lines']:,}: {report['kept']:,} kept, {report['malformed']:,} malformed")
    for field in report["fields"]:
        dropped = f", {field['unseen']:,} unseen or rare" if field["ids"] == "vocabulary" else ""
        say(
            f"  {field['name']:<9} {field['rows']:,} rows by {field['ids']}; {field['kept']:,} kept{dropped}, "
            f"{field['missing']:,} missing"
        )
        if (odd := field.get("nothing_known")) is not None:
            begins = "is empty" if odd["line"] is None else f"begins with {odd['line']!r}"
            say(
                f"WARNING: none of the {field['unseen']:,} values of field {field['name']!r} is in its vocabulary, so "
                f"all have row 0: the text has {odd['value']!r}, and the vocabulary {begins}. {odd['cause']}"
            )
    say(f"  written   {report['parts']:,} files, {format_bytes(report['part_bytes'])}, in {done.folder}")
    say(f"  report    {done.folder / PAGE_NAME}")
    label = report["label"]
    if label["missing"] == report["kept"]:
        say(f"  next      podembed predict RUN --data '{command.out.rstrip('/')}/*.parquet' --out scores.parquet")
        return 0
    flag = "--data" if command.like is None else f"--data '{command.like.rstrip('/')}/*.parquet' --eval-data"
    say(f"  next      podembed train --job criteo {flag} '{command.out.rstrip('/')}/*.parquet'")
    return 0


def settings_of(command: Prepare) -> PrepareSettings:
    """The settings that the flags ask for.

    Raises:
      ConfigurationError: a flag is missing, or has no meaning beside the others.
      PrepareError: as `PrepareSettings` and `read_prepared`.
    """
    from podembed.jobs.prepare.prepared_set import FILE_NAME, read_prepared
    from podembed.jobs.prepare.settings import (
        CRITEO_FIELDS,
        DEFAULT_MIN_COUNT,
        ROWS_PER_GROUP,
        PrepareSettings,
        criteo_dense,
        field_plans,
    )
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.workers.data.columns import DenseColumn

    rows_per_group = ROWS_PER_GROUP if command.rows_per_group is None else command.rows_per_group
    columns = {"--label": command.label, "--dense": command.dense, "--dense-log1p": command.dense_log1p}
    columns["--fields"] = command.fields
    choices = {
        "--ids": command.ids,
        "--hash-fields": command.hash_fields,
        "--min-count": command.min_count,
        "--max-rows": command.max_rows,
    }
    if command.like is not None:
        _refuse({**columns, **choices}, "with --like, which takes them from the other folder")
        other = read_prepared(f"{command.like.rstrip('/')}/{FILE_NAME}")
        if other.form != command.form:
            raise ConfigurationError(
                f"Found --form {command.form} and a {other.form} set in {command.like}. Expected the same. Pass --form "
                f"{other.form}."
            )
        return PrepareSettings(
            form=other.form,
            label=other.label,
            dense=other.dense,
            fields=other.plans(),
            rows_per_group=rows_per_group,
            like_sha256=other.sha256,
        )
    ids = command.ids or "hash"
    if ids == "hash":
        _refuse({name: choices[name] for name in ("--hash-fields", "--min-count")}, "with --ids hash")
    if command.form == "criteo":
        _refuse(columns, "with --form criteo, whose columns are known")
    elif command.label is None or not command.fields:
        raise ConfigurationError(
            "Found --form csv without --label or --fields. Expected to know which columns are what. "
            "Pass --label COLUMN, --fields COLUMN..., and --dense COLUMN... for numbers."
        )
    numbers = [*map(DenseColumn, command.dense), *(DenseColumn(name, "log1p") for name in command.dense_log1p)]
    return PrepareSettings(
        form=command.form,
        label=command.label or "label",
        dense=criteo_dense() if command.form == "criteo" else tuple(numbers),
        fields=field_plans(
            CRITEO_FIELDS if command.form == "criteo" else command.fields,
            ids=ids,
            hashed=command.hash_fields,
            max_rows=command.max_rows,
            min_count=DEFAULT_MIN_COUNT if command.min_count is None else command.min_count,
        ),
        rows_per_group=rows_per_group,
    )


def _refuse(flags: dict[str, object], where: str) -> None:
    """Ignoring a flag would prepare something else than the user wants."""
    from podembed.orchestrator.api.config import ConfigurationError

    given = [name for name, value in flags.items() if value not in (None, ())]
    if given:
        raise ConfigurationError(f"Found {', '.join(given)} {where}. Expected none of them there. Leave them out.")


def _absolute(source: str) -> str:
    return source if "://" in source else str(Path(source).expanduser().absolute())
