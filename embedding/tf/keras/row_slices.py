"""`RowSlices`, a gradient of some rows of a variable.

What TensorFlow calls `IndexedSlices`: indices and one row of values for each. This module owns the form, its checks,
and merging rows that occur twice; optimizers decide what to do with untouched rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from podembed.embedding.tf.keras.array_operators import ArrayOperators, plain


class RowSlices(ArrayOperators):
    """A gradient that is zero outside some rows: `dense[indices[i]] += values[i]`. A value; a JAX pytree.

    The same row may occur several times; its occurrences are summed, never treated one by one. Arithmetic works on the
    dense form.

    Attributes:
      indices: integers `[num_slices]`, rows of the variable.
      values: `[num_slices, *dense_shape[1:]]`.
      dense_shape: shape of the variable the gradient belongs to, or None until `apply_gradients` knows it.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, indices: Any, values: Any, dense_shape: Sequence[int] | None = None) -> None:
        """Checks and keeps the parts.

        Raises:
          TypeError: indices are not integers.
          ValueError: shapes do not fit together.
          IndexError: a row outside the table; not checked under tracing, where such rows are left out.
        """
        self.dense_shape = None if dense_shape is None else tuple(int(size) for size in dense_shape)
        self.values = jnp.asarray(plain(values))
        self.indices = _checked_indices(plain(indices), self.values, self.dense_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense form.

        Raises:
          ValueError: it is not known.
        """
        if self.dense_shape is None:
            raise ValueError(
                "Found row slices without a dense shape. Expected the shape of their variable. "
                "Pass it as the third argument, or leave it to apply_gradients, which takes that of the variable."
            )
        return self.dense_shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.values.dtype)

    def with_values(self, values: Any) -> RowSlices:
        """The same rows with other values of the same shape."""
        return _row_slices(self.indices, values, self.dense_shape)

    def of_shape(self, dense_shape: Sequence[int]) -> RowSlices:
        """These slices if they know their shape, else the same as a gradient of this one, with the constructor's
        checks.
        """
        return self if self.dense_shape is not None else RowSlices(self.indices, self.values, dense_shape)

    def merged(self) -> RowSlices:
        """Every row once, rising, its occurrences summed in their order.

        Under tracing the length stays and rows left over carry the index `dense_shape[0]`, which every scatter here
        drops.
        """
        num_rows, num_slices = self.shape[0], self.values.shape[0]
        if isinstance(self.indices, Tracer):
            rows, slot = jnp.unique(self.indices, return_inverse=True, size=num_slices, fill_value=num_rows)
        else:
            rows, slot = np.unique(np.asarray(self.indices), return_inverse=True)
        if not isinstance(rows, Tracer) and len(rows) == num_slices and np.array_equal(rows, self.indices):
            return self
        sums = (
            jnp.zeros((rows.shape[0], *self.values.shape[1:]), self.values.dtype).at[slot.reshape(-1)].add(self.values)
        )
        return _row_slices(jnp.asarray(rows, jnp.int32), sums, self.dense_shape)

    def dense(self) -> jax.Array:
        """The gradient as an array of `dense_shape`."""
        return jnp.zeros(self.shape, self.values.dtype).at[self.indices].add(self.values, mode="drop")

    def _operand(self) -> jax.Array:
        return self.dense()

    def __repr__(self) -> str:
        return f"RowSlices(indices={self.indices}, values={self.values}, dense_shape={self.dense_shape})"


def _row_slices(indices: Any, values: Any, dense_shape: tuple[int, ...] | None) -> RowSlices:
    """A RowSlices of parts already checked. JAX also rebuilds values through here with placeholders instead of
    arrays.
    """
    slices = RowSlices.__new__(RowSlices)
    slices.indices, slices.values, slices.dense_shape = indices, values, dense_shape
    return slices


def _checked_indices(indices: Any, values: jax.Array, dense_shape: tuple[int, ...] | None) -> Any:
    if not jnp.issubdtype(jnp.result_type(indices), jnp.integer) and np.size(indices) > 0:
        raise TypeError(
            f"Found row indices of dtype {jnp.result_type(indices)}. Expected integers. Cast them to int32 or int64."
        )
    row_shape = values.shape[1:] if dense_shape is None else dense_shape[1:]
    if np.ndim(indices) != 1 or dense_shape == () or values.shape != (*np.shape(indices), *row_shape):
        raise ValueError(
            f"Found indices {np.shape(indices)} and values {values.shape} for a table {dense_shape}. Expected indices "
            f"[n] and values [n, {', '.join(map(str, row_shape))}]. Reshape them, one row of values for each index."
        )
    if isinstance(indices, Tracer):
        return indices
    rows = np.asarray(indices, np.int64)
    last_row = np.iinfo(np.int32).max if dense_shape is None else dense_shape[0] - 1
    if rows.size and (rows.min() < 0 or rows.max() > last_row):
        raise IndexError(
            f"Found row {rows.min() if rows.min() < 0 else rows.max()}. Expected rows 0 to {last_row}. "
            "Check the ids; JAX itself would wrap or drop them silently."
        )
    return jnp.asarray(rows, jnp.int32)


jax.tree_util.register_pytree_node(
    RowSlices,
    lambda slices: ((slices.indices, slices.values), slices.dense_shape),
    lambda dense_shape, parts: _row_slices(parts[0], parts[1], dense_shape),
)
