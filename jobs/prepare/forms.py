"""The two forms of text that can be prepared, Criteo's click logs and CSV with a header, each as a reader of blocks of lines.

A reader turns a block into columns of its good lines and names the faults of the others; nothing is dropped silently. In CSV, a line is a
row: a quoted value that goes on in the next line is a fault of both lines. Values of fields stay what they are here, numbers for Criteo's
hexadecimal categories and text for CSV, and so they stand in vocabulary files; how they become ids is the business of `jobs.prepare.ids`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from jobs.prepare.settings import PrepareError, PrepareSettings
from workers.criteo_lines import CATEGORY_NAMES, INTEGER_NAMES, Fault, parse_lines, read_line
from workers.text_lines import blocks_of_lines

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_QUOTED_CHARACTERS = 60
# Training reads numbers as float32 and refuses those that become infinite.
_LARGEST_NUMBER = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ParsedBlock:
    """The good lines of a block as columns, and what is wrong with the others.

    Attributes:
      label: one number a good line, without nulls.
      dense, values: column name to its values, null where the line has none.
      faults: (position of the line in the block, its fault, its bytes), in order.
    """

    num_lines: int
    label: pa.Array
    dense: dict[str, pa.Array]
    values: dict[str, pa.Array]
    faults: list[tuple[int, Fault, bytes]]


class TextForm(Protocol):
    """A reader of one form of text.

    Attributes:
      value_type: Arrow type of the fields' values: int64 or string.
      header_lines: lines at the beginning of each file that are no rows.
    """

    value_type: pa.DataType
    header_lines: int

    def parse(self, block: bytes) -> ParsedBlock:
        """Reads a block of whole lines, without the header."""
        ...

    def dense_type(self, name: str) -> pa.DataType: ...

    def text_of(self, values: pa.Array) -> list[str]:
        """Values as they stand in the text."""
        ...


@dataclass(frozen=True, slots=True)
class CriteoForm:
    """Criteo's click logs, see `workers.criteo_lines`. Values are the categories as unsigned 32-bit numbers."""

    value_type = pa.int64()
    header_lines = 0

    def parse(self, block: bytes) -> ParsedBlock:
        parsed = parse_lines(block)
        good = np.flatnonzero(parsed.is_good)
        faults = []
        for at in np.flatnonzero(~parsed.is_good):
            line = parsed.line(block, int(at))
            fault = read_line(line)
            if not isinstance(fault, Fault):
                raise RuntimeError(
                    f"A line was refused by one reader and read by the other. Please report it: {line!r}."
                )
            faults.append((int(at), fault, line))
        integers = zip(INTEGER_NAMES, parsed.integers, parsed.integer_is_empty, strict=True)
        categories = zip(CATEGORY_NAMES, parsed.categories, parsed.category_is_empty, strict=True)
        return ParsedBlock(
            num_lines=len(parsed.ends),
            label=pa.array(parsed.labels[good]),
            dense={name: pa.array(values[good], mask=is_empty[good]) for name, values, is_empty in integers},
            values={name: pa.array(values[good], mask=is_empty[good]) for name, values, is_empty in categories},
            faults=faults,
        )

    def dense_type(self, name: str) -> pa.DataType:
        return pa.int32()

    def text_of(self, values: pa.Array) -> list[str]:
        return [f"{value:08x}" for value in values.to_pylist()]


@dataclass(frozen=True, slots=True)
class CsvForm:
    """Comma-separated values, quoted as in RFC 4180 but for line ends in values. Values of fields are text.

    Attributes:
      header: names of all columns, in order.
      label, dense, fields: those that are read.
    """

    header: tuple[str, ...]
    label: str
    dense: tuple[str, ...]
    fields: tuple[str, ...]
    value_type = pa.string()
    header_lines = 1

    def __post_init__(self) -> None:
        missing = [name for name in (self.label, *self.dense, *self.fields) if self.header.count(name) != 1]
        if missing:
            raise PrepareError(
                f"Found columns {', '.join(self.header)}. Expected each of {', '.join(missing)} once among them. "
                "Correct the names given for --label, --dense and --fields, or the header."
            )

    def parse(self, block: bytes) -> ParsedBlock:
        lines = block.split(b"\n")[:-1]
        rows: list[list[str]] = []
        numbers: list[list[float | None]] = []
        faults: list[tuple[int, Fault, bytes]] = []
        number_columns = [(name, self.header.index(name)) for name in (self.label, *self.dense)]
        for at, line in enumerate(lines):
            row = self._row(line)
            read = row if isinstance(row, Fault) else self._numbers(row, number_columns)
            if isinstance(read, Fault):
                faults.append((at, read, line))
            elif not isinstance(row, Fault):
                rows.append(row)
                numbers.append(read)
        columns = list(zip(*numbers, strict=True)) or [()] * len(number_columns)
        return ParsedBlock(
            num_lines=len(lines),
            label=pa.array(columns[0], pa.float64()),
            dense={name: pa.array(columns[1 + at], pa.float64()) for at, name in enumerate(self.dense)},
            values={name: self._text(rows, self.header.index(name)) for name in self.fields},
            faults=faults,
        )

    def _row(self, line: bytes) -> list[str] | Fault:
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            return Fault(
                field="line", found=f"byte {line[error.start]:#04x} at {error.start}", reason="a line is UTF-8 text"
            )
        try:
            row = next(csv.reader([text], strict=True), [])
        except csv.Error as error:
            return Fault(
                field="line",
                found=f"{_quoted(text)} ({error})",
                reason="a line is a row, and quotes are closed in their line",
            )
        if len(row) != len(self.header):
            reason = f"a line has {len(self.header)} values, as the header"
            return Fault(field="line", found=f"{len(row)} values: {_quoted(text)}", reason=reason)
        return row

    def _numbers(self, row: list[str], columns: list[tuple[str, int]]) -> list[float | None] | Fault:
        """The label and the dense numbers of a row, None for an empty one."""
        read: list[float | None] = []
        for name, at in columns:
            text = row[at]
            if not text and name != self.label:
                read.append(None)
                continue
            if not _NUMBER.fullmatch(text) or abs(value := float(text)) > _LARGEST_NUMBER:
                reason = "a label is a number" if name == self.label else "a dense value is a finite number or empty"
                reason += f", at most {_LARGEST_NUMBER:.2g}"
                return Fault(field=name, found=_quoted(text), reason=reason)
            read.append(value)
        return read

    def _text(self, rows: list[list[str]], at: int) -> pa.Array:
        return pa.array([row[at] or None for row in rows], pa.string())

    def dense_type(self, name: str) -> pa.DataType:
        return pa.float64()

    def text_of(self, values: pa.Array) -> list[str]:
        return values.to_pylist()


def _quoted(text: str) -> str:
    return repr(text[:_QUOTED_CHARACTERS]) + ("…" if len(text) > _QUOTED_CHARACTERS else "")


def open_form(settings: PrepareSettings, files: Sequence[str]) -> TextForm:
    """The reader for these files. For CSV, reads their headers, which must be one and the same.

    Raises:
      PrepareError: a file has no header, another one than the first, or not the columns that are asked for.
      TextError: a file is damaged.
    """
    if settings.form == "criteo":
        return CriteoForm()
    headers = {path: _header(path) for path in files}
    first, header = next(iter(headers.items()))
    for path, other in headers.items():
        if other != header:
            raise PrepareError(
                f"Found header {','.join(other)} in {path} and {','.join(header)} in {first}. Expected one header in all files. "
                "Prepare the files apart, or write them with the same columns."
            )
    dense = tuple(column.name for column in settings.dense)
    return CsvForm(header, settings.label, dense, tuple(field.name for field in settings.fields))


def _header(path: str) -> tuple[str, ...]:
    for block in blocks_of_lines(path):
        try:
            line = block[: block.index(b"\n")].removesuffix(b"\r").decode("utf-8-sig")
            return tuple(next(csv.reader([line], strict=True)))
        except (UnicodeDecodeError, csv.Error, StopIteration) as error:
            raise PrepareError(
                f"Found no header in {path} ({error!r}). Expected names of columns in UTF-8 in its first line. Write one."
            ) from error
    raise PrepareError(f"Found nothing in {path}. Expected CSV with a header. Leave the file out.")
