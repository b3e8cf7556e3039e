"""`Vocabulary`: the values of a text file, one a line, and the row of the table that each stands for.

The file is UTF-8 text; the value of line k, counted from 0, has row `num_reserved + k`. For a column of integers the
lines are decimal numbers, for one of strings they are taken byte for byte. Lines end with a newline, or all of them as
Windows (CR LF) or old spreadsheets (CR) end theirs; a byte order mark before the first is no part of it. Else nothing
is stripped: a space is part of a value. Lookup is exact, through a hash table that is built when the first column of
its kind asks.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import re
from functools import cached_property

import numpy as np
import pyarrow as pa

from podembed.workers.columns.column_kernels import frozen
from podembed.workers.columns.string_keys import find_integers, find_strings, insert_keys, num_hash_slots, string_keys
from podembed.workers.data.files import read_whole
from podembed.workers.data.input_errors import InputError

OUT_OF_VOCABULARY = 0
_logger = logging.getLogger(__name__)
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


class Vocabulary:
    """One vocabulary file in memory. Lookups change nothing.

    Attributes:
      path: path of the file.
      num_values: its lines.
    """

    def __init__(self, path: str, content: bytes) -> None:
        """Raises:
        InputError: the content is not UTF-8, has no value, an empty line or a value twice.
        """
        self.path = path
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise self._error(f"bytes that are not UTF-8 in line {line}", "text in UTF-8") from None
        content = _with_newlines(content.removeprefix(codecs.BOM_UTF8), path)
        self._text = frozen(np.frombuffer(content, np.uint8), np.uint8)
        ends = np.flatnonzero(self._text == ord("\n"))
        self.num_values = len(ends)
        if not len(ends):
            raise self._error("no value", "at least one line")
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
        empty = np.flatnonzero(starts == ends)
        if len(empty):
            raise self._error(
                f"nothing in line {empty[0] + 1}", "a value in every line, since empty values are missing ones"
            )
        # Without the line ends, so that two neighbouring offsets bound a value.
        bounds = np.append(starts, len(content)) - np.arange(len(ends) + 1)
        self._offsets = frozen(bounds, np.int64)
        self._text = frozen(self._text[self._text != ord("\n")], np.uint8)
        self._check_unique()

    def rows_of_strings(self, strings: pa.LargeStringArray, *, num_reserved: int) -> np.ndarray:
        """int64 rows of strings without nulls; row 0 for those that the file does not have."""
        text, offsets = text_of(strings)
        wanted = np.empty(len(strings), np.int64)
        string_keys(text, offsets, wanted)
        found = np.empty(len(strings), np.int64)
        find_strings(
            text, offsets, wanted, self._text, self._offsets, self._string_keys, self._string_hash_slots, found
        )
        return _rows(found, num_reserved)

    def rows_of_integers(self, values: np.ndarray, *, num_reserved: int) -> np.ndarray:
        """int64 rows of int64 values; row 0 for those that the file does not have.

        Raises:
          InputError: a line of the file is no integer.
        """
        found = np.empty(len(values), np.int64)
        if not len(values):
            # A column without a value may be one of text.
            return found
        find_integers(frozen(values, np.int64), self._integers, self._integer_hash_slots, found)
        return _rows(found, num_reserved)

    def line(self, number: int) -> str:
        """The value of a line, counted from 0."""
        start, stop = self._offsets[number : number + 2].tolist()
        return self._text[start:stop].tobytes().decode()

    @cached_property
    def lines(self) -> pa.LargeStringArray:
        """All values, as views of the file's text."""
        offsets, text = pa.py_buffer(self._offsets), pa.py_buffer(self._text)
        return pa.Array.from_buffers(pa.large_string(), self.num_values, [None, offsets, text])

    def digest(self, num_values: int) -> str:
        """Hexadecimal SHA-256 of the first lines, and where each begins."""
        stop = int(self._offsets[num_values])
        hashed = hashlib.sha256(self._offsets[: num_values + 1].tobytes())
        hashed.update(self._text[:stop].tobytes())
        return hashed.hexdigest()

    @cached_property
    def _string_keys(self) -> np.ndarray:
        keys = np.empty(self.num_values, np.int64)
        string_keys(self._text, self._offsets, keys)
        return keys

    @cached_property
    def _string_hash_slots(self) -> np.ndarray:
        return _hash_slots(self._string_keys)

    @cached_property
    def _integers(self) -> np.ndarray:
        try:
            integers = self.lines.cast(pa.int64())
            # Not every text of an integer is the one that a number of the data is compared by.
            if integers.cast(pa.large_string()).equals(self.lines):
                return frozen(integers.to_numpy(), np.int64)
        except pa.ArrowInvalid:
            pass
        at, value = next((at, line) for at, line in enumerate(self.lines.to_pylist()) if not _is_integer(line))
        raise self._error(f"{value!r} in line {at + 1}", "integers in decimal, as for any column of integers")

    @cached_property
    def _integer_hash_slots(self) -> np.ndarray:
        return _hash_slots(self._integers)

    def _check_unique(self) -> None:
        found = np.empty(self.num_values, np.int64)
        keys = self._string_keys
        find_strings(self._text, self._offsets, keys, self._text, self._offsets, keys, self._string_hash_slots, found)
        again = np.flatnonzero(found != np.arange(self.num_values))
        if len(again):
            line = int(again[0])
            raise self._error(
                f"{self.line(line)!r} in lines {found[line] + 1} and {line + 1}",
                "every value once, since a value has one row",
            )

    def _error(self, found: str, expected: str) -> InputError:
        return InputError(f"Found {found} of the vocabulary {self.path}. Expected {expected}. Write the file again.")


def load_vocabulary(path: str) -> Vocabulary:
    """Reads a vocabulary file.

    Raises:
      InputError: it is missing or no vocabulary.
    """
    return Vocabulary(path, read_whole(path))


def vocabulary_size(path: str, *, num_reserved: int = 1) -> int:
    """Rows of the table of a column with this vocabulary: one a line, and the reserved ones.

    Args:
      path: local, or a URL.
      num_reserved: that of the `IdColumn`.

    Raises:
      InputError: it is missing or no vocabulary.
    """
    return num_reserved + load_vocabulary(path).num_values


def text_of(strings: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 text and int64 offsets `[len + 1]` of strings without nulls, as views of Arrow's memory."""
    _, offsets, text = strings.buffers()
    bounds = np.frombuffer(offsets, np.int64)[strings.offset : strings.offset + len(strings) + 1]
    characters = np.frombuffer(text, np.uint8) if text is not None and text.size else np.zeros(0, np.uint8)
    return frozen(characters, np.uint8), frozen(bounds, np.int64)


def _with_newlines(content: bytes, path: str) -> bytes:
    """The lines of a file, each with a newline behind it."""
    if not content:
        return content
    if b"\n" not in content:
        content = content.replace(b"\r", b"\n")
    if not content.endswith(b"\n"):
        content += b"\r\n" if b"\r\n" in content else b"\n"
    with_return = content.count(b"\r\n")
    if with_return == content.count(b"\n"):
        return content.replace(b"\r\n", b"\n")
    if with_return:
        _logger.warning(
            "Found carriage returns at the end of %d of %d lines of the vocabulary %s. There they are part of the "
            "value: only where all lines have one it is taken for a line end. Write the file again if they are none.",
            with_return,
            content.count(b"\n"),
            path,
        )
    return content


def _is_integer(line: str) -> bool:
    return bool(_INTEGER.fullmatch(line)) and -(2**63) <= int(line) < 2**63


def _hash_slots(keys: np.ndarray) -> np.ndarray:
    hash_slots = np.full(num_hash_slots(len(keys)), -1, np.int64)
    insert_keys(keys, hash_slots)
    return hash_slots


def _rows(found: np.ndarray, num_reserved: int) -> np.ndarray:
    return np.where(found < 0, OUT_OF_VOCABULARY, found + num_reserved)
