"""Rows that hold no numbers any more, found while they are written for a commit: such a state must not become one.

A gradient that is NaN spoils the rows that it updates, and the loss of the next step tells. A commit between the two
would keep what no later step can mend. Rows must be finite; a slot must not be NaN, which the next update would bring
into its row, but may be infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.workers.checkpoint.checkpoint_files import ROWS, TablePlan

MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoiltRows:
    """Rows of one bucket that hold no numbers.

    Attributes:
      array: `rows`, or the slot's name.
      rows: numbers of the first of them, rising.
      count: number of them all, in this bucket.
    """

    table: str
    array: str
    rows: tuple[int, ...]
    count: int

    def describe(self) -> str:
        """`rows 3, 7 and at least 2 more of table 'users'`: other buckets were not looked at."""
        kind = "row" if self.count == 1 else "rows"
        more = f" and at least {self.count - len(self.rows)} more" if self.count > len(self.rows) else ""
        slot = "" if self.array == ROWS else f"slot '{self.array}' of "
        return f"{slot}{kind} {', '.join(map(str, self.rows))}{more} of table '{self.table}'"


class RowsSpoilt(Exception):
    """A bucket that is about to be written holds such rows."""

    def __init__(self, spoilt: SpoiltRows) -> None:
        super().__init__(f"Found {spoilt.describe()} not finite. Expected numbers.")
        self.spoilt = spoilt


def require_numbers(plan: TablePlan, bucket: int, values: Sequence[np.ndarray]) -> None:
    """Looks at every number of a bucket, without memory of its own.

    Args:
      values: in the order of `plan.widths`, each `[rows_per_bucket, width]`; padding behind the table's last row may be
        anything.

    Raises:
      RowsSpoilt: naming the first array with such rows.
    """
    filled = plan.layout.num_rows_of(bucket)
    for array, value in zip(plan.widths, values, strict=True):
        held = value[:filled]
        if not held.size or held.dtype.kind != "f" or _is_good(held, is_slot=array != ROWS):
            continue
        bad = np.isnan(held) if array != ROWS else ~np.isfinite(held)
        positions = np.flatnonzero(bad.any(axis=1))
        rows = tuple(plan.layout.ids_of(bucket, positions[:MAX_SHOWN]).tolist())
        raise RowsSpoilt(SpoiltRows(table=plan.name, array=array, rows=rows, count=len(positions)))


def _is_good(held: np.ndarray, *, is_slot: bool) -> bool:
    # The largest of some numbers is NaN if one of them is.
    largest = float(held.max())
    return not math.isnan(largest) if is_slot else math.isfinite(largest) and math.isfinite(float(held.min()))
