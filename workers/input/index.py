"""`InputIndex`: which files the data of a run consists of, and how their rows are grouped.

The index is built once, by whoever starts the run, from listings and what `workers.formats.registry` finds out about
each file (for Parquet, its footer). It fixes the order of files and row groups, so that a row has one position for the
life of the run. It keeps a fingerprint of every file. A reader that finds another file under the same name refuses it.
The index is a value that can be saved with the run (`to_json`) and read back strictly.

One thread pool lives for the length of `build_index`: its threads each look at one file at a time and return it as a
value. They are joined before the function returns, or abandoned with an error when `deadline_s` has passed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from dataclasses import asdict, dataclass
from typing import Any

from podembed.workers.columns.decode import kinds_of
from podembed.workers.columns.id_columns import NULLS
from podembed.workers.columns.vocabulary import Vocabulary, load_vocabulary
from podembed.workers.data.config import InputData
from podembed.workers.data.files import file_version, local_path, locate, unreadable
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.input_files import InputFile, RowGroup
from podembed.workers.formats.registry import read_layout, version_of

FOOTER_THREADS = 16
INDEX_DEADLINE_S = 600.0
_SHOWN_NAMES = 5
_DIGITS = re.compile(r"(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputIndex:
    """All files of one data set, in sorted order, and the vocabularies of its id columns, which have one row group of
    their values.
    """

    files: tuple[InputFile, ...]
    vocabularies: tuple[InputFile, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def order_of_files(self) -> str:
        """As `describe_order`."""
        return describe_order(self.files)

    @property
    def row_group_rows(self) -> tuple[int, ...]:
        """Rows of every row group, in file order, without the empty ones. Row groups are numbered by this order
        everywhere.
        """
        return tuple(rows for file in self.files for rows in file.row_group_rows if rows)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of everything the index says; equal for equal data only."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def row_groups(self) -> tuple[RowGroup, ...]:
        """The row groups in the order of `row_group_rows`."""
        groups: list[RowGroup] = []
        position = 0
        for file in self.files:
            first_row = 0
            for number, num_rows in enumerate(file.row_group_rows):
                if num_rows:
                    groups.append(
                        RowGroup(
                            file=file,
                            group_in_file=number,
                            num_rows=num_rows,
                            first_row=first_row,
                            first_position=position,
                        )
                    )
                first_row += num_rows
                position += num_rows
        return tuple(groups)

    def to_json(self) -> str:
        document = asdict(self)
        for file in (*document["files"], *document["vocabularies"]):
            del file["lengths"], file["extra_content"]
        return json.dumps(document)

    @staticmethod
    def from_json(text: str) -> InputIndex:
        """Reads back `to_json`.

        Raises:
          InputError: the text is something else.
        """
        try:
            document = json.loads(text)
            return InputIndex(
                files=tuple(map(_file_of, document["files"])),
                vocabularies=tuple(map(_file_of, document["vocabularies"])),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"Found an input index that does not parse ({error!r}). Expected the JSON that `InputIndex.to_json` "
                "writes. Build the index again."
            ) from error


def build_index(data: InputData) -> InputIndex:
    """Lists the files of `data.paths`, finds out their row groups and checks every column and vocabulary that `data`
    names.

    A file that two patterns match counts once.

    Raises:
      InputError: a pattern matches nothing, a file is damaged, there are no rows, a vocabulary is none, or the columns
      do not fit. They fit if each is there, of a right type, and of one kind in all files.
      StoreUnavailable: the store did not answer.
      TimeoutError: the files were not looked at within `INDEX_DEADLINE_S`.
    """
    located = locate(data.paths)
    pool = ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="input-index")
    try:
        files = tuple(pool.map(lambda path: _look_at(path, data), located, timeout=INDEX_DEADLINE_S))
    except FuturesTimeoutError as error:
        raise TimeoutError(
            f"Found {len(located)} data files that were not looked at within {INDEX_DEADLINE_S:g} s. Expected a few "
            "milliseconds for each Parquet file and one reading of each CSV file. Check that the storage answers."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    check_alike(files)
    vocabularies = tuple(_look_at_vocabulary(path) for path in data.vocabularies)
    index = InputIndex(files=files, vocabularies=vocabularies)
    if index.num_rows == 0:
        raise InputError(
            f"Found no rows in the {len(files)} files of {list(data.paths)}. Expected at least one row. Point paths at "
            "the data."
        )
    return index


def check_alike(files: Sequence[InputFile], *, lists_apart: Collection[str] = ()) -> None:
    """Compares what the columns of files hold. Numbers and text of one meaning become other rows of a table, and so do
    lists and no lists.

    Args:
      files: files of one data set, or of training and evaluation together.
      lists_apart: columns that may have lists in some files and single ids in others.

    Raises:
      InputError: a column is of another kind in another file.
    """
    found = [(file, kinds_of(file.extra_content) | kinds_of(file.content)) for file in files]
    for column in dict.fromkeys(column for _, kinds in found for column in kinds):
        # Of dense columns only times are noted.
        kinds = [kinds.get(column, "numbers") for _, kinds in found]
        if column in lists_apart:
            kinds = [kind.removeprefix("lists of ") for kind in kinds]
        # Files without a value of it fit all.
        first = next((at for at, kind in enumerate(kinds) if kind != NULLS), 0)
        other = next((at for at, kind in enumerate(kinds) if kind not in (kinds[first], NULLS)), None)
        if other is not None:
            raise InputError(
                f"Found column {column!r} with {kinds[first]} in {files[first].path} and with {kinds[other]} in "
                f"{files[other].path}. Expected one kind in all files of the data, training and evaluation, since "
                "equal values would become other rows or numbers. Write the column alike in all files."
            )


def check_unchanged(file: InputFile, data: InputData) -> None:
    """Compares a data file with its fingerprint.

    Raises:
      InputError: the file is gone, or its size or version differs.
    """
    try:
        found = version_of(file.path, data)
    except FileNotFoundError as error:
        raise InputError(
            f"Found no file {file.path}. Expected the {file.size_bytes} bytes the index was built from. Restore the "
            "file."
        ) from error
    _compare(file, found)


def read_vocabularies(data: InputData, index: InputIndex) -> dict[str, Vocabulary]:
    """The vocabularies of data, by the path that it declares.

    Args:
      index: built from that data.

    Raises:
      InputError: one is gone or has changed.
    """
    vocabularies = {}
    for declared, file in zip(data.vocabularies, index.vocabularies, strict=True):
        vocabularies[declared] = load_vocabulary(file.path)
        _compare(file, file_version(file.path))
    return vocabularies


def changed_files(before: Sequence[tuple[str, int, str]], now: InputIndex) -> list[str]:
    """What differs between the (path, size in bytes, version) of a run's files, vocabularies included, and an index; a
    phrase for each file.
    """
    found = {file.path: (file.size_bytes, file.version) for file in (*now.files, *now.vocabularies)}
    expected = {path: (size_bytes, version) for path, size_bytes, version in before}
    differences = []
    for path in sorted(found.keys() | expected.keys()):
        if path not in found:
            differences.append(f"{path} is gone")
        elif path not in expected:
            differences.append(f"{path} is new")
        elif found[path] != expected[path]:
            (size, version), (old_size, old_version) = found[path], expected[path]
            differences.append(f"{path} has {size} bytes, version {version}, had {old_size}, version {old_version}")
    return differences


def _compare(file: InputFile, found: tuple[int, str]) -> None:
    if found != (file.size_bytes, file.version):
        remedy = "Restore the file, or start a run on the new data."
        if found[0] == file.size_bytes and "://" not in file.path:
            # Content is not compared: the time of change stands for it on a local disk.
            remedy += " A copy on each machine's own disk needs the time of the original: `cp -p`, `rsync -t`."
        raise InputError(
            f"Found {file.path} with {found[0]} bytes, version {found[1]}. Expected {file.size_bytes} bytes, version "
            f"{file.version}, as when the run began. {remedy}"
        )


def _look_at(path: str, data: InputData) -> InputFile:
    try:
        size_bytes, version = version_of(path, data)
    except FileNotFoundError as error:
        # Local files name themselves in the error, those of a store are its only argument.
        missing = error.filename or error
        raise InputError(
            f"Found no file {missing}, which belongs to {path}. Expected it beside that. Restore it."
        ) from error
    try:
        layout = read_layout(path, data)
    except OSError as error:
        raise unreadable(path, error) from error
    return InputFile(
        path=path,
        size_bytes=size_bytes,
        version=version,
        row_group_rows=layout.row_group_rows,
        group_offsets=layout.group_offsets,
        content=layout.content,
        extra_content=layout.extra_content,
        lengths=layout.lengths,
    )


def _look_at_vocabulary(path: str) -> InputFile:
    # Absolute, as those of data files: hosts work in other folders.
    path = local_path(path) or path
    vocabulary = load_vocabulary(path)
    size_bytes, version = file_version(path)
    return InputFile(
        path=path,
        size_bytes=size_bytes,
        version=version,
        row_group_rows=(vocabulary.num_values,),
        content=vocabulary.digest(vocabulary.num_values),
    )


def _file_of(entry: dict[str, Any]) -> InputFile:
    return InputFile(
        path=str(entry["path"]),
        size_bytes=int(entry["size_bytes"]),
        version=str(entry["version"]),
        row_group_rows=tuple(int(rows) for rows in entry["row_group_rows"]),
        group_offsets=tuple(int(offset) for offset in entry["group_offsets"]),
        content=str(entry["content"]),
    )


def describe_order(files: Sequence[InputFile]) -> str:
    """One line for a run that reads its files one after the other. It says in which order, with a hint where another
    one may be meant.
    """
    names = [file.path.rpartition("/")[2] for file in files]
    shown = names if len(names) <= _SHOWN_NAMES else [*names[: _SHOWN_NAMES - 1], "...", names[-1]]
    paths = [file.path for file in files]
    # Every second part is a number.
    by_number = sorted(
        paths, key=lambda path: [int(part) if at % 2 else part for at, part in enumerate(_DIGITS.split(path))]
    )
    hint = "; numbers in names are compared as text, so write them with leading zeros if they are meant to count"
    return f"samples in the order of the files: {', '.join(shown)}{hint if by_number != paths else ''}"
