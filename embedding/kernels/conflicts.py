"""Kernels of the exact overlap: which rows and which bags of the next step are touched by the step under way.

A table has one mark a row, a number that is zero between calls, so marking costs no memory. Marks are set, read and
taken away again within one preparation of a step.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.ids import bad_local_row
from podembed.embedding.kernels.row_vectors import jit, prefetch_item

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
