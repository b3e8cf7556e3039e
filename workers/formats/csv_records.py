"""Where the records of CSV text begin and end: one pass over the bytes, by the quoting rules of RFC 4180.

A field that begins with a quote ends with one. Within it, delimiters and line ends are part of the value and a doubled
quote is a quote. A record ends with a newline, after an optional carriage return; blank lines are none. Text without
quoting is read with a quote character that no byte equals.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from podembed.workers.data.input_errors import InputError

# A quote that never closes would otherwise make the rest of a file one row.
LONGEST_ROW_BYTES = 16 << 20
FIELD_START, PLAIN, QUOTED, QUOTE_IN_QUOTED = range(4)
QUOTE, _NEWLINE, _CARRIAGE_RETURN = b'"\n\r'
_NO_QUOTE = -1


class RecordScanner:
    """Finds the ends of records in text that comes in pieces. Mutated by `feed`: the position and what the last piece
    broke off in.

    Attributes:
      num_bytes, num_records: numbers of bytes and records of the text so far.
      num_with_line_ends: records so far with a line end within quotes.
      first_with_line_ends: number of the first of them, counted from 0; -1 without one.
    """

    def __init__(self, path: str, *, delimiter: str, quoting: bool = True) -> None:
        self._path = path
        self._delimiter = ord(delimiter)
        self._quote = QUOTE if quoting else _NO_QUOTE
        self._state = _new_state()
        self.num_bytes = 0
        self.num_records = 0
        self._last_end = 0

    def feed(self, piece: bytes) -> np.ndarray:
        """int64, positions in the whole text just behind each record that ends in this piece.

        Raises:
          InputError: a record is longer than `LONGEST_ROW_BYTES`.
        """
        ends = np.empty(len(piece), np.int64)
        count = _scan(np.frombuffer(piece, np.uint8), self._delimiter, self._quote, self._state, ends)
        found = ends[:count] + self.num_bytes + 1
        self.num_bytes += len(piece)
        bounds = np.concatenate([[self._last_end], found, [self.num_bytes]])
        longest = np.diff(bounds)
        if longest.max(initial=0) > LONGEST_ROW_BYTES:
            row = self.num_records + int(np.argmax(longest > LONGEST_ROW_BYTES))
            raise InputError(
                f"Found line {row + 1} of {self._path} (blank ones left out) longer than {LONGEST_ROW_BYTES:,} bytes. "
                "Expected rows of CSV. "
                "Look for a quote that never closes there, or say that the file has no quoting: CsvData(quoting=False)."
            )
        self.num_records += count
        self._last_end = int(bounds[-2])
        return found

    def finish(self) -> np.ndarray:
        """As `feed`, for a last record without a line end.

        Raises:
          InputError: the text ends within quotes.
        """
        mode, has_content = self._state[:2].tolist()
        if mode == QUOTED:
            raise InputError(
                f"Found {self._path} ending within the quotes of line {self.num_records + 1} (blank ones left out). "
                "Expected every quote to close. Copy the file from its source again, repair that line, or say that the "
                "file has no quoting: CsvData(quoting=False)."
            )
        self.num_records += has_content
        self._state[3] += self._state[5]
        if self._state[5] and self._state[4] < 0:
            self._state[4] = self.num_records - 1
        return np.full(has_content, self.num_bytes, np.int64)

    @property
    def num_with_line_ends(self) -> int:
        return int(self._state[3])

    @property
    def first_with_line_ends(self) -> int:
        return int(self._state[4])


def record_ends(text: bytes, path: str, *, delimiter: str, quoting: bool = True) -> np.ndarray:
    """int64, positions behind each record of a whole text.

    Raises:
      InputError: as `RecordScanner`.
    """
    scanner = RecordScanner(path, delimiter=delimiter, quoting=quoting)
    return np.concatenate([scanner.feed(text), scanner.finish()])


def has_stray_text(text: bytes, *, delimiter: str) -> bool:
    """Whether a field of a whole text goes on behind its closing quote.

    A quote too many or too few makes values of delimiters and line ends. The apparent content of such text must
    therefore not be trusted.
    """
    if b'"' not in text:
        return False
    state = _new_state()
    _scan(np.frombuffer(text, np.uint8), ord(delimiter), QUOTE, state, np.empty(len(text), np.int64))
    return bool(state[2])


def blocks_of(
    pieces: Iterator[bytes], scanner: RecordScanner, *, rows_per_block: int, block_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cuts text into blocks of whole records.

    Args:
      rows_per_block: most records of a block.
      block_bytes: a block that has reached this many bytes ends with its record.

    Yields:
      (position behind the block, records in it); the first block is the first record alone, which is the header.

    Raises:
      InputError: as `RecordScanner`.
    """
    start, stop, count, is_header = 0, 0, 0, True
    for ends in _all_ends(pieces, scanner):
        taken = 0
        while taken < len(ends):
            fitting = 1 if is_header else rows_per_block - count
            reaching_size = int(np.searchsorted(ends, start + block_bytes)) - taken + 1
            step = min(fitting, max(1, reaching_size), len(ends) - taken)
            taken += step
            count += step
            stop = int(ends[taken - 1])
            if is_header or count == rows_per_block or stop - start >= block_bytes:
                yield stop, count
                start, count, is_header = stop, 0, False
    if count:
        yield stop, count


def _new_state() -> np.ndarray:
    """int64 `[7]`: mode, whether the current record holds anything, whether a field went on behind its closing quote;
    records with a line end within quotes, the first of them, whether the current one is such, and all records.
    """
    return np.array([FIELD_START, 0, 0, 0, -1, 0, 0], np.int64)


def _all_ends(pieces: Iterator[bytes], scanner: RecordScanner) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield scanner.feed(piece)
    yield scanner.finish()


@numba.njit(nogil=True, cache=True)
def mode_after(mode: int, character: int, delimiter: int, quote: int) -> int:
    """The state of a record behind a character that does not end it."""
    if mode == QUOTED:
        return QUOTE_IN_QUOTED if character == quote else QUOTED
    if mode == QUOTE_IN_QUOTED and character == quote:
        return QUOTED
    if character == delimiter:
        return FIELD_START
    if character == quote and mode == FIELD_START:
        return QUOTED
    if character == _CARRIAGE_RETURN:
        return mode
    return PLAIN


@numba.njit(nogil=True, cache=True)
def _scan(text: np.ndarray, delimiter: int, quote: int, state: np.ndarray, ends: np.ndarray) -> int:
    """Writes the positions of the newlines that end a record; how many there are."""
    mode, has_content = state[0], state[1]
    count = 0
    for at in range(len(text)):
        character = text[at]
        if character == _NEWLINE:
            if mode == QUOTED:
                state[5] = 1
                continue
            if has_content:
                ends[count] = at
                if state[5]:
                    state[3] += 1
                    if state[4] < 0:
                        state[4] = state[6] + count
                count += 1
            mode, has_content, state[5] = FIELD_START, 0, 0
            continue
        before, mode = mode, mode_after(mode, character, delimiter, quote)
        if character != _CARRIAGE_RETURN:
            has_content = 1
        if before == QUOTE_IN_QUOTED and mode == PLAIN:
            state[2] = 1
    state[0], state[1] = mode, has_content
    state[6] += count
    return count
