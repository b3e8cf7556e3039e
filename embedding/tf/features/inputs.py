"""What `enqueue` and the serving lookup accept as one feature: dense, sparse and ragged values, read into one plain
form.

Dense are numpy and JAX arrays. Sparse are `Sparse` and `scipy.sparse` matrices whose stored values are the ids. Ragged
are `Ragged` and list arrays of `pyarrow`. This module checks a value by itself (dtype, splits, indices, weights). It
knows no vocabulary and no output shape; `id_policies` and `bags` come after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer

from podembed.embedding.features.id_policies import shown_path
from podembed.embedding.ragged import Ragged

Kind = Literal["dense", "sparse", "ragged"]
# The words of the API that is followed here; its users look for them in messages.
_TENSOR_NAMES = {
    "sparse": "SparseTensor (Sparse or a scipy.sparse matrix)",
    "ragged": "RaggedTensor (Ragged or a list array of pyarrow)",
}
_INT64_MAX = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Ids or weights at some places of an array, the rest is empty.

    Attributes:
      indices: integers `[n, rank]`, the place of each value; the last axis counts the ids of a sample.
      values: `[n]`, ids, or the weights of ids at the same places.
      dense_shape: integers `[rank]`.
    """

    indices: Any
    values: Any
    dense_shape: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureInput:
    """One feature of a batch, checked by itself.

    Attributes:
      path: path of the feature, for messages.
      kind: kind of the value it was read from.
      shape: shape of that value; the last axis of a ragged one is None.
      ids: int64 `[n]`, row by row.
      row_splits: int64 `[num_rows + 1]`; rows are all axes but the last, flattened.
      columns: int64 `[n]`, the column of each id in its row; None where that is its position.
      order: how the caller's values were permuted to come row by row, None if not at all.
      weights: float32 `[n]` or None for all ones.
    """

    path: str
    kind: Kind
    shape: tuple[int | None, ...]
    ids: np.ndarray
    row_splits: np.ndarray
    columns: np.ndarray | None = None
    order: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.row_splits) - 1


def read_input(path: str, value: Any, *, keys_of_any: bool = False) -> FeatureInput:
    """Reads the ids of one feature.

    Args:
      keys_of_any: whether any 64 bits are an id, so that unsigned ones are taken for their two's complement.

    Raises:
      ValueError: the value is of no accepted type, is not integers, lies on a TPU, or its parts do not fit together.
    """
    if isinstance(value, Ragged):
        return _read_ragged(path, value, keys_of_any)
    if isinstance(value, Sparse):
        return _read_sparse(path, value.indices, value.values, value.dense_shape, keys_of_any)
    if isinstance(value, np.ndarray | jax.Array):
        return _read_dense(path, value, keys_of_any)
    if is_of(value, "scipy"):
        return _read_scipy(path, value, keys_of_any)
    if is_of(value, "pyarrow"):
        return _read_ragged(path, _of_pyarrow(path, value), keys_of_any)
    raise ValueError(
        f"Input {shown_path(path)} is of unknown type {type(value)}. Expected a numpy or JAX array, Ragged, Sparse, a "
        "scipy.sparse matrix or a list array of pyarrow. Convert it."
    )


def with_weight(feature_input: FeatureInput, weight: Any) -> FeatureInput:
    """The same input with weights; only the values of `weight` are used, its indices or splits are taken for those of
    the ids.

    Raises:
      ValueError: the input is dense, the weight is of another kind, not finite numbers, or not one per id.
    """
    if weight is None:
        return feature_input
    path, kind = feature_input.path, feature_input.kind
    if kind == "dense":
        raise ValueError(
            f"Weight specified for dense input {shown_path(path)}, which is not allowed. Expected None: a dense id "
            "always has weight 1. Pass Ragged or Sparse ids to weigh them."
        )
    values = _weight_values(weight)
    if values is None or weight_kind(weight) != kind:
        raise ValueError(
            f"Weight for {shown_path(path)} is type {type(weight)} which does not match type input which is "
            f"{_TENSOR_NAMES[kind]}. Pass the weights in the same form as the ids."
        )
    if feature_input.weights is not None:
        raise ValueError(
            f"Found weights inside the Ragged ids of {shown_path(path)} and beside them. Expected one of them. Drop "
            "one."
        )
    return replace(feature_input, weights=checked_weights(feature_input, values))


def weight_kind(weight: Any) -> Kind | None:
    """The kind of value that a weight is, None if it is none of the accepted ones."""
    if isinstance(weight, Ragged) or is_of(weight, "pyarrow"):
        return "ragged"
    if isinstance(weight, Sparse) or is_of(weight, "scipy"):
        return "sparse"
    return "dense" if isinstance(weight, np.ndarray | jax.Array) else None


def weight_dtype(weight: Any) -> np.dtype | None:
    """The dtype of the values of a weight, None if they are Python numbers, which have none, or of no accepted kind."""
    if isinstance(weight, Ragged | Sparse) and not hasattr(weight.values, "dtype"):
        return None
    values = _weight_values(weight)
    return None if values is None else values.dtype


def checked_weights(feature_input: FeatureInput, values: np.ndarray) -> np.ndarray:
    """Weights as float32 in the order of the ids.

    Raises:
      ValueError: not one per id, not numbers, or not finite.
    """
    path = shown_path(feature_input.path)
    if values.shape != feature_input.ids.shape:
        raise ValueError(
            f"Found weights of shape {values.shape} for {path}. Expected {feature_input.ids.shape}, one for each id. "
            "Pass them in the order of the ids."
        )
    # As JAX sees it: to numpy, bfloat16 is no float.
    if not any(jax.numpy.issubdtype(values.dtype, kind) for kind in (np.floating, np.integer)) and values.size:
        raise ValueError(
            f"Found weights of dtype {values.dtype} for {path}. Expected numbers. Pass weights.astype(np.float32)."
        )
    with np.errstate(over="ignore"):
        weights = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(weights).all():
        at = int(np.argmin(np.isfinite(weights)))
        raise ValueError(
            f"Found weight {values[at]} at position {at} of {path}. Expected weights that are finite as float32: a NaN "
            "or an infinity would spread into the table. Clean the input."
        )
    return weights if feature_input.order is None else weights[feature_input.order]


def checked_row_splits(path: str, values: np.ndarray, row_splits: Any) -> np.ndarray:
    """The splits of a ragged value as int64.

    Raises:
      ValueError: they do not fit the values.
    """
    splits = np.asarray(row_splits)
    if values.ndim != 1 or splits.ndim != 1:
        raise ValueError(
            f"Only rank 2 ragged tensor is supported, found values of shape {values.shape} and row_splits of shape "
            f"{splits.shape} for input {shown_path(path)}. Expected one axis each. Flatten the values."
        )
    if len(splits) == 0 or splits.dtype.kind not in "iu":
        raise ValueError(
            f"Found row_splits of dtype {splits.dtype} and shape {splits.shape} for {shown_path(path)}. Expected at "
            "least one integer. Pass [0] for no rows."
        )
    splits = np.ascontiguousarray(splits, np.int64)
    if splits[0] != 0 or splits[-1] != len(values) or (splits[1:] < splits[:-1]).any():
        raise ValueError(
            f"Found row_splits {_shortened(splits)} over {len(values)} ids for {shown_path(path)}. Expected them to "
            "start at 0, never to fall and "
            "to end at the number of values. Pass the cumulated row lengths with a 0 in front."
        )
    return splits


def checked_places(path: str, indices: Any, values: Any, dense_shape: Any) -> tuple[np.ndarray, tuple[int, ...]]:
    """Indices as int64 `[n, rank]` and shape of a sparse value.

    Raises:
      ValueError: indices, values and shape do not fit together.
    """
    places, found, sizes = np.asarray(indices), np.asarray(values), np.asarray(dense_shape)
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu") or (sizes < 0).any():
        raise ValueError(
            f"Found dense_shape {dense_shape!r} for {shown_path(path)}. Expected integers of at least 0, one for each "
            "axis. Pass a tuple such as (batch_size, most_ids)."
        )
    shape = tuple(int(size) for size in sizes)
    if places.size == 0:
        places = np.zeros((0, len(shape)), np.int64)
    if found.ndim != 1 or places.shape != (len(found), len(shape)) or places.dtype.kind not in "iu":
        raise ValueError(
            f"Found indices of shape {places.shape} and dtype {places.dtype} with values of shape {found.shape} and "
            f"dense_shape {shape} for {shown_path(path)}. Expected integer indices [n, rank], values [n] and "
            "dense_shape [rank]. Check which is which."
        )
    places = places.astype(np.int64, copy=False)
    if len(shape) == 0:
        raise ValueError(
            f"Found a sparse value without axes for {shown_path(path)}. Expected rank 2 and above. Add axes."
        )
    outside = (places < 0) | (places >= np.asarray(shape, np.int64))
    if outside.any():
        at = int(np.argmax(outside.any(axis=1)))
        raise ValueError(
            f"Found index {places[at].tolist()} in a sparse value of dense_shape {shape} for {shown_path(path)}. "
            "Expected indices inside it. Correct dense_shape or the index."
        )
    return places, shape


def is_of(value: Any, library: str) -> bool:
    """Whether a value is of a library that may not be installed."""
    return type(value).__module__.split(".")[0] == library


def _read_dense(path: str, value: np.ndarray | jax.Array, keys_of_any: bool) -> FeatureInput:
    _refuse_tpus(path, value)
    array = host_array(path, value)
    ids = _as_ids(path, array, keys_of_any).reshape(-1)
    width = array.shape[-1] if array.ndim > 1 else 1
    num_rows = len(ids) // width if width else int(np.prod(array.shape[:-1]))
    row_splits = np.arange(0, num_rows * width + 1, width) if width else np.zeros(num_rows + 1, np.int64)
    return FeatureInput(path=path, kind="dense", shape=array.shape, ids=ids, row_splits=row_splits)


def host_array(path: str, value: Any) -> np.ndarray:
    """A JAX or numpy array as numpy, without a copy where it lies in the host's memory.

    Raises:
      ValueError: it is a tracer of a function under jit, or has masked elements.
    """
    if isinstance(value, np.ndarray):
        if np.ma.is_masked(value):
            raise ValueError(
                f"Found a masked array with masked elements for {shown_path(path)}. Expected a value everywhere. Fill "
                "it, or pass the others as Sparse or Ragged."
            )
        return value
    refuse_traced(path, value)
    return np.asarray(value)


def refuse_traced(path: str, value: Any) -> None:
    """Raises ValueError for a tracer of a function under jit."""
    if isinstance(value, Tracer):
        raise ValueError(
            f"Received input tensor {shown_path(path)} inside a function that JAX traces. Expected an array with "
            "values. Call enqueue and apply_gradients outside jit."
        )


def _refuse_tpus(path: str, value: np.ndarray | jax.Array) -> None:
    """Ids are read on the host, and their way back from a device takes longer than a step."""
    for device in () if isinstance(value, np.ndarray | Tracer) else value.devices():
        if device.platform == "tpu":
            raise ValueError(
                f"Received input tensor {shown_path(path)} which is on a TPU input device {device}. Expected ids in "
                "the memory of the host. Pass the numpy array before it is put on the device."
            )


def _as_ids(path: str, array: np.ndarray, keys_of_any: bool) -> np.ndarray:
    if array.dtype.kind not in "iu":
        if array.size == 0:
            return np.zeros(array.shape, np.int64)
        raise ValueError(
            f"Found ids of dtype {array.dtype} for {shown_path(path)}. Expected integers. Cast them to int64 where "
            "they are made; a cast here would hide a wrong column."
        )
    if array.dtype == np.uint64 and not keys_of_any:
        # Still outside every vocabulary, but no longer negative.
        array = np.minimum(array, np.uint64(_INT64_MAX))
    return np.ascontiguousarray(array, np.int64)


def _read_ragged(path: str, value: Ragged, keys_of_any: bool) -> FeatureInput:
    ids = np.asarray(value.values)
    splits = checked_row_splits(path, ids, value.row_splits)
    read = FeatureInput(
        path=path, kind="ragged", shape=(len(splits) - 1, None), ids=_as_ids(path, ids, keys_of_any), row_splits=splits
    )
    if value.weights is None:
        return read
    return replace(read, weights=checked_weights(read, np.asarray(value.weights)))


def _read_sparse(path: str, indices: Any, values: Any, dense_shape: Any, keys_of_any: bool) -> FeatureInput:
    places, shape = checked_places(path, indices, values, dense_shape)
    return _sorted_sparse(path, places, _as_ids(path, np.asarray(values), keys_of_any), shape)


def _sorted_sparse(path: str, places: np.ndarray, ids: np.ndarray, shape: tuple[int, ...]) -> FeatureInput:
    rows = np.zeros(len(ids), np.int64)
    if len(shape) > 1:
        rows = np.asarray(np.ravel_multi_index(tuple(places[:, :-1].T), shape[:-1]), np.int64)
    columns = np.ascontiguousarray(places[:, -1])
    falls = rows[1:] < rows[:-1]
    order = None
    if falls.any() or ((rows[1:] == rows[:-1]) & (columns[1:] < columns[:-1])).any():
        order = np.lexsort((columns, rows))
        ids, rows, columns = ids[order], rows[order], columns[order]
    num_rows = int(np.prod(shape[:-1]))
    row_splits = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=row_splits[1:])
    return FeatureInput(
        path=path, kind="sparse", shape=shape, ids=ids, row_splits=row_splits, columns=columns, order=order
    )


def _read_scipy(path: str, matrix: Any, keys_of_any: bool) -> FeatureInput:
    # As coordinates: converting to rows would add up entries at one place.
    entries = _entries(matrix)
    shape = entries.shape
    places = np.stack([np.asarray(axis, np.int64) for axis in entries.coords], axis=1)
    return _read_sparse(path, places, entries.data, shape, keys_of_any)


def _entries(matrix: Any) -> Any:
    """A `scipy.sparse` matrix as coordinates, in its own order. A dict of entries has none, so those come row by row:
    ids and weights were put in one by one.
    """
    return (matrix.tocsr().sorted_indices() if matrix.format == "dok" else matrix).tocoo()


def _of_pyarrow(path: str, array: Any) -> Ragged:
    if hasattr(array, "combine_chunks"):
        array = array.combine_chunks()
    if not hasattr(array, "flatten") or not hasattr(array, "value_lengths"):
        kind = getattr(array, "type", type(array).__name__)
        raise ValueError(
            f"Found a pyarrow {kind} for {shown_path(path)}. Expected a list array. For one id a sample pass "
            "array.to_numpy()."
        )
    values = array.flatten()
    if values.null_count:
        raise ValueError(
            f"Found {values.null_count} missing values inside the lists of {shown_path(path)}. Expected none; a "
            "missing list is an empty one. Fill or drop them."
        )
    lengths = np.asarray(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return Ragged(values.to_numpy(zero_copy_only=False), splits)


def _weight_values(weight: Any) -> np.ndarray | None:
    if isinstance(weight, Ragged | Sparse):
        return np.asarray(weight.values)
    if is_of(weight, "scipy"):
        return np.asarray(_entries(weight).data)
    if is_of(weight, "pyarrow"):
        return np.asarray(_of_pyarrow("weights", weight).values)
    return None


def _shortened(values: np.ndarray) -> str:
    shown = values[:6].tolist()
    return f"{shown}" if len(values) <= 6 else f"[{', '.join(map(str, shown))}, ..., {values[-1]}]"
