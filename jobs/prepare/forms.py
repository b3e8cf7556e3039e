"""The two forms of text that can be prepared, Criteo's click logs and CSV with a header, each as a reader of blocks of
lines.

A reader turns a block into columns of its good lines and names the faults of the others; nothing is dropped silently.
In CSV, a line is a row: a quoted value that continues in the next line is a fault of both lines. Values of fields stay
what they are here: numbers for Criteo's hexadecimal categories, text for CSV. Vocabulary files hold them so. How they
become ids is the business of `jobs.prepare.rows_of_values`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from podembed.jobs.prepare.settings import PrepareError, PrepareSettings
from podembed.jobs.text.blocks import blocks_of_lines
from podembed.jobs.text.criteo_lines import (
    CATEGORY_NAMES,
    INTEGER_NAMES,
    LineFault,
    has_labels,
    parse_lines,
    plain_lines,
    read_line,
)
from podembed.jobs.text.csv_lines import LINE_IS_GOOD, OPEN_QUOTE, OTHER_FIELDS, line_faults
from podembed.workers.formats.csv_parser import CsvFault, CsvParser, header_names

_QUOTED_CHARACTERS = 60
# Training reads numbers as float32 and refuses those that become infinite.
_LARGEST_NUMBER = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ParsedBlock:
    """The good lines of a block as columns, and what is wrong with the others.

    Attributes:
      label: one number a good line; nulls alone where no line has a label.
      dense, values: column name to its values, null where the line has none.
      faults: (position of the line in the block, its fault, its bytes), in order.
    """

    num_lines: int
    label: pa.Array
    dense: dict[str, pa.Array]
    values: dict[str, pa.Array]
    faults: list[tuple[int, LineFault, bytes]]


# Stands before lines without a label while they are read.
_LABEL = b"0\t"


class TextForm(Protocol):
    """A reader of one form of text.

    Attributes:
      value_type: Arrow type of the fields' values: int64 or string.
      header_lines: lines at the beginning of each file that are no rows.
    """

    value_type: pa.DataType
    header_lines: int

    def parse(self, block: bytes, *, max_faults: int) -> ParsedBlock:
        """Reads a block of whole lines, without the header. With more faults than that, the rest of the block may be
        left unread.
        """
        ...

    def text_of(self, values: pa.Array) -> list[str]:
        """Values as they stand in the text."""
        ...


@dataclass(frozen=True, slots=True)
class CriteoForm:
    """Criteo's click logs, see `jobs.text.criteo_lines`. Values are the categories as unsigned 32-bit numbers."""

    value_type = pa.int64()
    header_lines = 0

    def parse(self, block: bytes, *, max_faults: int) -> ParsedBlock:
        block = plain_lines(block)
        is_labelled = has_labels(block)
        if not is_labelled:
            block = b"".join(_LABEL + line for line in block.splitlines(keepends=True))
        parsed = parse_lines(block)
        good = np.flatnonzero(parsed.is_good)
        faults = []
        for at in np.flatnonzero(~parsed.is_good):
            line = parsed.line(block, int(at))
            fault = read_line(line)
            if not isinstance(fault, LineFault):
                raise RuntimeError(
                    f"A line was refused by one reader and read by the other. Please report it: {line!r}."
                )
            faults.append((int(at), fault, line if is_labelled else line.removeprefix(_LABEL)))
        integers = zip(INTEGER_NAMES, parsed.integers, parsed.integer_is_empty, strict=True)
        categories = zip(CATEGORY_NAMES, parsed.categories, parsed.category_is_empty, strict=True)
        return ParsedBlock(
            num_lines=len(parsed.ends),
            label=pa.array(parsed.labels[good]) if is_labelled else pa.nulls(len(good), pa.int8()),
            dense={name: pa.array(values[good], mask=is_empty[good]) for name, values, is_empty in integers},
            values={name: pa.array(values[good], mask=is_empty[good]) for name, values, is_empty in categories},
            faults=faults,
        )

    def text_of(self, values: pa.Array) -> list[str]:
        return [f"{value:08x}" for value in values.to_pylist()]


@dataclass(frozen=True, slots=True)
class CsvForm:
    """Comma-separated values, quoted as in RFC 4180 but for line ends in values. Values of fields are text. Parsed as
    training parses CSV (`workers.formats.csv_parser`), a line at a time in meaning though not in work.

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

    @property
    def _parser(self) -> CsvParser:
        kinds: dict[str, pa.DataType] = {name: pa.float64() for name in (self.label, *self.dense)}
        return CsvParser(names=self.header, kinds=kinds | dict.fromkeys(self.fields, pa.string()))

    def parse(self, block: bytes, *, max_faults: int) -> ParsedBlock:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        bounds = np.concatenate([np.zeros(1, np.int64), ends + 1])
        kinds = line_faults(block, ends, delimiter=",", num_fields=len(self.header))
        faults: dict[int, LineFault] = {}
        lines = np.flatnonzero(kinds == LINE_IS_GOOD)
        table = None
        try:
            for at in np.flatnonzero(kinds).tolist():
                _put(faults, at, self._line_fault(block[bounds[at] : ends[at]], int(kinds[at])), max_faults)
            table = self._table(block, bounds, lines, faults, max_faults)
            self._check_numbers(table, block, bounds, lines, faults, max_faults)
        except _EnoughFaults:
            lines = lines[:0]
            table = pa.table({name: pa.nulls(0, kind) for name, kind in self._parser.kinds.items()})
        is_good = np.array([at not in faults for at in lines.tolist()], bool)
        columns = {name: table[name].combine_chunks().filter(pa.array(is_good)) for name in table.column_names}
        return ParsedBlock(
            num_lines=len(ends),
            label=columns[self.label],
            dense={name: columns[name] for name in self.dense},
            values={name: columns[name] for name in self.fields},
            faults=[(at, faults[at], block[bounds[at] : ends[at]]) for at in sorted(faults)],
        )

    def _table(
        self, block: bytes, bounds: np.ndarray, lines: np.ndarray, faults: dict[int, LineFault], max_faults: int
    ) -> pa.Table:
        """A row for each of the lines, which have all fields; nulls for those that do not parse."""
        text, starts = block, bounds
        if len(lines) + 1 != len(bounds):
            text = b"".join(block[bounds[at] : bounds[at + 1]] for at in lines.tolist())
            starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.diff(bounds)[lines])])
        table = self._parser.parse(text) if len(lines) else None
        if table is not None and table.num_rows == len(lines):
            return table

        def add(fault: CsvFault) -> None:
            found = LineFault(field=fault.column, found=fault.found, reason=self._reason(fault.column))
            _put(faults, int(lines[fault.row]), found, max_faults)

        return self._parser.salvage(text, starts, add)

    def _check_numbers(
        self,
        table: pa.Table,
        block: bytes,
        bounds: np.ndarray,
        lines: np.ndarray,
        faults: dict[int, LineFault],
        max_faults: int,
    ) -> None:
        """Adds the lines with a number that training would refuse."""
        for name in (self.label, *self.dense):
            numbers = table[name].to_numpy()
            is_bad = ~(np.abs(numbers) <= _LARGEST_NUMBER)
            if name != self.label:
                is_bad &= table[name].is_valid().to_numpy()
            for at in lines[is_bad].tolist():
                if at not in faults:
                    texts = self._parser.texts(block[bounds[at] : bounds[at + 1]]) or {}
                    found = LineFault(field=name, found=_quoted(texts.get(name, "")), reason=self._reason(name))
                    _put(faults, at, found, max_faults)

    def _line_fault(self, line: bytes, kind: int) -> LineFault:
        shown = _quoted(line[: 4 * _QUOTED_CHARACTERS].decode("utf-8", "backslashreplace"))
        if kind == OTHER_FIELDS:
            return LineFault(field="line", found=shown, reason=f"a line has {len(self.header)} values, as the header")
        if kind == OPEN_QUOTE:
            return LineFault(field="line", found=shown, reason="a line is a row, and quotes are closed in their line")
        return LineFault(
            field="line", found=shown, reason="in a line nothing stands between a closing quote and a comma"
        )

    def _reason(self, column: str) -> str:
        if column == self.label:
            return f"a label is a number, at most {_LARGEST_NUMBER:.2g}"
        if column in self.dense:
            return f"a dense value is a finite number or empty, at most {_LARGEST_NUMBER:.2g}"
        return "a line is a row of text in UTF-8"

    def text_of(self, values: pa.Array) -> list[str]:
        return values.to_pylist()


class _EnoughFaults(Exception):
    """The block is not worth going on with."""


def _put(faults: dict[int, LineFault], at: int, fault: LineFault, max_faults: int) -> None:
    faults[at] = fault
    if len(faults) > max_faults:
        raise _EnoughFaults


def _quoted(text: str) -> str:
    return repr(text[:_QUOTED_CHARACTERS]) + ("…" if len(text) > _QUOTED_CHARACTERS else "")


def open_form(settings: PrepareSettings, files: Sequence[str]) -> TextForm:
    """The reader for these files. For CSV, reads their headers, which must be one and the same.

    Raises:
      PrepareError: a file has no header, another one than the first, or not the wanted columns.
      TextError: a file is damaged.
    """
    if settings.form == "criteo":
        return CriteoForm()
    headers = {path: _header(path) for path in files}
    first, header = next(iter(headers.items()))
    for path, other in headers.items():
        if other != header:
            raise PrepareError(
                f"Found header {','.join(other)} in {path} and {','.join(header)} in {first}. Expected one header in "
                "all files. Prepare the files apart, or write them with the same columns."
            )
    dense = tuple(column.name for column in settings.dense)
    return CsvForm(header, settings.label, dense, tuple(field.name for field in settings.fields))


def _header(path: str) -> tuple[str, ...]:
    for block in blocks_of_lines(path):
        try:
            line = block[: block.index(b"\n")].removesuffix(b"\r")
            if line_faults(line, np.array([len(line)]), delimiter=",", num_fields=0)[0] != OTHER_FIELDS:
                raise ValueError("quotes that do not close, or text behind one")
            return tuple(header_names(line, delimiter=","))
        except (ValueError, pa.ArrowException) as error:
            raise PrepareError(
                f"Found no header in {path} ({error!r}). Expected names of columns in UTF-8 in its first line. Write "
                "one."
            ) from error
    raise PrepareError(f"Found nothing in {path}. Expected CSV with a header. Leave the file out.")
