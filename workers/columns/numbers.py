"""Numbers and labels of one Arrow column, in the order of the rows: float32, with the checks that labels and weights
need.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from podembed.workers.columns.column_kernels import frozen, take_numbers
from podembed.workers.data.bad_rows import RowFaults
from podembed.workers.data.columns import DenseColumn, Label
from podembed.workers.data.input_errors import InputError
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


# From so many rows of a row group on, and from this share of it, wrong labels are what the column holds.
_FEWEST_ROWS = 10
_SHARE = 0.25
_BINARY_REMEDY = (
    "Labels are 0 and 1 under the default loss. Turn them into 0 and 1, or declare a loss that takes them "
    "(JobConfig.loss, Task.loss), such as optax.squared_error, or optax.sigmoid_binary_cross_entropy for probabilities."
)


def take_labels(column: pa.Array, label: Label, order: np.ndarray, faults: RowFaults) -> np.ndarray:
    """float32 `[len(order)]`, NaN for nulls that a mask stands for.

    Raises:
      InputError: a value is no label, and malformed rows are not tolerated; or too many are none.
    """
    is_masked = label.missing == "mask"
    if not is_masked:
        refuse_nulls(column, label.name, faults)
    taken = finite_numbers(column, label.name, order, faults)
    count = label.num_classes
    if count is not None and not _are_classes(taken, count).all():
        numbers = numbers_of(filled(column))
        _refuse(~_are_classes(numbers, count), numbers, label, faults)
    if is_masked and column.null_count:
        taken[column.is_null().to_numpy(zero_copy_only=False)[order]] = np.nan
    return taken


def _are_classes(labels: np.ndarray, count: int) -> np.ndarray:
    """bool, of each; False for what is not finite."""
    if count == 2:
        return (labels == 0) | (labels == 1)
    return (labels >= 0) & (labels < count) & (labels == np.floor(labels))


def _refuse(wrong: np.ndarray, labels: np.ndarray, label: Label, faults: RowFaults) -> None:
    """Takes rows whose label is none of its classes for malformed.

    Args:
      wrong: bool, the mask of those rows, of all rows of a row group.
      labels: labels of all its rows.

    Raises:
      InputError: there are so many that the column is meant otherwise, whatever is tolerated; or malformed rows are not
        tolerated.
    """
    wrong = wrong & ~faults.is_bad
    count = int(wrong.sum())
    last = (label.num_classes or 2) - 1
    remedy = _BINARY_REMEDY
    if last > 1:
        remedy = f"Labels of {last + 1} classes are whole numbers from 0 to {last}. Number the classes so."
    if count >= max(_FEWEST_ROWS, _SHARE * len(wrong)):
        shown = ", ".join(f"{one:g}" for one in np.unique(labels[wrong])[:5])
        expected = "neither 0 nor 1" if last == 1 else "no class"
        raise InputError(
            f"Found labels such as {shown} in column {label.name!r} of {faults.origin.path}: {count:,} of the "
            f"{len(wrong):,} rows of row group {faults.origin.group} have {expected}. {remedy}"
        )
    faults.add(wrong, label.name, found=lambda row: f"label {labels[row]:g}", reason=remedy)
