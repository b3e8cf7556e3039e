"""Which files `--data` names, and Parquet in their place if they are Criteo text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from podembed.jobs.criteo import COLUMN_NAMES
from podembed.jobs.prepare.prepared_set import FILE_NAME, read_prepared
from podembed.jobs.text.criteo import convert_criteo
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.data.files import filesystem_of, locate
from podembed.workers.formats.parquet import parquet_names


def prepare_files(
    patterns: Sequence[str], *, cache_folder: Path, max_bad_lines: int, notice: Callable[[str], None]
) -> tuple[list[str], str]:
    """Finds out by the first bytes of the first file in each folder whether the files are Parquet; converts text once
    into `cache_folder`.

    Returns:
      Parquet paths or globs, absolute where they are local, and the job's argument `columns`. That is the
      `prepared.json` beside the files, or the key of `COLUMN_NAMES` that their columns match.

    Raises:
      ConfigurationError: one pattern names text and another one Parquet, the columns have none of the known names, or
        prepared sets have different ids.
      InputError: nothing matches a pattern, or a file cannot be read or is damaged.
      CriteoTextError: the text cannot be converted, or has more malformed lines than `max_bad_lines`.
    """
    absolute = [_absolute(pattern) for pattern in patterns]
    columns = {first: parquet_names(first) for pattern in absolute for first in _first_files(pattern)}
    parquet = [first for first, names in columns.items() if names is not None]
    text = [first for first, names in columns.items() if names is None]
    if parquet and text:
        raise ConfigurationError(
            f"Found Parquet in {parquet[0]} and text in {text[0]}. Expected one kind of file. Convert the text first, "
            "by a run on it alone."
        )
    if parquet:
        prepared = [prepared_beside(first) for first in parquet]
        if any(prepared):
            return absolute, _one_set(parquet, prepared)
        return absolute, _known_columns(parquet[0], columns[parquet[0]] or [])
    report = convert_criteo(absolute, cache_folder.absolute(), max_bad_lines=max_bad_lines)
    notice(
        f"text input: {report.lines:,} lines in {len(report.sources)} files, {report.kept:,} kept, {report.malformed} "
        "malformed"
    )
    for line in report.bad_lines:
        notice(f"  put aside {line}")
    notice(f"  as Parquet in {report.folder}")
    return [str(report.folder.absolute() / "part-*.parquet")], "podembed"


def _absolute(pattern: str) -> str:
    return pattern if "://" in pattern else str(Path(pattern).expanduser().absolute())


def _first_files(pattern: str) -> list[str]:
    """The first file of each folder in which the pattern matches one, since folders can be prepared sets of their
    own.
    """
    firsts: dict[str, str] = {}
    for name in locate([pattern]):
        firsts.setdefault(name.rpartition("/")[0], name)
    return list(firsts.values())


def prepared_beside(path: str) -> str | None:
    """Path or URL of the `prepared.json` in a file's folder, if there is one."""
    url = f"{path.rpartition('/')[0]}/{FILE_NAME}"
    filesystem, location = filesystem_of(url)
    return url.removeprefix("file://") if filesystem.exists(location) else None


def _one_set(files: Sequence[str], prepared: Sequence[str | None]) -> str:
    """The `prepared.json` that holds for all files."""
    first = prepared[0]
    for file, other in zip(files, prepared, strict=True):
        if first is None or other is None or not are_alike(first, other):
            raise ConfigurationError(
                f"Found {files[0]} and {file} prepared with different ids, or one not prepared. Expected equal ids in "
                "all files. Prepare the one with --like the folder of the other."
            )
    return first or ""


def are_alike(columns: str, other: str) -> bool:
    """Whether two values of the job's argument `columns` mean the same columns with the same ids."""
    if columns == other or not (columns.endswith(FILE_NAME) and other.endswith(FILE_NAME)):
        return columns == other
    return read_prepared(columns) == read_prepared(other)


def _known_columns(path: str, names: Sequence[str]) -> str:
    for writer, (numbers, fields) in COLUMN_NAMES.items():
        if {"label", *numbers, *fields} <= set(names):
            return writer
    expected = "; or ".join(f"label, {n[0]}..{n[-1]}, {f[0]}..{f[-1]}" for n, f in COLUMN_NAMES.values())
    raise ConfigurationError(
        f"Found columns {', '.join(names)} in {path}. Expected {expected}. "
        f"Rename them, or write a job for your columns: copy jobs/criteo.py."
    )
