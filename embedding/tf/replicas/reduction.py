"""Values of replicas made one: sums and means, as `tf.distribute.Strategy.reduce` makes them.

The arithmetic is numpy's, in the order of the replicas, so a result does not depend on which replica was ready first.
JAX arrays give JAX arrays, everything else gives what numpy gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import jax
import numpy as np

from podembed.embedding.tf.features.structures import flatten, leaves_of_replicas, pack_like
from podembed.embedding.tf.replicas.per_replica import PerReplica

Axis = int | Sequence[int] | None


class ReduceOp(Enum):
    """How values of replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def of(given: ReduceOp | str) -> ReduceOp:
        """The operation of that name, in any case.

        Raises:
          ValueError: there is none.
        """
        if isinstance(given, ReduceOp):
            return given
        name = given.upper() if isinstance(given, str) else getattr(given, "name", "")
        if name not in ReduceOp.__members__:
            raise ValueError(f"Found reduce_op={given!r}. Expected ReduceOp.SUM or ReduceOp.MEAN, or their names.")
        return ReduceOp[str(name)]


def reduce_values(reduce_op: ReduceOp | str, value: Any, *, axis: Axis, num_replicas: int) -> Any:
    """One value of those of the replicas.

    Args:
      value: a `PerReplica` of numbers or arrays, or of nested ones of one structure, or a structure that holds such
        `PerReplica`s.
      axis: None reduces place by place, so shapes must agree. An axis, or several, is reduced within each replica
        first; then replicas may have different lengths along it, and a mean counts every element once.

    Returns:
      The structure with a reduced value at each leaf. A mean of integers is a float.

    Raises:
      TypeError: a value is no number.
      ValueError: shapes or structures of replicas do not fit, an axis does not exist, or a value that is not
        `PerReplica` would be summed.
    """
    operation = ReduceOp.of(reduce_op)
    reduced = [_reduced_leaf(operation, leaf, axis, num_replicas) for leaf in flatten(value)]
    return pack_like(value, reduced)


def _reduced_leaf(operation: ReduceOp, leaf: Any, axis: Axis, num_replicas: int) -> Any:
    if not isinstance(leaf, PerReplica):
        if num_replicas > 1 and not _is_the_same_for_all(operation, leaf):
            raise ValueError(
                f"Found a value of {type(leaf)} to be summed over {num_replicas} replicas. Expected PerReplica values, "
                "as strategy.run returns "
                "them, since this one may be a part or the whole. Multiply it yourself, or reduce by ReduceOp.MEAN."
            )
        # With one replica a value is that replica's.
        return _reduced(operation, "", [leaf], axis)
    values = leaf.values
    if len(values) != num_replicas:
        raise ValueError(f"Found {len(values)} values of replicas. Expected {num_replicas}, one for each replica.")
    columns = leaves_of_replicas(values, what="values to be reduced")
    return pack_like(values[0], [_reduced(operation, path, column, axis) for path, column in columns])


def _is_the_same_for_all(operation: ReduceOp, leaf: Any) -> bool:
    """A mean of equal values is the value, and a sum of zeros is zero."""
    return operation is ReduceOp.MEAN or (isinstance(leaf, int | float) and leaf == 0)


def _reduced(operation: ReduceOp, path: str, values: Sequence[Any], axis: Axis) -> Any:
    arrays = [_numbers(path, value) for value in values]
    counts = [1] * len(arrays)
    if axis is not None:
        axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
        for replica, array in enumerate(arrays):
            _check_axes(path, replica, array, axes)
        counts = [math.prod(array.shape[one] for one in axes) for array in arrays]
        arrays = [np.asarray(array.sum(axis=axes)) for array in arrays]
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"Found values of shapes {shapes}{_at(path)}, one for each replica. Expected the same shape of all. Pass "
            "axis=0 to reduce batches of different lengths."
        )
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    if operation is ReduceOp.MEAN:
        # Nothing at all has no mean; it is NaN, as in TensorFlow.
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.true_divide(total, sum(counts), dtype=_dtype_of_mean(total))
    if all(isinstance(value, jax.Array) for value in values):
        return jax.numpy.asarray(total)
    return np.asarray(total)[()]


def _dtype_of_mean(total: np.ndarray) -> Any:
    return None if total.dtype.kind in "biu" else total.dtype


def _numbers(path: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if not jax.numpy.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        raise TypeError(
            f"Found {type(value)}{_at(path)} to be reduced. Expected numbers or arrays of them. Return those from the "
            "function that runs."
        )
    return array


def _check_axes(path: str, replica: int, array: np.ndarray, axes: Sequence[Any]) -> None:
    wrong = [one for one in axes if isinstance(one, bool) or not isinstance(one, int | np.integer)]
    if wrong:
        raise ValueError(f"Found axis {wrong[0]!r}. Expected an int, several of them, or None.")
    outside = [one for one in axes if not -array.ndim <= one < array.ndim]
    if outside:
        raise ValueError(
            f"Found axis {outside[0]}, which is out of range for the value{_at(path)} of replica {replica} with rank "
            f"{array.ndim}. Expected an axis of the value; a number has none, so pass axis=None for numbers."
        )


def _at(path: str) -> str:
    return f" at '{path}'" if path else ""
