"""Kernels over what hosts request from owners.

* Lists of rows are sorted anew: host by host, as they travel, or stream by stream, as tables are read and updated.
* The exact overlap asks which rows and which bags of the next step are touched by the step under way. A table has one
  mark a row, a number that is zero between calls, so marking costs no memory. Marks are set, read and taken away again
  within one preparation of a step.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.ids import bad_local_row
from podembed.embedding.kernels.row_vectors import jit, prefetch_item


def rows_by_stream(
    rows: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    places: np.ndarray,
    out: np.ndarray,
    out_places: np.ndarray,
) -> None:
    """Lists rows stream by stream, and host by host within a stream.

    Args:
      rows: int64 `[n]`, in any order of pieces, one for each host and stream.
      starts: int64 `[num_hosts, num_streams]`, where each piece begins in `rows`.
      counts: int64 `[num_hosts, num_streams]`, the rows of each piece.
      places: int64 `[num_hosts, num_streams]`, a number for the first row of each piece; the next rows count on.
      out: int64 `[n]`; receives the rows.
      out_places: int64 `[n]`; receives their numbers.

    Raises:
      ValueError: an array is too small for the pieces.
    """
    _check_pieces(rows, starts, counts, min(len(out), len(out_places)))
    _rows_by_stream(plain(rows, np.int64), starts, counts, places, out, out_places)


@jit
def _rows_by_stream(rows, starts, counts, places, out, out_places):
    filled = 0
    for stream in range(counts.shape[1]):
        for host in range(counts.shape[0]):
            first, place = starts[host, stream], places[host, stream]
            for j in range(counts[host, stream]):
                out[filled] = rows[first + j]
                out_places[filled] = place + j
                filled += 1


def rows_by_host(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
    """The other way: from stream by stream to pieces that begin at `starts` in `out`; arguments as above."""
    _check_pieces(out, starts, counts, len(rows))
    _rows_by_host(plain(rows, np.int64), starts, counts, out)


@jit
def _rows_by_host(rows, starts, counts, out):
    read = 0
    for stream in range(counts.shape[1]):
        for host in range(counts.shape[0]):
            first = starts[host, stream]
            for j in range(counts[host, stream]):
                out[first + j] = rows[read]
                read += 1


def _check_pieces(pieces: np.ndarray, starts: np.ndarray, counts: np.ndarray, room: int) -> None:
    ends = starts + counts
    fits = not counts.size or (counts.min() >= 0 and starts.min() >= 0 and ends.max() <= len(pieces))
    if not fits or int(counts.sum()) != room:
        raise ValueError(
            f"Found pieces of {int(counts.sum())} rows that end at {ends.max(initial=0)}, {len(pieces)} rows in pieces "
            f"and {room} in a list. Expected as many in each. Check that all hosts are of one generation."
        )


_AHEAD = 16


def mark_rows(local_rows: np.ndarray, marks: np.ndarray, mark: int) -> None:
    """Sets the mark of every row.

    Args:
      local_rows: int64 `[n]`.
      marks: int32 `[number of local rows]`; 1 marks, 0 takes the marks away.

    Raises:
      ValueError: a row is not one of the local rows.
    """
    bad = _mark_rows(plain(local_rows, np.int64), marks, mark)
    if bad >= 0:
        raise bad_local_row(int(local_rows[bad]), len(marks))


@jit
def _mark_rows(local_rows, marks, mark):
    count = local_rows.shape[0]
    for i in range(count):
        if i + _AHEAD < count:
            # An address past the end is harmless: a prefetch never faults.
            prefetch_item(marks, local_rows[i + _AHEAD])
        row = local_rows[i]
        if row < 0 or row >= marks.shape[0]:
            return i
        marks[row] = mark
    return -1


def find_marked_rows(local_rows: np.ndarray, marks: np.ndarray, is_marked: np.ndarray) -> None:
    """Writes for every row whether it is marked.

    Args:
      local_rows: int64 `[n]`.
      is_marked: bool `[n]`; overwritten.

    Raises:
      ValueError: a row is not one of the local rows.
    """
    bad = _find_marked_rows(plain(local_rows, np.int64), marks, is_marked)
    if bad >= 0:
        raise bad_local_row(int(local_rows[bad]), len(marks))


@jit
def _find_marked_rows(local_rows, marks, is_marked):
    count = local_rows.shape[0]
    for i in range(count):
        if i + _AHEAD < count:
            prefetch_item(marks, local_rows[i + _AHEAD])
        row = local_rows[i]
        if row < 0 or row >= marks.shape[0]:
            return i
        is_marked[i] = marks[row] != 0
    return -1


def find_marked_bags(local_rows: np.ndarray, row_splits: np.ndarray, marks: np.ndarray, is_marked: np.ndarray) -> None:
    """Writes for every bag whether any of its rows is marked. Reads a bag up to the first such row, which mostly comes
    soon: ids that recur from step to step are the frequent ones.

    Args:
      local_rows: int32 `[n]`, already known to be local rows.
      row_splits: int64 `[B + 1]`, rising from 0 to at most n.
      is_marked: bool `[B]`; overwritten.
    """
    _find_marked_bags(plain(local_rows, np.int32), plain(row_splits, np.int64), marks, is_marked)


@jit
def _find_marked_bags(local_rows, row_splits, marks, is_marked):
    for bag in range(row_splits.shape[0] - 1):
        found = False
        for j in range(row_splits[bag], row_splits[bag + 1]):
            if marks[local_rows[j]] != 0:
                found = True
                break
        is_marked[bag] = found
