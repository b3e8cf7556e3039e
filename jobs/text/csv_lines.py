"""What is wrong with lines of CSV text in which a line is a record, by the states of `workers.formats.csv_records`."""

from __future__ import annotations

import numba
import numpy as np

from podembed.workers.formats.csv_records import FIELD_START, PLAIN, QUOTE, QUOTE_IN_QUOTED, QUOTED, mode_after

# What `line_faults` finds.
LINE_IS_GOOD, OTHER_FIELDS, OPEN_QUOTE, STRAY_TEXT = range(4)


def line_faults(text: bytes, ends: np.ndarray, *, delimiter: str, num_fields: int) -> np.ndarray:
    """int8 `[len(ends)]`: what is wrong with each line of text in which a line is a record, whatever stands in it.

    Args:
      ends: int64, position of the newline of each line.
    """
    found = np.zeros(len(ends), np.int8)
    _look_at_lines(np.frombuffer(text, np.uint8), ends, ord(delimiter), num_fields, found)
    return found


@numba.njit(nogil=True, cache=True)
def _look_at_lines(text: np.ndarray, ends: np.ndarray, delimiter: int, num_fields: int, found: np.ndarray) -> None:
    at = 0
    for line in range(len(ends)):
        mode, fields = FIELD_START, 1
        while at < ends[line]:
            before, mode = mode, mode_after(mode, text[at], delimiter, QUOTE)
            if before != QUOTED and text[at] == delimiter:
                fields += 1
            if before == QUOTE_IN_QUOTED and mode == PLAIN:
                found[line] = STRAY_TEXT
            at += 1
        at += 1
        if mode == QUOTED:
            found[line] = OPEN_QUOTE
        elif found[line] == LINE_IS_GOOD and fields != num_fields:
            found[line] = OTHER_FIELDS
