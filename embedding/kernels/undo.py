"""Kernels of `UndoLog`: which rows are written down before they change, and undo.

Common arguments: bit `row % 8` of `changed[row // 8]` says that the row changed since a moment, of `lost` that its
value then is not known. The log is a ring of `len(log)` entries. `log` names the row of each entry, and `buffers`
(float32 `[entries, width]`, one for each of `arrays`) have its values. `first` is the oldest entry in use, and `count`
says how many there are.
"""

from __future__ import annotations

from podembed.embedding.kernels.row_vectors import jit


@jit
def note_rows(rows, changed, lost, log, first, count):
    """Marks rows as changed and gives each one that was not before the next entry; without a free one it is lost.

    Returns:
      How many entries were given, and how many rows were lost.
    """
    given = 0
    num_lost = 0
    entries = log.shape[0]
    for at in range(rows.shape[0]):
        row = rows[at]
        bit = 1 << (row & 7)
        if not changed[row >> 3] & bit:
            changed[row >> 3] |= bit
            if count + given < entries:
                entry = first + count + given
                if entry >= entries:
                    entry -= entries
                log[entry] = row
                given += 1
            else:
                lost[row >> 3] |= bit
                num_lost += 1
    return given, num_lost


@jit
def copy_back(arrays, log, first, start, stop, buffers):
    """Copies entries `stop - 1` down to `start`, counted from `first`, back to their rows: of several for one row, the
    oldest wins.
    """
    entries = log.shape[0]
    for number in range(stop - 1, start - 1, -1):
        entry = first + number
        if entry >= entries:
            entry -= entries
        row = log[entry]
        for at in range(len(arrays)):
            array, buffer = arrays[at], buffers[at]
            for column in range(array.shape[1]):
                array[row, column] = buffer[entry, column]
