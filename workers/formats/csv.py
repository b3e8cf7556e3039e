"""CSV files with a header as a source: blocks of rows, plain or gzip.

Starting a run reads every file once to find where its blocks begin. A block is read by its range of bytes. In a gzip
file nothing can be found without unpacking what stands before. Such a file is therefore unpacked into a temporary one
that is gone when it is closed. Records are parsed by `workers.formats.csv_parser`.
"""

from __future__ import annotations

import logging
import tempfile
from typing import IO

import numpy as np
import pyarrow as pa

from podembed.workers.columns.decode import Decoder, RawRows, check_schema, id_kinds
from podembed.workers.data.bad_rows import Origin, RowFaults
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import CsvData
from podembed.workers.data.extra_columns import IntegerColumn, ListColumn, VectorColumn
from podembed.workers.data.files import open_ranges
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.input_files import FileLayout, InputFile, RowGroup
from podembed.workers.formats.csv_parser import CsvFault, CsvParser, header_names
from podembed.workers.formats.csv_records import RecordScanner, blocks_of, record_ends
from podembed.workers.formats.source import Source
from podembed.workers.formats.unpacking import is_gzip, unpacked

BLOCK_BYTES = 64 << 20
_logger = logging.getLogger(__name__)


def csv_layout(path: str, data: CsvData) -> FileLayout:
    """Reads the file once, checks its header and finds its blocks.

    Raises:
      InputError: the file is damaged, has no header, or a declared column is not in it.
    """
    with open_ranges(path) as raw:
        scanner = RecordScanner(path, delimiter=data.delimiter, quoting=data.quoting)
        blocks = list(
            blocks_of(unpacked(raw, path), scanner, rows_per_block=data.rows_per_block, block_bytes=BLOCK_BYTES)
        )
        if not blocks:
            raise InputError(
                f"Found no line in {path}. Expected a header with the names of the columns. Leave the file out."
            )
        _names_in(next(unpacked(raw, path, piece_bytes=blocks[0][0])), path, data)
    if 0 < scanner.num_with_line_ends <= scanner.num_records // 2:
        _logger.warning(
            "Found line ends within quotes in %d of %d rows of %s, first in row %d with the header as row 1. If the "
            "file has no quoting, rows were joined there: declare CsvData(quoting=False).",
            scanner.num_with_line_ends,
            scanner.num_records,
            path,
            scanner.first_with_line_ends + 1,
        )
    return FileLayout(
        row_group_rows=tuple(count for _, count in blocks[1:]), group_offsets=tuple(end for end, _ in blocks)
    )


class OpenedCsv:
    """One open file; one thread at a time."""

    def __init__(self, file: InputFile, data: CsvData) -> None:
        """Opens the file and reads its header.

        Raises:
          InputError: the file is missing or damaged, or a declared column is not in its header.
        """
        self._path = file.path
        self._data = data
        self._offsets = file.group_offsets
        self._text = _open_text(file.path)
        try:
            names = _names_in(self._range(0, self._offsets[0]), file.path, data)
        except BaseException:
            self._text.close()
            raise
        self._parser = CsvParser(
            names=tuple(names),
            kinds=_kinds(data),
            delimiter=data.delimiter,
            list_separators=data.list_separators,
            quoting=data.quoting,
            id_columns=frozenset(part.column for source in data.id_columns.values() for part in source.parts),
        )

    def read(self, group: RowGroup, decoder: Decoder) -> RawRows:
        """The declared columns of one block; rows that do not parse are nulls and malformed.

        Raises:
          InputError: the file is shorter than it was, or too many rows are malformed.
        """
        start, stop = self._offsets[group.group_in_file : group.group_in_file + 2]
        text = self._range(start, stop)
        origin = Origin(path=self._path, group=group.group_in_file, first_row=group.first_row)
        faults = decoder.faults_of(origin, group.num_rows)
        table = self._parser.parse(text)
        if table is None or table.num_rows != group.num_rows:
            ends = record_ends(text, self._path, delimiter=self._data.delimiter, quoting=self._data.quoting)
            if len(ends) != group.num_rows:
                raise InputError(
                    f"Found {len(ends)} rows in block {group.group_in_file} of {self._path}. Expected "
                    f"{group.num_rows}, as the index says. Restore the file, or start a run on the new data."
                )
            bounds = np.concatenate([[0], ends])
            table = self._parser.salvage(text, bounds, lambda fault: _add(fault, faults))
        return RawRows(columns=table, faults=faults)

    def close(self) -> None:
        self._text.close()

    def _range(self, start: int, stop: int) -> bytes:
        self._text.seek(start)
        text = self._text.read(stop - start)
        if len(text) != stop - start:
            raise InputError(
                f"Found {self._path} ending at byte {start + len(text):,}. Expected {self._offsets[-1]:,} bytes of "
                "text, as when the run began. Restore the file."
            )
        return text


def _names_in(header: bytes, path: str, data: CsvData) -> list[str]:
    """Names of all columns, of which the declared ones are checked.

    Raises:
      InputError: the header does not parse, or lacks a declared column.
    """
    try:
        names = header_names(header, delimiter=data.delimiter, quoting=data.quoting)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"Found {path}, whose header does not parse ({error}). Expected the names of the columns in UTF-8, between "
            f"{data.delimiter!r}. Repair its first line."
        ) from error
    kinds = _kinds(data)
    # A name that the header has twice is in the schema twice, which the check finds.
    check_schema(pa.schema([(name, kinds.get(name, pa.large_string())) for name in names]), data, path=path)
    return names


def _add(fault: CsvFault, faults: RowFaults) -> None:
    bad = np.zeros(len(faults.is_bad), bool)
    bad[fault.row] = True
    faults.add(bad, fault.column, found=lambda _: fault.found, reason=fault.reason)


def _open_text(path: str) -> IO[bytes]:
    """The text for reading anywhere in it.

    Raises:
      InputError: the file is missing, or its gzip stream is damaged.
    """
    raw = open_ranges(path)
    if not is_gzip(raw):
        return raw
    text = tempfile.TemporaryFile(prefix="podembed-csv-")  # noqa: SIM115 - closed by its reader
    try:
        with raw:
            for piece in unpacked(raw, path):
                text.write(piece)
    except OSError as error:
        text.close()
        raise InputError(
            f"Found no way to unpack {path} into a file in {tempfile.gettempdir()} ({error.strerror or error}). "
            "Expected room for its text there. Make room, name another folder (TMPDIR), or convert the file to Parquet."
        ) from error
    except BaseException:
        text.close()
        raise
    return text


def _kinds(data: CsvData) -> dict[str, pa.DataType]:
    """The type that each declared column is read as."""
    kinds: dict[str, pa.DataType] = dict.fromkeys(data.columns, pa.float64())
    sources = data.id_columns.values()
    numbers = [part.column for source in sources for part in source.parts if part.boundaries]
    numbers += [source.weights for source in sources if source.weights is not None]
    kinds |= {name: pa.large_list(pa.float64()) for name in numbers if name in data.list_separators}
    ids = [part for source in sources for part in source.parts if not part.boundaries]
    # A column that is read in several modes has the integers that all of them take.
    for part in sorted(ids, key=_takes_all, reverse=True):
        item = pa.uint64() if _takes_all(part) else pa.int64()
        item = pa.large_string() if part.column in data.strings else item
        kinds[part.column] = pa.large_list(item) if part.column in data.list_separators else item
    vectors = [column for column in data.dense_columns if isinstance(column, VectorColumn)]
    for column in (*vectors, *data.extra_columns):
        # Other columns of numbers are read as such.
        is_whole = isinstance(column, IntegerColumn | ListColumn) and column.dtype != "float32"
        item = pa.int64() if is_whole else pa.float64()
        kinds[column.name] = pa.large_list(item) if column.name in data.list_separators else item
    for name in data.time_columns & kinds.keys():
        kinds[name] = pa.timestamp("us")
    if data.sample_id is not None:
        kinds[data.sample_id] = pa.int64()
    return kinds


def _takes_all(part: IdColumn) -> bool:
    """Whether every integer of 64 bits is an id, of either sign."""
    return part.mode == "hash" or part.outside == "any"


def csv_content(data: CsvData) -> str:
    """What the id columns hold, which the declaration decides."""
    return id_kinds(pa.schema(list(_kinds(data).items())), data)


SOURCE = Source(declared=CsvData, layout=csv_layout, open=OpenedCsv, content=csv_content)
