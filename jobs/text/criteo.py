"""Criteo's click logs, plain or gzipped text, to Parquet: once, and then read from the converted folder.

Both the Kaggle and the 1TB form are read; the grammar of a line is in `jobs.text.criteo_lines`. A malformed line
is never dropped silently. It is counted, named by file, line number, field and content, and written with its text to a
dead-letter file beside the data. When there are more than `max_bad_lines` of them, conversion stops. So kept +
malformed = lines, always. The converted folder carries a fingerprint of its sources in its name, and is complete or not
there (`jobs.finished_folder`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.jobs.finished_folder import create_once
from podembed.jobs.text.blocks import TextError, blocks_of_lines
from podembed.jobs.text.criteo_lines import (
    CATEGORY_NAMES,
    INTEGER_NAMES,
    LineBlock,
    LineFault,
    parse_lines,
    plain_lines,
    read_line,
)
from podembed.workers.data.files import file_version, locate

FORMAT_VERSION = 1
MAX_BAD_LINES = 10
ROWS_PER_GROUP = 32_768
ROW_GROUPS_PER_FILE = 64
DEAD_LETTER_NAME = "malformed.jsonl"
_REPORTED_BAD_LINES = 100
_DEAD_LETTER_TEXT_BYTES = 1 << 16

_SCHEMA = pa.schema(
    [pa.field("label", pa.int8(), nullable=False)]
    + [pa.field(name, pa.int32()) for name in INTEGER_NAMES]
    + [pa.field(name, pa.int64()) for name in CATEGORY_NAMES]
    + [pa.field("sample_id", pa.int64(), nullable=False)]
)


class CriteoTextError(TextError):
    """The text cannot be converted: something other than click logs, or too many malformed lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """One malformed line; `line` counts from 1 within its file."""

    file: str
    line: int
    field: str
    found: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, {self.field}: found {self.found}, but {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion read and wrote. lines = kept + malformed.

    Attributes:
      folder: holds the Parquet files, `COMPLETE.json` and, if a line was malformed, the dead-letter file.
      sources: the files that were read, in order.
      lines: lines of all files; a blank last line is none.
      bad_lines: the first malformed lines, at most 100; the dead-letter file has all.
    """

    folder: Path
    sources: tuple[str, ...]
    lines: int
    kept: int
    malformed: int
    bad_lines: tuple[BadLine, ...]

    @property
    def paths(self) -> str:
        """The glob of the Parquet files, for `ParquetData`."""
        return str(self.folder / "part-*.parquet")


def convert_criteo(
    sources: Sequence[str],
    cache_dir: str | Path,
    *,
    max_bad_lines: int = MAX_BAD_LINES,
    rows_per_group: int = ROWS_PER_GROUP,
) -> ConversionReport:
    """Converts text files to Parquet below `cache_dir`, or finds them converted.

    Columns: `label` int8. `i0` to `i12` int32 and `c0` to `c25` int64 (the category as an unsigned 32-bit number), null
    where the field is empty. `sample_id` int64, the number of the line from 0 over all sources, malformed lines
    included.

    Args:
      sources: paths or globs, local or URLs; converted in sorted order.
      cache_dir: local folder of converted sets.
      max_bad_lines: malformed lines that are tolerated over all sources.
      rows_per_group: rows of a Parquet row group, which is the unit of reading and of shuffling.

    Raises:
      CriteoTextError: more than `max_bad_lines` lines are malformed, all of them are, or there is no line at all.
      TextError: a file is damaged or no text of lines.
      InputError: a pattern matches nothing.
      FolderError: the converted folder is damaged.
    """
    files = locate(sources)
    fingerprint = _fingerprint(files, rows_per_group)
    folder = Path(cache_dir) / f"criteo-v{FORMAT_VERSION}-{fingerprint}"

    def write(unfinished: Path) -> dict[str, Any]:
        report = _convert(files, unfinished, max_bad_lines, rows_per_group)
        if _fingerprint(files, rows_per_group) != fingerprint:
            raise CriteoTextError(
                f"Found that {', '.join(files[:3])} or another source changed while it was converted. Expected sources "
                "at rest. Wait until they are complete, and repeat."
            )
        return report

    report = create_once(folder, write)
    bad_lines = tuple(BadLine(**bad) for bad in report["bad_lines"])
    if report["malformed"] > max_bad_lines:
        raise _too_many(bad_lines, report["lines"], max_bad_lines)
    if not report["kept"]:
        quoted = "; ".join(str(bad) for bad in bad_lines[:3])
        raise CriteoTextError(
            f"Found no good line among the {report['lines']:,} of {', '.join(files[:3])}: {quoted}. Expected Criteo "
            "click logs, 40 fields between tabs. Check that these are the files that you mean."
        )
    return ConversionReport(
        folder=folder,
        sources=tuple(report["sources"]),
        lines=report["lines"],
        kept=report["kept"],
        malformed=report["malformed"],
        bad_lines=bad_lines,
    )


def _fingerprint(files: Sequence[str], rows_per_group: int) -> str:
    versions = [(Path(path).name, *file_version(path)) for path in files]
    described = json.dumps([FORMAT_VERSION, rows_per_group, ROW_GROUPS_PER_FILE, versions])
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _convert(files: Sequence[str], folder: Path, max_bad_lines: int, rows_per_group: int) -> dict[str, Any]:
    """Converts all files into an empty folder and returns the report."""
    writer = _PartWriter(folder, rows_per_group)
    dead_letters = _DeadLetters(folder / DEAD_LETTER_NAME, max_bad_lines)
    lines = 0
    try:
        for path in files:
            first_line_of_file = lines
            for block in blocks_of_lines(path):
                block = plain_lines(block)
                parsed = parse_lines(block)
                for at in np.flatnonzero(~parsed.is_good):
                    line = parsed.line(block, int(at))
                    dead_letters.add(
                        path, lines - first_line_of_file + int(at) + 1, line, lines_read=lines + int(at) + 1
                    )
                writer.add(_table(parsed, first_line=lines))
                lines += len(parsed.ends)
        writer.finish()
    finally:
        writer.end_file()
    if lines == 0:
        raise CriteoTextError(
            f"Found no line in {list(files)}. Expected click logs, 40 fields a line. Check the sources."
        )
    return {
        "format_version": FORMAT_VERSION,
        "sources": list(files),
        "lines": lines,
        "kept": writer.num_rows,
        "malformed": dead_letters.count,
        "bad_lines": [asdict(bad) for bad in dead_letters.first],
    }


def _table(parsed: LineBlock, *, first_line: int) -> pa.Table:
    """The good lines of a block as a table."""
    good = np.flatnonzero(parsed.is_good)
    columns = [pa.array(parsed.labels[good])]
    for values, is_empty in zip(parsed.integers, parsed.integer_is_empty, strict=True):
        columns.append(pa.array(values[good], mask=is_empty[good]))
    for values, is_empty in zip(parsed.categories, parsed.category_is_empty, strict=True):
        columns.append(pa.array(values[good], mask=is_empty[good]))
    columns.append(pa.array(good + first_line))
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _too_many(bad_lines: Sequence[BadLine], lines: int, max_bad_lines: int) -> CriteoTextError:
    quoted = "; ".join(str(bad) for bad in bad_lines[:3])
    return CriteoTextError(
        f"Found more than {max_bad_lines} malformed lines among the first {lines:,}: {quoted}. Expected Criteo click "
        "logs, 40 fields between tabs. Repair the source, or raise max_bad_lines to leave such lines out."
    )


class _DeadLetters:
    """Counts malformed lines and writes each, with what is wrong, to a file that exists only if there is one."""

    def __init__(self, path: Path, max_bad_lines: int) -> None:
        self.count = 0
        self.first: list[BadLine] = []
        self._path = path
        self._max_bad_lines = max_bad_lines

    def add(self, path: str, number: int, line: bytes, *, lines_read: int) -> None:
        """Takes one line.

        Raises:
          CriteoTextError: it is one too many.
        """
        fault = read_line(line)
        if not isinstance(fault, LineFault):
            raise CriteoTextError(
                f"Found {path}:{number} refused by one reader and read by the other. Please report this line: {line!r}."
            )
        bad = BadLine(file=path, line=number, field=fault.field, found=fault.found, reason=fault.reason)
        self.count += 1
        if len(self.first) < _REPORTED_BAD_LINES:
            self.first.append(bad)
        if self.count > self._max_bad_lines:
            raise _too_many(self.first, lines_read, self._max_bad_lines)
        text = line[:_DEAD_LETTER_TEXT_BYTES].decode("utf-8", "backslashreplace")
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(bad) | {"text": text}) + "\n")


@dataclass(slots=True)
class _PartWriter:
    """Writes rows to `part-00000.parquet` and so on, in row groups of one size; only the very last row group is
    smaller.
    """

    folder: Path
    rows_per_group: int
    num_rows: int = 0
    _num_groups: int = 0
    _pending: list[pa.Table] = field(default_factory=list)
    _writer: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        self._pending.append(table)
        self.num_rows += table.num_rows
        if sum(part.num_rows for part in self._pending) >= self.rows_per_group:
            rows = pa.concat_tables(self._pending)
            whole = rows.num_rows - rows.num_rows % self.rows_per_group
            for start in range(0, whole, self.rows_per_group):
                self._write_group(rows.slice(start, self.rows_per_group))
            self._pending = [rows.slice(whole)]

    def finish(self) -> None:
        """Writes the rows that do not fill a row group."""
        if sum(part.num_rows for part in self._pending):
            self._write_group(pa.concat_tables(self._pending))
        self._pending = []

    def _write_group(self, rows: pa.Table) -> None:
        if self._writer is None:
            number = self._num_groups // ROW_GROUPS_PER_FILE
            self._writer = pq.ParquetWriter(self.folder / f"part-{number:05d}.parquet", _SCHEMA)
        self._writer.write_table(rows, row_group_size=self.rows_per_group)
        self._num_groups += 1
        if self._num_groups % ROW_GROUPS_PER_FILE == 0:
            self.end_file()

    def end_file(self) -> None:
        """Closes the current file; what is not written yet is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
