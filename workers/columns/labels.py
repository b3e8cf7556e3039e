"""Labels of one column: which values are labels, and what becomes of nulls."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from podembed.workers.columns.numbers import filled, finite_numbers, numbers_of, refuse_nulls
from podembed.workers.data.bad_rows import RowFaults
from podembed.workers.data.columns import Label
from podembed.workers.data.errors import InputError

# From so many rows of a row group on, and from this share of it, wrong labels are what the column holds.
_FEWEST_ROWS = 10
_SHARE = 0.25
_BINARY_REMEDY = (
    "Labels are 0 and 1 under the default loss. Turn them into 0 and 1, or declare a loss that takes them "
    "(JobConfig.loss, Task.loss), such as "
    "optax.squared_error, or optax.sigmoid_binary_cross_entropy for probabilities."
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
      labels: of all its rows.

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
            f"{len(wrong):,} rows of row group "
            f"{faults.origin.group} have {expected}. {remedy}"
        )
    faults.add(wrong, label.name, found=lambda row: f"label {labels[row]:g}", reason=remedy)
