"""A batch cut into a part for each replica, as the driver's `enqueue` cuts features.

The cut goes along the first axis, and where it does not divide the first parts are one longer.

Takes all that `enqueue` takes as a feature or a weight (`embedding.tf.features.inputs`), and every other array with a
first axis, such as labels. The form of a value stays: a replica gets `Sparse` of `Sparse`, and a `scipy.sparse` matrix
of such a one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.features.bags import share_ends
from podembed.embedding.tf.features.inputs import Sparse, checked_places, checked_row_splits, is_of
from podembed.embedding.tf.features.structures import flatten_with_paths, pack_like
from podembed.embedding.tf.replicas.per_replica import PerReplica


def split_over(value: Any, num_replicas: int, *, num_samples: int | None = None) -> Any:
    """A batch as `PerReplica` values.

    Args:
      value: arrays with a first axis, `Ragged`, `Sparse`, `scipy.sparse` matrices and list arrays of `pyarrow`, in any
        nesting. None stays None, and a `PerReplica` stays as it is. Weights are cut by their own indices or splits.
      num_samples: number of samples of the batch, where a value has several rows a sample: rows of one sample then stay
        together. None takes each row for one.

    Raises:
      ValueError: a leaf has no first axis or does not fit, its rows are no multiple of `num_samples`, or a `PerReplica`
        has another number of values.
    """
    return pack_like(value, [_cut(path, leaf, num_replicas, num_samples) for path, leaf in flatten_with_paths(value)])


def rows_of(path: str, leaf: Any, start: int, stop: int) -> Any:
    """The rows `start` to `stop` of one value of a batch, in the form of the value.

    Raises:
      ValueError: its parts do not fit together, or it has no first axis.
    """
    if isinstance(leaf, Ragged):
        return _rows_of_ragged(path, leaf, start, stop)
    if isinstance(leaf, Sparse):
        places, shape = checked_places(path, leaf.indices, leaf.values, leaf.dense_shape)
        kept = (places[:, 0] >= start) & (places[:, 0] < stop)
        first = np.array([start] + [0] * (len(shape) - 1), np.int64)
        return Sparse(places[kept] - first, np.asarray(leaf.values)[kept], (stop - start, *shape[1:]))
    if is_of(leaf, "scipy"):
        return _rows_of_scipy(leaf, start, stop)
    if is_of(leaf, "pyarrow"):
        return leaf.slice(start, stop - start)
    if not getattr(leaf, "shape", ()):
        raise _no_rows(path, leaf)
    return leaf[start:stop]


def _cut(path: str, leaf: Any, num_replicas: int, num_samples: int | None) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, PerReplica):
        if len(leaf.values) != num_replicas:
            raise ValueError(
                f"Found {len(leaf.values)} values of replicas{_at(path)} in a batch to be split. Expected "
                f"{num_replicas}, one for each replica. Pass the whole value."
            )
        return leaf
    rows = _num_rows(path, leaf)
    samples = rows if num_samples is None else num_samples
    if rows and (samples < 1 or rows % samples):
        raise ValueError(
            f"Found {rows} rows{_at(path)} in a batch to be split by {samples} samples. Expected a multiple of the "
            "samples. Pass the samples of this batch as num_samples, or split values with other samples by themselves."
        )
    ends = share_ends(rows, samples if rows else 0, num_replicas)
    return PerReplica(tuple(rows_of(path, leaf, start, stop) for start, stop in pairwise(ends)))


def _num_rows(path: str, leaf: Any) -> int:
    if isinstance(leaf, Ragged):
        return len(leaf.row_splits) - 1
    if isinstance(leaf, Sparse):
        return checked_places(path, leaf.indices, leaf.values, leaf.dense_shape)[1][0]
    if is_of(leaf, "pyarrow") and hasattr(leaf, "slice"):
        return len(leaf)
    if not getattr(leaf, "shape", ()):
        raise _no_rows(path, leaf)
    return int(leaf.shape[0])


def _rows_of_ragged(path: str, leaf: Ragged, start: int, stop: int) -> Ragged:
    values = np.asarray(leaf.values)
    splits = checked_row_splits(path, values, leaf.row_splits)
    first, last = int(splits[start]), int(splits[stop])
    weights = None if leaf.weights is None else np.asarray(leaf.weights)[first:last]
    return Ragged(values[first:last], splits[start : stop + 1] - first, weights)


def _rows_of_scipy(matrix: Any, start: int, stop: int) -> Any:
    if matrix.format == "csr":
        return matrix[start:stop]
    # As coordinates: converting to rows would add up entries at one place.
    entries = matrix.tocoo()
    kept = (entries.coords[0] >= start) & (entries.coords[0] < stop)
    first, *others = (axis[kept] for axis in entries.coords)
    return type(entries)((entries.data[kept], (first - start, *others)), shape=(stop - start, *entries.shape[1:]))


def _no_rows(path: str, leaf: Any) -> ValueError:
    return ValueError(
        f"Found {type(leaf)}{_at(path)} in a batch to be split. Expected arrays with a first axis, Ragged, Sparse, a "
        "scipy.sparse matrix, a list "
        "array of pyarrow, or None. Pass other values as they are, and lists of numbers as arrays."
    )


def _at(path: str) -> str:
    return f" at '{path}'" if path else ""
