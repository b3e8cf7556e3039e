"""Numbers of one Arrow column, in the order of the rows: float32, with the checks that labels and weights need."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from podembed.workers.columns.column_kernels import frozen, take_numbers
from podembed.workers.data.bad_rows import RowFaults
from podembed.workers.data.columns import DenseColumn
from podembed.workers.data.times import is_time


def required_numbers(column: pa.Array, name: str, order: np.ndarray, faults: RowFaults) -> np.ndarray:
    """`finite_numbers` of a column without nulls."""
    refuse_nulls(column, name, faults)
    return finite_numbers(column, name, order, faults)


def finite_numbers(column: pa.Array, name: str, order: np.ndarray, faults: RowFaults) -> np.ndarray:
    """float32 `[len(order)]`, 0 in place of nulls."""
    numbers = numbers_of(filled(column))
    taken = np.empty(len(order), np.float32)
    if not take_numbers(frozen(numbers, np.float32), order, taken):
        reason = "Labels and weights are finite. Clean the data."
        faults.add(~np.isfinite(numbers), name, found=lambda row: str(numbers[row]), reason=reason)
    return taken


def refuse_nulls(column: pa.Array, name: str, faults: RowFaults) -> None:
    """Takes rows with a null for malformed."""
    if column.null_count:
        reason = "Labels, weights and sample ids are never null. Fill the column, or drop the row before training."
        faults.add(column.is_null().to_numpy(zero_copy_only=False), name, found=lambda _: "null", reason=reason)


def filled(column: pa.Array) -> pa.Array:
    """0 in place of nulls."""
    if not column.null_count:
        return column
    return column.fill_null(pa.scalar(False if pa.types.is_boolean(column.type) else 0, column.type))


def numbers_of(column: pa.Array) -> np.ndarray:
    """float32 of numbers without nulls."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    # A number beyond float32 becomes infinite here and is refused by the check for finite ones, with its row.
    with np.errstate(over="ignore"):
        return column.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)


def take_dense(column: pa.Array, declared: DenseColumn, order: np.ndarray, out: np.ndarray, faults: RowFaults) -> None:
    """Writes the numbers of a dense column, float32 `[len(order)]`."""
    if is_time(column.type):
        reason = (
            "Times are never null, since there is no number for none. Fill the column, or drop the row before training."
        )
        faults.add(
            column.is_null().to_numpy(zero_copy_only=False), declared.name, found=lambda _: "null", reason=reason
        )
        numbers = declared.scale.numbers(column).astype(np.float32)
    else:
        numbers = numbers_of(filled(column))
    if declared.transform == "log1p":
        # maximum() hands NaN on, so a NaN is still seen below.
        numbers = np.log1p(np.maximum(numbers, np.float32(0)))
    if not take_numbers(frozen(numbers, np.float32), order, out):
        reason = "Dense numbers are finite; a missing one is null. Write null, or clean the data."
        faults.add(~np.isfinite(numbers), declared.name, found=lambda row: str(numbers[row]), reason=reason)
