"""One line of Criteo's click logs: its grammar, and two readers of it.

A line is 40 fields between tabs: the label, 13 integers and 26 categories of eight hexadecimal digits. Integers and
categories may be empty, so a line can end in tabs. `parse_lines` reads a whole block of lines as fast as they come from
disk and only says which ones are malformed. `read_line` reads one line in plain Python, says what is wrong with it, and
is the oracle of the other. Files and what becomes of malformed lines are the business of `jobs.text.criteo`.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

import numba
import numpy as np

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES
INTEGER_NAMES = tuple(f"i{number}" for number in range(NUM_INTEGERS))
CATEGORY_NAMES = tuple(f"c{number}" for number in range(NUM_CATEGORIES))
FIELD_NAMES = ("label", *INTEGER_NAMES, *CATEGORY_NAMES)

_INTEGER = re.compile(rb"-?[0-9]{1,10}")
_CATEGORY = re.compile(rb"[0-9a-fA-F]{8}")
_INT32 = np.iinfo(np.int32)
_QUOTED_BYTES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFault:
    """Why a line is malformed.

    Attributes:
      field: the column it would have become, or "line" if the number of fields is wrong.
      found: what stands there, shortened.
      reason: what should stand there.
    """

    field: str
    found: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class LineBlock:
    """The lines of one block of text, as columns. Entries of malformed lines and of empty fields are unspecified.

    Attributes:
      ends: int64 `[num_lines]`, position of the newline of each line in the block.
      is_good: bool `[num_lines]`.
      labels: int8 `[num_lines]`.
      integers, integer_is_empty: int32 and bool `[13, num_lines]`.
      categories, category_is_empty: int64 and bool `[26, num_lines]`.
    """

    ends: np.ndarray
    is_good: np.ndarray
    labels: np.ndarray
    integers: np.ndarray
    integer_is_empty: np.ndarray
    categories: np.ndarray
    category_is_empty: np.ndarray

    def line(self, block: bytes, at: int) -> bytes:
        """The text of a line of the block that was parsed, without its newline."""
        return block[self.ends[at - 1] + 1 if at else 0 : self.ends[at]]


def plain_lines(block: bytes) -> bytes:
    """The same lines without the byte order mark and the carriage returns of Windows."""
    block = block.removeprefix(codecs.BOM_UTF8)
    return block.replace(b"\r\n", b"\n") if b"\r\n" in block else block


def has_labels(block: bytes) -> bool:
    """Whether lines have a label; those of Criteo's test file have a field less. Lines of any other width do not count:
    they are malformed.
    """
    if block.count(b"\t") == (NUM_FIELDS - 1) * block.count(b"\n"):
        return True
    tabs = [line.count(b"\t") for line in block.splitlines()]
    return tabs.count(NUM_FIELDS - 2) <= tabs.count(NUM_FIELDS - 1)


def read_line(line: bytes) -> list[int | None] | LineFault:
    """The 40 values of a line without its newline, None for an empty field, or its first fault."""
    fields = line.split(b"\t")
    if len(fields) != NUM_FIELDS:
        return LineFault(
            field="line", found=f"{len(fields)} fields: {_quoted(line)}", reason="a line has 40 fields between tabs"
        )
    values: list[int | None] = []
    for name, field in zip(FIELD_NAMES, fields, strict=True):
        value = _read_field(name, field)
        if isinstance(value, LineFault):
            return value
        values.append(value)
    return values


def _read_field(name: str, field: bytes) -> int | LineFault | None:
    if name == "label":
        return (
            int(field)
            if field in (b"0", b"1")
            else LineFault(field=name, found=_quoted(field), reason="a label is 0 or 1")
        )
    if not field:
        return None
    if name in INTEGER_NAMES:
        if _INTEGER.fullmatch(field) and _INT32.min <= int(field) <= _INT32.max:
            return int(field)
        return LineFault(
            field=name, found=_quoted(field), reason="an integer has at most ten digits and fits 32 bits, or is empty"
        )
    if _CATEGORY.fullmatch(field):
        return int(field, 16)
    return LineFault(field=name, found=_quoted(field), reason="a category is eight hexadecimal digits, or is empty")


def _quoted(text: bytes) -> str:
    shown = text[:_QUOTED_BYTES].decode("utf-8", "backslashreplace")
    return repr(shown) + ("…" if len(text) > _QUOTED_BYTES else "")


def parse_lines(block: bytes | memoryview) -> LineBlock:
    """Reads all lines of a block that ends with a newline, or is empty."""
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    count = len(ends)
    parsed = LineBlock(
        ends=ends,
        is_good=np.zeros(count, bool),
        labels=np.zeros(count, np.int8),
        integers=np.zeros((NUM_INTEGERS, count), np.int32),
        integer_is_empty=np.zeros((NUM_INTEGERS, count), bool),
        categories=np.zeros((NUM_CATEGORIES, count), np.int64),
        category_is_empty=np.zeros((NUM_CATEGORIES, count), bool),
    )
    _parse(
        text,
        ends,
        parsed.is_good,
        parsed.labels,
        parsed.integers,
        parsed.integer_is_empty,
        parsed.categories,
        parsed.category_is_empty,
    )
    return parsed


@numba.njit(nogil=True, cache=True)
def _parse(
    text: np.ndarray,
    ends: np.ndarray,
    is_good: np.ndarray,
    labels: np.ndarray,
    integers: np.ndarray,
    integer_is_empty: np.ndarray,
    categories: np.ndarray,
    category_is_empty: np.ndarray,
) -> None:
    at = 0
    for line in range(len(ends)):
        end = ends[line]
        good = end - at >= 1 and (text[at] == 48 or text[at] == 49)
        if good:
            labels[line] = text[at] - 48
            at += 1
        for number in range(NUM_INTEGERS):
            if good:
                good, at = _parse_integer(text, at, end, line, integers[number], integer_is_empty[number])
        for number in range(NUM_CATEGORIES):
            if good:
                good, at = _parse_category(text, at, end, line, categories[number], category_is_empty[number])
        is_good[line] = good and at == end
        at = end + 1


@numba.njit(nogil=True, cache=True)
def _parse_integer(
    text: np.ndarray, at: int, end: int, line: int, values: np.ndarray, is_empty: np.ndarray
) -> tuple[bool, int]:
    """Reads a tab and a decimal number or nothing; (whether it was well formed, the position behind it)."""
    if at >= end or text[at] != 9:
        return False, at
    at += 1
    is_negative = at < end and text[at] == 45
    if is_negative:
        at += 1
    first = at
    value = np.int64(0)
    while at < end and at - first <= 10 and 48 <= text[at] <= 57:
        value = value * 10 + (np.int64(text[at]) - 48)
        at += 1
    num_digits = at - first
    if num_digits == 0:
        is_empty[line] = True
        # A lone minus sign is no number, and whatever else stands here is met by the next field, which wants its tab.
        return not is_negative, at
    if is_negative:
        value = -value
    values[line] = np.int32(value)
    return bool(num_digits <= 10 and -2147483648 <= value <= 2147483647), at


@numba.njit(nogil=True, cache=True)
def _parse_category(
    text: np.ndarray, at: int, end: int, line: int, values: np.ndarray, is_empty: np.ndarray
) -> tuple[bool, int]:
    """Reads a tab and eight hexadecimal digits or nothing; (whether it was well formed, the position behind it)."""
    if at >= end or text[at] != 9:
        return False, at
    at += 1
    if at == end or text[at] == 9:
        is_empty[line] = True
        return True, at
    if end - at < 8:
        return False, at
    value = np.int64(0)
    for k in range(at, at + 8):
        digit = np.int64(text[k])
        if 48 <= digit <= 57:
            value = value * 16 + digit - 48
        elif 97 <= digit <= 102:
            value = value * 16 + digit - 87
        elif 65 <= digit <= 70:
            value = value * 16 + digit - 55
        else:
            return False, at
    values[line] = value
    return True, at + 8
