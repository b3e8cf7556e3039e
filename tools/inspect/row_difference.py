"""How much two equally shaped arrays differ, and sums of such differences over many pieces. Pure numpy, in blocks of
bounded size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_BLOCK_ELEMENTS = 1 << 20


@dataclass(slots=True)
class RowDifference:
    """What is known so far about the differences between two versions of some rows. Mutated by `add`.

    Attributes:
      num_rows: compared.
      num_changed: rows with at least one element whose bytes differ (or whose values do, where the element types
        differ).
      max_abs: largest absolute difference of one element; infinite where only one side is finite.
      max_row: its row number; the first such row. None while nothing changed.
      first_row: the lowest row number that changed.
    """

    num_rows: int = 0
    num_changed: int = 0
    max_abs: float = 0.0
    max_row: int | None = field(default=None)
    first_row: int | None = field(default=None)

    def add(self, one: np.ndarray, other: np.ndarray, *, first_row: int, row_stride: int) -> None:
        """Takes in two versions of rows first_row, first_row + row_stride, ...; both `[rows, width]`, strided views are
        fine.
        """
        self.num_rows += len(one)
        at_once = max(1, _BLOCK_ELEMENTS // max(1, one.shape[1]))
        for start in range(0, len(one), at_once):
            self._add_block(
                one[start : start + at_once],
                other[start : start + at_once],
                first_row=first_row + start * row_stride,
                row_stride=row_stride,
            )

    def _add_block(self, one: np.ndarray, other: np.ndarray, *, first_row: int, row_stride: int) -> None:
        differs = differing(one, other)
        changed = np.flatnonzero(differs.any(axis=1))
        if not len(changed):
            return
        self.num_changed += len(changed)
        earliest = first_row + int(changed[0]) * row_stride
        self.first_row = earliest if self.first_row is None else min(self.first_row, earliest)
        largest = absolute_differences(one[changed], other[changed], differs[changed]).max(axis=1)
        at = int(np.argmax(largest))
        row, value = first_row + int(changed[at]) * row_stride, float(largest[at])
        if self.max_row is None or value > self.max_abs or (value == self.max_abs and row < self.max_row):
            self.max_abs, self.max_row = value, row


def differing(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where elements differ, bool, same shape. Equal NaNs are equal; zeros of unlike sign are not, as their bytes
    differ.
    """
    if one.dtype != other.dtype:
        return one != other
    bits = np.dtype(f"uint{8 * one.dtype.itemsize}")
    return np.ascontiguousarray(one).view(bits) != np.ascontiguousarray(other).view(bits)


def absolute_differences(one: np.ndarray, other: np.ndarray, differs: np.ndarray) -> np.ndarray:
    """|one - other| in float64, 0 where they do not differ, infinity where the difference is no number."""
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(one.astype(np.float64) - other.astype(np.float64))
    largest[np.isnan(largest)] = np.inf
    largest[~differs] = 0.0
    return largest
