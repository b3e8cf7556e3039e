"""Kernels of `UndoLog`: which rows are written down before they change, and the way back.

Common arguments: bit `row % 8` of `changed[row // 8]` says that the row changed since a moment, of `lost` that its
value then is not known. The log is a ring of `len(log)` seats: `log` names the row of each seat, and `buffers` (float32
`[seats, width]`, one for each of `arrays`) have its values; `first` is the oldest seat in use, and `count` how many
there are.
"""

from __future__ import annotations

from podembed.embedding.kernels.row_vectors import jit


@jit
def note_rows(rows, changed, lost, log, first, count):
    """Marks rows as changed and gives each one that was not before the next seat; without a free one it is lost.

    Returns:
      How many seats were given, and how many rows were lost.
    """
    given = 0
    num_lost = 0
    seats = log.shape[0]
    for at in range(rows.shape[0]):
        row = rows[at]
        bit = 1 << (row & 7)
        if not changed[row >> 3] & bit:
            changed[row >> 3] |= bit
            if count + given < seats:
                seat = first + count + given
                if seat >= seats:
                    seat -= seats
                log[seat] = row
                given += 1
            else:
                lost[row >> 3] |= bit
                num_lost += 1
    return given, num_lost


@jit
def copy_to_log(arrays, log, first, start, stop, buffers):
    """Copies the rows of seats `start` to `stop - 1`, counted from `first`, into the buffers."""
    seats = log.shape[0]
    for number in range(start, stop):
        seat = first + number
        if seat >= seats:
            seat -= seats
        row = log[seat]
        for at in range(len(arrays)):
            array, buffer = arrays[at], buffers[at]
            for column in range(array.shape[1]):
                buffer[seat, column] = array[row, column]


@jit
def copy_back(arrays, log, first, start, stop, buffers):
    """Copies seats `stop - 1` down to `start`, counted from `first`, back to their rows: of several for one row, the
    oldest wins.
    """
    seats = log.shape[0]
    for number in range(stop - 1, start - 1, -1):
        seat = first + number
        if seat >= seats:
            seat -= seats
        row = log[seat]
        for at in range(len(arrays)):
            array, buffer = arrays[at], buffers[at]
            for column in range(array.shape[1]):
                array[row, column] = buffer[seat, column]
