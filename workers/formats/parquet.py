"""Parquet files as a source: row groups as the file has them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from podembed.workers.columns.decode import Decoder, RawRows, check_schema, extra_kinds, id_kinds
from podembed.workers.data.bad_rows import Origin
from podembed.workers.data.config import ParquetData
from podembed.workers.data.files import local_path, one_line, open_ranges, unreadable
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.input_files import FileLayout, InputFile, RowGroup
from podembed.workers.formats.source import Source

_MAGIC = b"PAR1"
# The length of the footer in four bytes, and the four of `_MAGIC`.
_TAIL_BYTES = 8
# About what the second cache of a processor core holds; from a store, everything is requested at once instead.
_HOT_BYTES = 1 << 20
# Arrow reads a footer whole and builds many times its size from it. That of a file with a million column chunks has
# about 100 MB.
_MAX_FOOTER_BYTES = 128 << 20


def parquet_layout(path: str, data: ParquetData) -> FileLayout:
    """Reads the footer and checks the columns.

    Raises:
      InputError: the file is not Parquet, or a column is missing or of a wrong type.
    """
    with _open(path) as opened:
        check_schema(opened.schema_arrow, data, path=path)
        metadata = opened.metadata
        rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        kinds, extra = id_kinds(opened.schema_arrow, data), extra_kinds(opened.schema_arrow, data)
        lengths = _mean_lengths(metadata, {name for source in data.id_columns.values() for name in source.columns})
    return FileLayout(row_group_rows=rows, content=kinds, extra_content=extra, lengths=lengths)


def _mean_lengths(metadata: pq.FileMetaData, names: Set[str]) -> tuple[tuple[str, float], ...]:
    """Columns of lists with the mean length of a row in the first row group that has rows. An empty list counts as one
    value there.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    group = next((group for group in groups if group.num_rows), None)
    if group is None:
        return ()
    chunks = (group.column(number) for number in range(group.num_columns))
    found = ((chunk.path_in_schema.partition("."), chunk.num_values) for chunk in chunks)
    return tuple((name, num_values / group.num_rows) for (name, dot, _), num_values in found if dot and name in names)


def parquet_names(path: str) -> list[str] | None:
    """Names of the columns, or None for a file that neither begins nor ends like Parquet.

    Raises:
      InputError: there is no such file, it may not be read, or it begins or ends so and is damaged.
    """
    with open_ranges(path) as file:
        head = file.read(len(_MAGIC))
        file.seek(max(0, file.seek(0, 2) - len(_MAGIC)))
        if _MAGIC not in (head, file.read(len(_MAGIC))):
            return None
    with _open(path) as opened:
        return opened.schema_arrow.names


class OpenedParquet:
    """One open file; one thread at a time."""

    def __init__(self, file: InputFile, data: ParquetData) -> None:
        """Raises:
        InputError: the file is missing or is not Parquet.
        """
        self._opened = _open(file.path)
        self._is_local = local_path(file.path) is not None
        self._columns = list(data.columns)
        self._parts = _parts(self._opened.metadata, self._columns) if self._is_local else [self._columns]

    def read(self, group: RowGroup, decoder: Decoder) -> RawRows:
        """The declared columns of one row group; asking for a column raises InputError if its pages are damaged."""
        origin = Origin(path=group.file.path, group=group.group_in_file, first_row=group.first_row)
        columns = _GroupColumns(self._opened, group, self._parts)
        return RawRows(columns=columns, faults=decoder.faults_of(origin, group.num_rows))

    def close(self) -> None:
        self._opened.close(force=True)


class _GroupColumns:
    """The columns of one row group, some at a time: what was just decoded is used while it is in the processor's
    cache.
    """

    def __init__(self, opened: pq.ParquetFile, group: RowGroup, parts: Sequence[Sequence[str]]) -> None:
        self._opened = opened
        self._group = group
        self._parts = parts
        self._table: pa.Table | None = None

    def column(self, name: str) -> pa.ChunkedArray:
        table = self._table
        if table is None or name not in table.column_names:
            # Given up before the next ones are read, so that Arrow can have the same memory again.
            table = self._table = None
            table = self._table = self._read(next(part for part in self._parts if name in part))
        return table.column(name)

    def _read(self, names: Sequence[str]) -> pa.Table:
        path, number = self._group.file.path, self._group.group_in_file
        try:
            table = self._opened.read_row_group(number, columns=list(names), use_threads=False)
        except InputError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            if _is_of_the_system(error):
                raise unreadable(path, error) from error
            if isinstance(error, pa.ArrowNotImplementedError):
                # The file is whole. Arrow cuts text where offsets of 32 bits end, and cannot do so within lists.
                raise InputError(
                    f"Found row group {number} of {path}, of {self._group.num_rows:,} rows, which cannot be read at "
                    f"once ({one_line(error)}), as with more than 2 GiB of text in lists. Expected row groups of some "
                    "ten thousand rows. Write the file again with smaller ones, such as "
                    "pyarrow.parquet.write_table(..., row_group_size=32_768)."
                ) from error
            raise InputError(
                f"Found row group {number} of {path} unreadable ({one_line(error)}). Expected Parquet pages as the "
                "footer describes them. Write the file again from its source."
            ) from error
        if table.num_rows != self._group.num_rows:
            raise InputError(
                f"Found {table.num_rows} rows in row group {number} of {path}. Expected {self._group.num_rows}, as the "
                "index says. Build a new index, and start a run on it."
            )
        return table


def arrow_file(source: Any, **options: Any) -> pq.ParquetFile:
    """A Parquet file with timestamps of 96 bits in microseconds, as Spark writes them."""
    # By default Arrow makes nanoseconds of them in 64 bits, and years before 1677 and after 2262 become others.
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us", **options)


def _parts(metadata: pq.FileMetaData, names: Sequence[str]) -> list[list[str]]:
    """The columns in runs that are about as large as `_HOT_BYTES` when they are decoded, by the file's first row
    group.
    """
    sizes: dict[str, int] = {}
    if metadata.num_row_groups:
        first = metadata.row_group(0)
        for at in range(first.num_columns):
            chunk = first.column(at)
            name = chunk.path_in_schema.partition(".")[0]
            sizes[name] = sizes.get(name, 0) + 8 * chunk.num_values
    parts: list[list[str]] = []
    room = 0
    for name in names:
        if not parts or sizes.get(name, 0) > room:
            parts.append([])
            room = _HOT_BYTES
        parts[-1].append(name)
        room -= sizes.get(name, 0)
    return parts


def _open(path: str) -> pq.ParquetFile:
    location = local_path(path)
    try:
        _check_footer(path)
        # Local files go to Arrow by name: no Python call a read. Remote ones are read ahead by column chunk.
        source = location if location is not None else open_ranges(path)
        return arrow_file(cast(Any, source), pre_buffer=location is None)
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"Found no file {path}. Expected a Parquet file of the data. Restore it.") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        if _is_of_the_system(error):
            raise unreadable(path, error) from error
        raise InputError(
            f"Found {path}, which does not open as Parquet ({one_line(error)}). Expected a complete Parquet file. "
            "Write it again, or leave it out."
        ) from error


def _check_footer(path: str) -> None:
    with open_ranges(path) as file:
        size_bytes = file.seek(0, 2)
        # Of a smaller file nothing is read, which would be one more request to a store.
        if size_bytes <= _MAX_FOOTER_BYTES:
            return
        file.seek(size_bytes - _TAIL_BYTES)
        tail = file.read(_TAIL_BYTES)
    footer_bytes = int.from_bytes(tail[:4], "little")
    if tail[4:] == _MAGIC and footer_bytes > _MAX_FOOTER_BYTES:
        raise InputError(
            f"Found {path} with a footer of {footer_bytes:,} bytes. Expected at most {_MAX_FOOTER_BYTES:,}. Write it "
            "again as several files, or with fewer and larger row groups."
        )


def _is_of_the_system(error: BaseException) -> bool:
    """Whether the system refused to read, as opposed to bytes that are not what they should be; Arrow has one type for
    both.
    """
    return isinstance(error, OSError) and error.errno is not None


SOURCE = Source(declared=ParquetData, layout=parquet_layout, open=OpenedParquet)
