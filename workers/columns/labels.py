"""Labels that the default loss does not take: a few of them are malformed rows, many of them are a column of another
meaning.
"""

from __future__ import annotations

import numpy as np

from podembed.workers.data.bad_rows import RowFaults
from podembed.workers.data.errors import InputError

# From so many rows of a row group on, and from this share of it, wrong labels are what the column holds.
_FEWEST_ROWS = 10
_SHARE = 0.25
_REMEDY = (
    "Labels are 0 and 1 under the default loss. Turn them into 0 and 1, or declare a loss that takes them "
    "(JobConfig.loss), such as "
    "optax.squared_error, or optax.sigmoid_binary_cross_entropy for probabilities."
)


def refuse_labels(wrong: np.ndarray, labels: np.ndarray, column: str, faults: RowFaults) -> None:
    """Takes rows whose label is neither 0 nor 1 for malformed.

    Args:
      wrong: bool, the mask of those rows, of all rows of a row group.
      labels: of all its rows.

    Raises:
      InputError: there are so many that the column is meant otherwise, whatever is tolerated; or malformed rows are not
        tolerated.
    """
    wrong = wrong & ~faults.is_bad
    count = int(wrong.sum())
    if count >= max(_FEWEST_ROWS, _SHARE * len(wrong)):
        shown = ", ".join(f"{label:g}" for label in np.unique(labels[wrong])[:5])
        raise InputError(
            f"Found labels such as {shown} in column {column!r} of {faults.origin.path}: {count:,} of the "
            f"{len(wrong):,} rows of row group "
            f"{faults.origin.group} have neither 0 nor 1. {_REMEDY}"
        )
    faults.add(wrong, column, found=lambda row: f"label {labels[row]:g}", reason=_REMEDY)
