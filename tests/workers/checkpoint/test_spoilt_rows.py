"""Rows and slots that are no numbers are named before they are written; what is merely large, or padding, is not."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.workers.checkpoint.checkpoint_files import TablePlan
from podembed.workers.checkpoint.spoilt_rows import RowsSpoilt, require_numbers

# Bucket 1 of 4 holds rows 1, 5, 9, 13 and 17, and then padding.
PLAN = TablePlan(
    attempt="s000000010-g00000001",
    name="users",
    num_rows=18,
    num_buckets=4,
    widths={"rows": 3, "velocity": 3},
    dtypes={},
)
BUCKET, FILLED = 1, 5


def bucket() -> list[np.ndarray]:
    assert PLAN.rows_per_bucket == FILLED
    return [np.full((PLAN.rows_per_bucket, 3), np.finfo(np.float32).max, np.float32) for _ in PLAN.widths]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 2])
def test_rows_are_named(value: float, column: int) -> None:
    values = bucket()
    values[0][[1, 4], column] = value
    with pytest.raises(RowsSpoilt, match="Found rows 5, 17 of table 'users' not finite") as refused:
        require_numbers(PLAN, BUCKET, values)
    assert (refused.value.spoilt.rows, refused.value.spoilt.count) == ((5, 17), 2)


def test_a_slot_may_be_infinite_but_a_number() -> None:
    values = bucket()
    values[1][0] = np.inf
    values[1][1] = -np.inf
    require_numbers(PLAN, BUCKET, values)
    values[1][2, 1] = np.nan
    with pytest.raises(RowsSpoilt, match="slot 'velocity' of row 9 of table 'users'"):
        require_numbers(PLAN, BUCKET, values)


def test_padding_may_be_anything() -> None:
    values = [np.zeros((PLAN.rows_per_bucket, 3), np.float32) for _ in PLAN.widths]
    # Bucket 3 has rows 3, 7, 11 and 15.
    values[0][FILLED - 1] = values[1][FILLED - 1] = np.nan
    require_numbers(PLAN, 3, values)
    with pytest.raises(RowsSpoilt):
        require_numbers(PLAN, BUCKET, values)


def test_only_some_of_many_are_shown() -> None:
    plan = TablePlan(attempt="a", name="t", num_rows=100, num_buckets=1, widths={"rows": 1}, dtypes={})
    with pytest.raises(RowsSpoilt, match="rows 0, 1, 2, 3, 4 and at least 95 more of table 't'"):
        require_numbers(plan, 0, [np.full((100, 1), np.nan, np.float32)])


def test_a_bucket_without_rows_is_good() -> None:
    plan = TablePlan(attempt="a", name="t", num_rows=1, num_buckets=4, widths={"rows": 1}, dtypes={})
    require_numbers(plan, 3, [np.full((1, 1), np.nan, np.float32)])
