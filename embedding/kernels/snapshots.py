"""Kernels of `Snapshot`: copies between a table's arrays and the buffer, and which entries of it are free.

Common arguments: a kept row has an entry in the buffer (float32 `[entries, width]`, one an array). Rows form groups of
`GROUP_ROWS`. `heads[group]` is the entry of one kept row of the group, `following[entry]` the next one of the same
group, -1 none. `offsets[entry]` is the row's position in the group. `free[:num_free]` are the free entries; the last of
them is taken first. `kernels.kept_rows` gives rows their entries.
"""

from __future__ import annotations

from podembed.embedding.kernels.row_vectors import jit

GROUP_ROWS = 512


@jit
def read_frozen(array, heads, following, offsets, buffer, linked, start, stop, out):
    """Copies rows `start` to `stop - 1` as they were at the freeze into `out`.

    Args:
      linked: heads and following entries of what an undo log has of them, its rows by entry, and its buffer. Without a
        log there are no heads.
    """
    for row in range(start, stop):
        for column in range(array.shape[1]):
            out[row - start, column] = array[row, column]
    for group in range(start // GROUP_ROWS, (stop + GROUP_ROWS - 1) // GROUP_ROWS):
        entry = heads[group]
        while entry >= 0:
            row = group * GROUP_ROWS + offsets[entry]
            if start <= row < stop:
                for column in range(array.shape[1]):
                    out[row - start, column] = buffer[entry, column]
            entry = following[entry]
    log_heads, log_following, log, log_buffer = linked
    if not log_heads.shape[0]:
        return
    for group in range(start // GROUP_ROWS, (stop + GROUP_ROWS - 1) // GROUP_ROWS):
        entry = log_heads[group]
        while entry >= 0:
            row = log[entry]
            if start <= row < stop:
                for column in range(array.shape[1]):
                    out[row - start, column] = log_buffer[entry, column]
            entry = log_following[entry]


@jit
def release_groups(first, last, heads, following, free, num_free):
    """Frees the entries of groups `first` to `last - 1`. Returns how many they were."""
    count = 0
    for group in range(first, last):
        entry = heads[group]
        heads[group] = -1
        while entry >= 0:
            free[num_free + count] = entry
            entry = following[entry]
            count += 1
    return count


@jit
def list_downwards(free):
    """Lists all entries as free, the first one last."""
    count = free.shape[0]
    for at in range(count):
        free[at] = count - 1 - at
