"""Kernels of `Preimages`: which rows must be kept, and copies between a table's arrays and the buffer.

Common arguments: bit `row % 8` of `changed[row // 8]` says that the row changed since the freeze. A kept row has a seat
in the buffer (float32 `[seats, width]`, one an array). Rows form groups of `GROUP_ROWS`; `heads[group]` is the seat of
one kept row of the group, `following[seat]` the next one of the same group, -1 none, and `offsets[seat]` its position
in the group. Free seats form such a list, too, from `free` on.
"""

from __future__ import annotations

from podembed.embedding.kernels.row_vectors import jit

GROUP_ROWS = 512


@jit
def claim_rows(rows, released, changed, heads, following, offsets, free, kept, seats):
    """Marks rows as changed, and gives a seat to each one that was not before; none to rows below `released`, whose
    values nobody needs.

    Returns:
      How many of `rows`, from the first, may be changed now; how many rows and their seats were written to `kept` and
      `seats`; and the first free seat.
    """
    count = 0
    for at in range(rows.shape[0]):
        row = rows[at]
        bit = 1 << (row & 7)
        if not changed[row >> 3] & bit:
            if row >= released:
                if free < 0:
                    return at, count, free
                group = row // GROUP_ROWS
                seat, free = free, following[free]
                following[seat] = heads[group]
                offsets[seat] = row - group * GROUP_ROWS
                heads[group] = seat
                kept[count] = row
                seats[count] = seat
                count += 1
            changed[row >> 3] |= bit
    return rows.shape[0], count, free


@jit
def keep_rows(array, kept, seats, buffer):
    """Copies rows into their seats."""
    for at in range(kept.shape[0]):
        # Read before the row is copied: for all the compiler knows the copy could change them, and then it goes number
        # by number.
        row, seat = kept[at], seats[at]
        for column in range(array.shape[1]):
            buffer[seat, column] = array[row, column]


@jit
def read_frozen(array, heads, following, offsets, buffer, start, stop, out):
    """Copies rows `start` to `stop - 1` as they were at the freeze into `out`."""
    for row in range(start, stop):
        for column in range(array.shape[1]):
            out[row - start, column] = array[row, column]
    for group in range(start // GROUP_ROWS, (stop + GROUP_ROWS - 1) // GROUP_ROWS):
        seat = heads[group]
        while seat >= 0:
            row = group * GROUP_ROWS + offsets[seat]
            if start <= row < stop:
                for column in range(array.shape[1]):
                    out[row - start, column] = buffer[seat, column]
            seat = following[seat]


@jit
def release_groups(first, last, heads, following, free):
    """Frees the seats of groups `first` to `last - 1`. Returns the first free seat, and how many were freed."""
    count = 0
    for group in range(first, last):
        seat = heads[group]
        heads[group] = -1
        while seat >= 0:
            behind = following[seat]
            following[seat] = free
            free = seat
            seat = behind
            count += 1
    return free, count


@jit
def put_back(array, heads, following, offsets, buffer):
    """Writes all kept rows back to where they came from."""
    for group in range(heads.shape[0]):
        seat = heads[group]
        while seat >= 0:
            row = group * GROUP_ROWS + offsets[seat]
            for column in range(array.shape[1]):
                array[row, column] = buffer[seat, column]
            seat = following[seat]
