"""`InputIndex`: which Parquet files the data of a run consists of, and how their rows are grouped.

The index is built once, by whoever starts the run, from listings and file footers alone. It fixes the order of files and row groups, so
that a row has one position for the life of the run, and it keeps a fingerprint of every file: a reader that finds another file under the
same name refuses it. The index is a value that can be saved with the run (`to_json`) and read back strictly.

One thread pool lives for the length of `build_index`: its threads each read one footer at a time and hand it back as a value. They are
joined before the function returns, or abandoned with an error when `deadline_s` has passed.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from dataclasses import asdict, dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from workers.columns import check_schema
from workers.data_config import ParquetData
from workers.files import file_version, locate
from workers.input_errors import InputError

FOOTER_THREADS = 16
INDEX_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One Parquet file as it was when the index was built.

    Attributes:
      path: as fsspec opens it; local paths are absolute and carry no protocol.
      size_bytes: length of the file.
      version: what the filesystem tells of the last change: an etag or a time.
      row_group_rows: rows of each row group.
    """

    path: str
    size_bytes: int
    version: str
    row_group_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """One row group: the `group_in_file`-th of `file`; its first row is row `first_row` of the file and `first_position` of all data."""

    file: InputFile
    group_in_file: int
    num_rows: int
    first_row: int
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputIndex:
    """All files of one data set, in sorted order."""

    files: tuple[InputFile, ...]

    @property
    def num_rows(self) -> int:
        return sum(sum(file.row_group_rows) for file in self.files)

    @property
    def row_group_rows(self) -> tuple[int, ...]:
        """Rows of every row group, in file order, without the empty ones. Row groups are numbered by this order everywhere."""
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
        return json.dumps([asdict(file) for file in self.files])

    @staticmethod
    def from_json(text: str) -> InputIndex:
        """Reads back `to_json`.

        Raises:
          InputError: the text is something else.
        """
        try:
            files = tuple(
                InputFile(
                    path=str(entry["path"]),
                    size_bytes=int(entry["size_bytes"]),
                    version=str(entry["version"]),
                    row_group_rows=tuple(int(rows) for rows in entry["row_group_rows"]),
                )
                for entry in json.loads(text)
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"Found an input index that does not parse ({error!r}). Expected the JSON that `InputIndex.to_json` writes. "
                "Build the index again."
            ) from error
        return InputIndex(files=files)


def build_index(
    data: ParquetData, *, deadline_s: float = INDEX_DEADLINE_S, storage_options: dict[str, Any] | None = None
) -> InputIndex:
    """Lists the files of `data.paths`, reads their footers and checks every column that `data` names.

    A file that two patterns match counts once.

    Raises:
      InputError: a pattern matches nothing, a file is not Parquet, a column is missing or of a wrong type, or there are no rows.
      TimeoutError: the footers were not read within `deadline_s`.
    """
    located = locate(data.paths, storage_options=storage_options)
    pool = ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="input-index")
    try:
        files = tuple(pool.map(lambda path: _read_footer(path, data, storage_options), located, timeout=deadline_s))
    except FuturesTimeoutError as error:
        raise TimeoutError(
            f"Found {len(located)} Parquet files whose footers were not read within {deadline_s:g} s. Expected a few milliseconds "
            "each. Check that the storage answers, or raise deadline_s."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    index = InputIndex(files=files)
    if index.num_rows == 0:
        raise InputError(
            f"Found no rows in the {len(files)} files of {list(data.paths)}. Expected at least one row. Point paths at the data."
        )
    return index


def open_parquet(path: str, storage_options: dict[str, Any] | None = None) -> pq.ParquetFile:
    """Opens one file for reading row groups.

    Raises:
      InputError: the file is missing or is not Parquet.
    """
    filesystem, location = fsspec.url_to_fs(path, **(storage_options or {}))
    is_local = isinstance(filesystem, LocalFileSystem)
    try:
        # Local files go to Arrow by name: no Python call a read. Remote ones are read ahead by column chunk.
        return pq.ParquetFile(location if is_local else filesystem.open(location, "rb"), pre_buffer=not is_local)
    except FileNotFoundError as error:
        raise InputError(
            f"Found no file {path}. Expected a Parquet file of the index. Restore it, or build a new index."
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"Found {path}, which does not open as Parquet ({error}). Expected a complete Parquet file. Write it again, or leave it out."
        ) from error


def check_unchanged(file: InputFile, storage_options: dict[str, Any] | None = None) -> None:
    """Compares a file with its fingerprint.

    Raises:
      InputError: the file is gone, or its size or version differs.
    """
    try:
        size_bytes, version = file_version(file.path, storage_options=storage_options)
    except FileNotFoundError as error:
        raise InputError(
            f"Found no file {file.path}. Expected the {file.size_bytes} bytes the index was built from. Restore the file."
        ) from error
    if (size_bytes, version) != (file.size_bytes, file.version):
        raise InputError(
            f"Found {file.path} with {size_bytes} bytes, version {version}. Expected {file.size_bytes} bytes, version {file.version}, "
            "as when the run began. Restore the file, or start a run on the new data."
        )


def _read_footer(path: str, data: ParquetData, storage_options: dict[str, Any] | None) -> InputFile:
    size_bytes, version = file_version(path, storage_options=storage_options)
    with open_parquet(path, storage_options) as opened:
        check_schema(opened.schema_arrow, data, path=path)
        metadata = opened.metadata
        rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return InputFile(path=path, size_bytes=size_bytes, version=version, row_group_rows=rows)


def describe(index: InputIndex) -> str:
    """One line for logs: files, row groups and rows, with the range of row group sizes, which is the size of the shuffle window."""
    rows = np.array(index.row_group_rows)
    return (
        f"{len(index.files)} files, {len(rows)} row groups of {rows.min():,} to {rows.max():,} rows, {index.num_rows:,} rows, "
        f"fingerprint {index.fingerprint}"
    )
