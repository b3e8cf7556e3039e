"""CSV files with a header as a source: blocks of rows, plain or gzip.

Starting a run reads every file once to find where its blocks begin. A block is read by its range of bytes; a gzip file, in which nothing
can be found without unpacking what stands before, is unpacked into a temporary file that is gone when it is closed. Arrow parses a block
at once; a block that it refuses is parsed in halves until the rows that are malformed are alone, so one parser decides about all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from workers.bad_rows import Origin, RowFaults
from workers.columns import Decoder, RawRows, check_schema
from workers.csv_records import RecordScanner, blocks_of, has_stray_text, record_ends
from workers.data_config import CsvData
from workers.files import open_ranges
from workers.input_errors import InputError
from workers.input_files import FileLayout, InputFile, RowGroup
from workers.unpacking import is_gzip, unpacked

# Its functions are made when it is imported, so type checkers do not know them.
pc: Any = pyarrow.compute

BLOCK_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN_BYTES = 100


def csv_layout(path: str, data: CsvData, *, storage_options: dict[str, Any] | None = None) -> FileLayout:
    """Reads the file once, checks its header and finds its blocks.

    Raises:
      InputError: the file is damaged, has no header, or a declared column is not in it.
    """
    with open_ranges(path, storage_options=storage_options) as raw:
        scanner = RecordScanner(path, delimiter=data.delimiter)
        blocks = list(
            blocks_of(unpacked(raw, path), scanner, rows_per_block=data.rows_per_block, block_bytes=BLOCK_BYTES)
        )
        if not blocks:
            raise InputError(
                f"Found no line in {path}. Expected a header with the names of the columns. Leave the file out."
            )
        _names_in(next(unpacked(raw, path, piece_bytes=blocks[0][0])), path, data)
    return FileLayout(
        row_group_rows=tuple(count for _, count in blocks[1:]), group_offsets=tuple(end for end, _ in blocks)
    )


class OpenedCsv:
    """One open file; one thread at a time."""

    def __init__(self, file: InputFile, data: CsvData, *, storage_options: dict[str, Any] | None) -> None:
        """Opens the file and reads its header.

        Raises:
          InputError: the file is missing or damaged, or a declared column is not in its header.
        """
        self._path = file.path
        self._data = data
        self._offsets = file.group_offsets
        self._text = _open_text(file.path, storage_options)
        self._kinds = _kinds(data)
        try:
            self._names = _names_in(self._range(0, self._offsets[0]), file.path, data)
        except BaseException:
            self._text.close()
            raise

    def read(self, group: RowGroup, decoder: Decoder) -> RawRows:
        """The declared columns of one block; rows that do not parse are nulls and malformed.

        Raises:
          InputError: the file is shorter than it was, or too many rows are malformed.
        """
        start, stop = self._offsets[group.group_in_file : group.group_in_file + 2]
        text = self._range(start, stop)
        origin = Origin(path=self._path, group=group.group_in_file, first_row=group.first_row)
        faults = decoder.faults_of(origin, group.num_rows)
        table = self._parse(text)
        if table is None or table.num_rows != group.num_rows:
            ends = record_ends(text, self._path, delimiter=self._data.delimiter)
            if len(ends) != group.num_rows:
                raise InputError(
                    f"Found {len(ends)} rows in block {group.group_in_file} of {self._path}. Expected {group.num_rows}, as the index says. "
                    "Restore the file, or start a run on the new data."
                )
            bounds = np.concatenate([[0], ends])
            table = pa.concat_tables(self._salvage(text, bounds, 0, group.num_rows, faults))
        return RawRows(columns=table, faults=faults)

    def close(self) -> None:
        self._text.close()

    def _range(self, start: int, stop: int) -> bytes:
        self._text.seek(start)
        text = self._text.read(stop - start)
        if len(text) != stop - start:
            raise InputError(
                f"Found {self._path} ending at byte {start + len(text):,}. Expected {self._offsets[-1]:,} bytes of text, as when the run "
                "began. Restore the file."
            )
        return text

    def _parse(
        self, text: bytes, columns: Sequence[str] | None = None, kinds: Mapping[str, pa.DataType] | None = None
    ) -> pa.Table | None:
        """All rows of the text, or None if one of them is malformed."""
        kinds = self._kinds if kinds is None else kinds
        # Arrow takes such text for a part of the value.
        if has_stray_text(text, delimiter=self._data.delimiter):
            return None
        # Lists are cut up below; Arrow reads them as strings.
        read_as = {name: pa.large_string() if pa.types.is_large_list(kind) else kind for name, kind in kinds.items()}
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(text),
                read_options=pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=len(text) + 1, column_names=self._names
                ),
                parse_options=_parse_options(self._data),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=read_as,
                    include_columns=list(columns or self._data.columns),
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
            return pa.table(
                {name: self._cut_lists(name, table.column(name), kinds[name]) for name in table.column_names}
            )
        except (pa.ArrowException, UnicodeDecodeError):
            return None

    def _cut_lists(self, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
        if not pa.types.is_large_list(kind):
            return column
        return pc.split_pattern(column, self._data.list_separators[name]).cast(kind)

    def _salvage(self, text: bytes, bounds: np.ndarray, first: int, stop: int, faults: RowFaults) -> list[pa.Table]:
        """Rows `first` to `stop - 1` of a block that was refused as a whole, a row of nulls for each malformed one."""
        table = self._parse(text[bounds[first] : bounds[stop]])
        if table is not None and table.num_rows == stop - first:
            return [table]
        if stop - first > 1:
            middle = (first + stop) // 2
            before = self._salvage(text, bounds, first, middle, faults)
            return before + self._salvage(text, bounds, middle, stop, faults)
        column, found, reason = self._diagnose(text[bounds[first] : bounds[stop]])
        bad = np.zeros(len(faults.is_bad), bool)
        bad[first] = True
        faults.add(bad, column, found=lambda _: found, reason=reason)
        return [pa.table({name: pa.nulls(1, self._kinds[name]) for name in self._data.columns})]

    def _diagnose(self, record: bytes) -> tuple[str, str, str]:
        """(column, what stands there, what should) of one record that does not parse."""
        shown = record[:_SHOWN_BYTES].decode("utf-8", "backslashreplace").rstrip("\r\n")
        whole = self._parse(record, columns=self._names, kinds=dict.fromkeys(self._names, pa.binary()))
        if whole is None or whole.num_rows != 1:
            return (
                "row",
                repr(shown),
                f"A row has {len(self._names)} fields between {self._data.delimiter!r}, and nothing behind a closing quote. Repair it.",
            )
        for name in self._data.columns:
            if self._parse(record, columns=[name]) is None:
                value = (whole.column(name)[0].as_py() or b"")[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
                return name, repr(value), f"Expected {_expected(self._kinds[name])}. Repair it."
        raise InputError(
            f"Found a row of {self._path} refused as a whole and read column by column: {shown!r}. Please report this row."
        )


def _names_in(header: bytes, path: str, data: CsvData) -> list[str]:
    """Names of all columns, of which the declared ones are checked.

    Raises:
      InputError: the header does not parse, or lacks a declared column.
    """
    line = header.removeprefix(_BYTE_ORDER_MARK)
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(line + b"\n"),
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=len(line) + 2),
            parse_options=_parse_options(data),
        )
        names = table.column_names
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"Found {path}, whose header does not parse ({error}). Expected the names of the columns in UTF-8, between "
            f"{data.delimiter!r}. Repair its first line."
        ) from error
    kinds = _kinds(data)
    # A name that the header has twice is in the schema twice, which the check finds.
    check_schema(pa.schema([(name, kinds.get(name, pa.large_string())) for name in names]), data, path=path)
    return names


def _parse_options(data: CsvData) -> pyarrow.csv.ParseOptions:
    return pyarrow.csv.ParseOptions(delimiter=data.delimiter, newlines_in_values=True)


def _open_text(path: str, storage_options: dict[str, Any] | None) -> IO[bytes]:
    """The text for reading anywhere in it.

    Raises:
      InputError: the file is missing, or its gzip stream is damaged.
    """
    raw = open_ranges(path, storage_options=storage_options)
    if not is_gzip(raw):
        return raw
    text = tempfile.TemporaryFile(prefix="podembed-csv-")  # noqa: SIM115 - closed by its reader
    try:
        with raw:
            for piece in unpacked(raw, path):
                text.write(piece)
    except BaseException:
        text.close()
        raise
    return text


def _kinds(data: CsvData) -> dict[str, pa.DataType]:
    """The type that each declared column is read as."""
    kinds: dict[str, pa.DataType] = dict.fromkeys(data.columns, pa.float64())
    for source in data.id_columns.values():
        item = pa.large_string() if source.column in data.strings else pa.int64()
        kinds[source.column] = pa.large_list(item) if source.column in data.list_separators else item
    if data.sample_id is not None:
        kinds[data.sample_id] = pa.int64()
    return kinds


def _expected(kind: pa.DataType) -> str:
    if pa.types.is_large_list(kind):
        return f"a list of {_expected(kind.value_type)}"
    if pa.types.is_integer(kind):
        return "integers of 64 bits" if kind == pa.int64() else "integers"
    return "numbers" if pa.types.is_floating(kind) else "text in UTF-8"
