"""Kernels that keep rows of many tables before they change, for undo logs and for snapshots.

Bit `row % 8` of a byte at `CHANGED + row // 8` says that the row changed since a moment. A row that changes for the
first time is copied. The undo log has it in a ring of `ENTRIES` entries. `LOG` names the row of each entry; `FIRST` is
the oldest one in use, and `COUNT` says how many there are. A row that finds the ring full is lost: a bit at `LOST` says
so. A snapshot has the row in a room, as `kernels.snapshots` says. Where both keep a row since the same moment, it is
copied once, to the log. The snapshot links to it: `HEADS` and `FOLLOWING` are chains of such entries, one a group of
rows.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.many_tables import array_at
from podembed.embedding.kernels.row_vectors import (
    columns_of,
    jit,
    load,
    prefetch_item,
    prefetch_to_read,
    publish,
    store,
    store_streaming,
    width_of,
)
from podembed.embedding.kernels.snapshots import GROUP_ROWS

CHANGED, LOST, LOG, ENTRIES, FIRST, COUNT, HEADS, FOLLOWING = range(8)
"""Of a table's undo log: addresses and numbers. `CHANGED` is 0 where there is none."""
LOG_COLUMNS = 8
SNAPSHOT_CHANGED, SNAPSHOT_HEADS, RELEASED, ROOM, IS_LINKED = range(LOG_COLUMNS, LOG_COLUMNS + 5)
"""Of its snapshot. `SNAPSHOT_CHANGED` is 0 where there is none. `IS_LINKED` says that it may link to the log."""
SNAPSHOT_COLUMNS = 5
NUM_ROWS = LOG_COLUMNS + SNAPSHOT_COLUMNS
"""How many rows the table has. Those behind them are spare ones, of which nothing is kept."""
ROOM_FOLLOWING, ROOM_OFFSETS, ROOM_FREE, NUM_FREE = range(4)
"""Of a room: addresses, and how many entries are free."""
NUM_LOGGED, NUM_LOST, NUM_ROOMED = range(3)
"""What came of a table's rows."""
SOURCE, SOURCE_BYTES, TARGET, TARGET_BYTES, STREAMS, BEGIN, NUM_COPIED = range(7)
"""Of a copy: matrices of a table and of a buffer, whether it goes past the caches, and which of the listed rows."""
COPY_COLUMNS = 7

# How many rows before its turn a row is prefetched.
_AHEAD = 12
# Nothing looks at the length of memory that lies somewhere.
_ANY = 1 << 40


@jit
def claim_rows(tables, rooms, touched, table, number, came, log_rows, log_entries, room_rows, room_entries):
    """Marks rows as changed and gives entries to those that have to be kept. They are not copied yet.

    Args:
      tables: int64 `[t, LOG_COLUMNS + SNAPSHOT_COLUMNS + 1]`.
      rooms: int64 `[r, 4]`; `NUM_FREE` changes.
      touched: int64 `[t, 2]`, address of each table's rows (int64) and how many they are.
      table, number: where to begin: which table, and which of its rows.
      came: int64 `[t, 3]`, zeros, for what came of each table's rows.
      log_rows, log_entries, room_rows, room_entries: for rows and entries. Those of a table begin where the rows of the
        tables before it, from `table` on, end.

    Returns:
      The table and the number of its row that found its room full; past the last table if none did.
    """
    place = 0
    for at in range(table, touched.shape[0]):
        num_rows = touched[at, 1]
        rows = array_at(touched[at, 0], num_rows, np.int64)
        of_room = rooms[tables[at, ROOM]]
        listed = log_rows[place:], log_entries[place:], room_rows[place:], room_entries[place:]
        stop = _claim_of_table(tables[at], of_room, rows, number, came[at], *listed)
        of_room[NUM_FREE] -= came[at, NUM_ROOMED]
        if stop < num_rows:
            return at, stop
        place += num_rows
        number = 0
    return touched.shape[0], 0


@jit
def _claim_of_table(table, of_room, rows, number, came, log_rows, log_entries, room_rows, room_entries):
    """As `claim_rows` for one table. Returns the row that found its room full, or how many there are."""
    logs, freezes, is_linked = table[CHANGED] != 0, table[SNAPSHOT_CHANGED] != 0, table[IS_LINKED] != 0
    changed, lost = array_at(table[CHANGED], _ANY, np.uint8), array_at(table[LOST], _ANY, np.uint8)
    log, heads = array_at(table[LOG], _ANY, np.int64), array_at(table[HEADS], _ANY, np.int32)
    following = array_at(table[FOLLOWING], _ANY, np.int32)
    entries, first, count, released = table[ENTRIES], table[FIRST], table[COUNT], table[RELEASED]
    frozen_changed = array_at(table[SNAPSHOT_CHANGED], _ANY, np.uint8)
    frozen_heads = array_at(table[SNAPSHOT_HEADS], _ANY, np.int32)
    room_following = array_at(of_room[ROOM_FOLLOWING], _ANY, np.int32)
    room_offsets = array_at(of_room[ROOM_OFFSETS], _ANY, np.int32)
    free, num_free, num_rows = array_at(of_room[ROOM_FREE], _ANY, np.int32), of_room[NUM_FREE], table[NUM_ROWS]
    logged = num_lost = roomed = 0
    stop = rows.shape[0]
    for own in range(number, rows.shape[0]):
        ahead = rows[min(own + _AHEAD, rows.shape[0] - 1)] >> 3
        if logs:
            prefetch_item(changed, ahead)
        if freezes:
            prefetch_item(frozen_changed, ahead)
        row = rows[own]
        if row >= num_rows:
            continue
        byte, bit, group = row >> 3, 1 << (row & 7), row // GROUP_ROWS
        is_new = logs and not changed[byte] & bit
        is_newly_frozen = freezes and not frozen_changed[byte] & bit
        has_entry = is_new and count + logged < entries
        is_needed = is_newly_frozen and row >= released
        if is_needed and not (has_entry and is_linked):
            if num_free == roomed:
                stop = own
                break
            entry = free[num_free - 1 - roomed]
            room_following[entry] = frozen_heads[group]
            room_offsets[entry] = row - group * GROUP_ROWS
            frozen_heads[group] = entry
            room_rows[roomed], room_entries[roomed] = row, entry
            roomed += 1
        if is_newly_frozen:
            frozen_changed[byte] |= bit
        if has_entry:
            entry = first + count + logged
            if entry >= entries:
                entry -= entries
            log[entry] = row
            if is_needed and is_linked:
                following[entry] = heads[group]
                heads[group] = entry
            log_rows[logged], log_entries[logged] = row, entry
            logged += 1
        elif is_new:
            lost[byte] |= bit
            num_lost += 1
        if is_new:
            changed[byte] |= bit
    came[NUM_LOGGED], came[NUM_LOST], came[NUM_ROOMED] = logged, num_lost, roomed
    return stop


def copy_rows(dim: int, copies: np.ndarray, rows: np.ndarray, entries: np.ndarray) -> None:
    """Copies rows of tables into entries of buffers.

    Args:
      dim: columns of all of them.
      copies: int64 `[c, COPY_COLUMNS]`.
      rows, entries: int64 and int32 `[n]`, as `claim_rows` listed them.
    """
    _copy_rows(width_of(dim), dim, copies, rows, entries)


@jit
def _copy_rows(width, dim, copies, rows, entries):
    step = columns_of(width)
    for at in range(copies.shape[0]):
        source = copies[at, SOURCE], copies[at, SOURCE_BYTES]
        target = copies[at, TARGET], copies[at, TARGET_BYTES]
        begin, count, streams = copies[at, BEGIN], copies[at, NUM_COPIED], copies[at, STREAMS] != 0
        for own in range(begin, begin + count):
            ahead = rows[min(own + _AHEAD, begin + count - 1)]
            for column in range(0, dim, step):
                prefetch_to_read(width, source, ahead, column)
                value = load(width, source, rows[own], column)
                # It is read much later, if at all.
                if streams:
                    store_streaming(target, entries[own], column, value)
                else:
                    store(target, entries[own], column, value)
    publish()


@jit
def copy_back(arrays, log, first, start, stop, buffers):
    """Copies entries `stop - 1` down to `start`, counted from `first`, back to their rows: of several for one row, the
    oldest wins.

    Args:
      arrays, buffers: arrays and buffers of a table, and the log's for each of them (float32 `[entries, width]`).
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
