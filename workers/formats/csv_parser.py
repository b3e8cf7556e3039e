"""`CsvParser`: records of CSV text to columns, and what is wrong with those that are refused. The one parser of CSV,
for reading (`workers.formats.csv`) and for preparing (`jobs.prepare.forms`).

Arrow parses many records at once. Text that it refuses is parsed in halves until the records that are malformed are
alone. One parser thus decides about all of them. Where records begin and end is found before, by
`workers.formats.csv_records`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from podembed.workers.data.times import parse_times
from podembed.workers.formats.csv_records import has_stray_text

# Its functions are made when it is imported, so type checkers do not know them.
pc: Any = pyarrow.compute

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# As `column` of a fault: the record does not fall into columns.
WHOLE_ROW = "row"
_SHOWN_BYTES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFault:
    """Why a record is malformed.

    Attributes:
      row: its number among those that were parsed together.
      column: the first one that is refused, or `WHOLE_ROW`.
      found: what stands there, shortened.
      reason: what should stand there.
    """

    row: int
    column: str
    found: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvParser:
    """Parses records without a header.

    Attributes:
      names: names of all columns, in order.
      kinds: the columns that are read and their types; a large list is cut up at its separator. An empty field is null.
        uint64 stands for integers from -2^63 to 2^64 - 1, which come out as int64 with the same 64 bits.
      quoting: whether fields may be quoted.
      id_columns: columns that could be declared as text where integers are read; faults in them say how.
    """

    names: tuple[str, ...]
    kinds: Mapping[str, pa.DataType]
    delimiter: str = ","
    list_separators: Mapping[str, str] = field(default_factory=dict)
    quoting: bool = True
    id_columns: frozenset[str] = frozenset()

    def parse(self, text: bytes) -> pa.Table | None:
        """All records of the text, or None if one of them is malformed."""
        return self._parse(text, self.kinds)

    def salvage(self, text: bytes, bounds: np.ndarray, on_fault: Callable[[CsvFault], None]) -> pa.Table:
        """A row for each record, of nulls for each malformed one.

        Args:
          bounds: int64, where each record begins, and the end.
          on_fault: callback that takes malformed records, in their order; whatever it raises ends the parsing.
        """
        tables = self._salvaged(text, bounds, 0, len(bounds) - 1, on_fault)
        return pa.concat_tables(tables) if tables else self._nulls(0)

    def texts(self, record: bytes) -> dict[str, str] | None:
        """The fields of one record as they stand there, shortened; None if it does not fall into columns."""
        whole = self._parse(record, dict.fromkeys(self.names, pa.binary()))
        if whole is None or whole.num_rows != 1:
            return None
        return {name: _shown(whole.column(name)[0].as_py() or b"") for name in whole.column_names}

    def _parse(self, text: bytes, kinds: Mapping[str, pa.DataType]) -> pa.Table | None:
        # Arrow takes such text for a part of the value.
        if self.quoting and has_stray_text(text, delimiter=self.delimiter):
            return None
        has_wide = any(_item(kind) == pa.uint64() for kind in kinds.values())
        parsed = self._parsed(text, kinds, is_wide=False)
        # Numbers beyond int64 are few, and reading them takes longer.
        return self._parsed(text, kinds, is_wide=True) if parsed is None and has_wide else parsed

    def _parsed(self, text: bytes, kinds: Mapping[str, pa.DataType], *, is_wide: bool) -> pa.Table | None:
        """All records, of which integers beyond int64 are refused unless `is_wide`."""
        # Lists are cut up below, and times read; to Arrow both are strings.
        read_as = {name: _read_as(kind, is_wide=is_wide) for name, kind in kinds.items()}
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(text),
                read_options=pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=len(text) + 1, column_names=list(self.names)
                ),
                parse_options=_parse_options(self.delimiter, quoting=self.quoting),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=read_as, include_columns=list(kinds), null_values=[""], strings_can_be_null=True
                ),
            )
            return pa.table(
                {name: self._converted(name, table.column(name), kind, is_wide) for name, kind in kinds.items()}
            )
        except (pa.ArrowException, UnicodeDecodeError):
            return None

    def _converted(
        self, name: str, column: pa.ChunkedArray, kind: pa.DataType, is_wide: bool
    ) -> pa.ChunkedArray | pa.Array:
        is_wide = is_wide and _item(kind) == pa.uint64()
        if pa.types.is_timestamp(kind):
            return parse_times(column)
        if not pa.types.is_large_list(kind):
            return _wide(column.combine_chunks()) if is_wide else column
        lists = pc.split_pattern(column, self.list_separators[name])
        if not is_wide:
            return lists.cast(_made(kind))
        one = lists.combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(one), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int64())
        mask = one.is_null() if one.null_count else None
        return pa.LargeListArray.from_arrays(offsets, _wide(one.flatten()), mask=mask)

    def _salvaged(
        self, text: bytes, bounds: np.ndarray, first: int, stop: int, on_fault: Callable[[CsvFault], None]
    ) -> list[pa.Table]:
        """Records `first` to `stop - 1`."""
        if first == stop:
            return []
        part = text[bounds[first] : bounds[stop]]
        table = self.parse(part)
        if table is not None and table.num_rows == stop - first:
            return [table]
        if stop - first > 1:
            middle = (first + stop) // 2
            before = self._salvaged(text, bounds, first, middle, on_fault)
            return before + self._salvaged(text, bounds, middle, stop, on_fault)
        on_fault(self._diagnose(part, first))
        return [self._nulls(1)]

    def _nulls(self, count: int) -> pa.Table:
        return pa.table({name: pa.nulls(count, _made(kind)) for name, kind in self.kinds.items()})

    def _diagnose(self, record: bytes, row: int) -> CsvFault:
        texts = self.texts(record)
        if texts is None:
            fields = f"A row has {len(self.names)} fields between {self.delimiter!r}"
            fields += ", and nothing behind a closing quote. Repair it" if self.quoting else ". Repair it"
            if self.quoting and b'"' in record:
                fields += ", or say that the file has no quoting: CsvData(quoting=False)"
            fields += "."
            return CsvFault(row=row, column=WHOLE_ROW, found=repr(_shown(record).rstrip("\r\n")), reason=fields)
        for name, kind in self.kinds.items():
            if self._parse(record, {name: kind}) is None:
                expected = (
                    f"Expected {_expected(kind)}. Repair it{_hint(name, kind) if name in self.id_columns else ''}."
                )
                return CsvFault(row=row, column=name, found=repr(texts[name]), reason=expected)
        reason = "It is refused as a whole and read column by column. Please report this row."
        return CsvFault(row=row, column=WHOLE_ROW, found=repr(_shown(record)), reason=reason)


def header_names(line: bytes, *, delimiter: str, quoting: bool = True) -> list[str]:
    """Names of columns in the first line of a file, which may begin with a byte order mark.

    Raises:
      ArrowException, UnicodeDecodeError: it does not parse.
    """
    line = line.removeprefix(BYTE_ORDER_MARK)
    table = pyarrow.csv.read_csv(
        pa.BufferReader(line + b"\n"),
        read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=len(line) + 2),
        parse_options=_parse_options(delimiter, quoting=quoting),
    )
    return table.column_names


def _parse_options(delimiter: str, *, quoting: bool) -> pyarrow.csv.ParseOptions:
    return pyarrow.csv.ParseOptions(
        delimiter=delimiter, quote_char='"' if quoting else False, newlines_in_values=quoting
    )


def _item(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_large_list(kind) else kind


def _made(kind: pa.DataType) -> pa.DataType:
    """The type of what comes out."""
    if _item(kind) != pa.uint64():
        return kind
    return pa.large_list(pa.int64()) if pa.types.is_large_list(kind) else pa.int64()


def _read_as(kind: pa.DataType, *, is_wide: bool) -> pa.DataType:
    is_later = pa.types.is_large_list(kind) or pa.types.is_timestamp(kind) or (is_wide and kind == pa.uint64())
    return pa.large_string() if is_later else _made(kind)


def _wide(texts: pa.Array) -> pa.Array:
    """int64 with the bits of integers from -2^63 to 2^64 - 1.

    Raises:
      ArrowInvalid: one is something else.
    """
    is_negative, none = pc.starts_with(texts, "-"), pa.scalar(None, texts.type)
    negative = pc.if_else(is_negative, texts, none).cast(pa.int64())
    return pc.coalesce(negative, pc.if_else(is_negative, none, texts).cast(pa.uint64()).view(pa.int64()))


def _shown(text: bytes) -> str:
    return text[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")


def _hint(name: str, kind: pa.DataType) -> str:
    """What else may be meant where integers are read."""
    if _item(kind) == pa.uint64():
        return f", or say that the column is text: CsvData(strings=({name!r},))"
    return f"; ids that are text need mode='hash' and CsvData(strings=({name!r},))" if _item(kind) == pa.int64() else ""


def _expected(kind: pa.DataType) -> str:
    if pa.types.is_large_list(kind):
        return f"a list of {_expected(kind.value_type)}"
    if pa.types.is_timestamp(kind):
        return "a date or time in ISO 8601, such as 2024-05-01 or 2024-05-01T12:30:00Z"
    if pa.types.is_integer(kind):
        return "integers of 64 bits" if kind in (pa.int64(), pa.uint64()) else "integers"
    return "numbers" if pa.types.is_floating(kind) else "text in UTF-8"
