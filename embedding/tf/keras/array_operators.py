"""`ArrayOperators`: Python's arithmetic for objects that stand for an array.

`Variable` and `RowSlices` are no arrays but can be used like one in expressions. The operators are written out rather
than generated, so that type checkers and readers see them. Results are always plain arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


class ArrayOperators:
    """Python's arithmetic on the array `_operand()` returns."""

    __slots__ = ()
    __array_ufunc__ = None  # numpy arrays on the left leave the operation to us instead of looping over elements

    def _operand(self) -> Any:
        raise NotImplementedError

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self._operand())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._operand(), dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        return self._operand()[index]

    def __neg__(self) -> Any:
        return -self._operand()

    def __abs__(self) -> Any:
        return abs(self._operand())

    def __add__(self, other: Any) -> Any:
        return self._operand() + plain(other)

    def __radd__(self, other: Any) -> Any:
        return plain(other) + self._operand()

    def __sub__(self, other: Any) -> Any:
        return self._operand() - plain(other)

    def __rsub__(self, other: Any) -> Any:
        return plain(other) - self._operand()

    def __mul__(self, other: Any) -> Any:
        return self._operand() * plain(other)

    def __rmul__(self, other: Any) -> Any:
        return plain(other) * self._operand()

    def __truediv__(self, other: Any) -> Any:
        return self._operand() / plain(other)

    def __rtruediv__(self, other: Any) -> Any:
        return plain(other) / self._operand()

    def __floordiv__(self, other: Any) -> Any:
        return self._operand() // plain(other)

    def __rfloordiv__(self, other: Any) -> Any:
        return plain(other) // self._operand()

    def __mod__(self, other: Any) -> Any:
        return self._operand() % plain(other)

    def __rmod__(self, other: Any) -> Any:
        return plain(other) % self._operand()

    def __pow__(self, other: Any) -> Any:
        return self._operand() ** plain(other)

    def __rpow__(self, other: Any) -> Any:
        return plain(other) ** self._operand()

    def __matmul__(self, other: Any) -> Any:
        return self._operand() @ plain(other)

    def __rmatmul__(self, other: Any) -> Any:
        return plain(other) @ self._operand()

    def __lt__(self, other: Any) -> Any:
        return self._operand() < plain(other)

    def __le__(self, other: Any) -> Any:
        return self._operand() <= plain(other)

    def __gt__(self, other: Any) -> Any:
        return self._operand() > plain(other)

    def __ge__(self, other: Any) -> Any:
        return self._operand() >= plain(other)


def plain(value: Any) -> Any:
    """Returns the array of a `Variable` or `RowSlices`, a list or tuple as an array, and anything else as it is."""
    if isinstance(value, ArrayOperators):
        return value._operand()
    return jnp.asarray(value) if isinstance(value, (list, tuple)) else value


def described(value: Any) -> Any:
    """A value of a configuration, which goes through JSON: arrays and numbers of numpy and JAX as lists and numbers of
    Python, also in lists, tuples and mappings. All else as it is, tracers too.
    """
    if isinstance(value, ArrayOperators):
        value = value._operand()
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not isinstance(value, Tracer):
        made = np.asarray(value).tolist()
        # Of types that numpy does not have, such as bfloat16, it is a number of theirs.
        return float(made) if isinstance(made, np.generic) else made
    if isinstance(value, Mapping):
        return {name: described(one) for name, one in value.items()}
    if isinstance(value, list):
        return [described(one) for one in value]
    return tuple(map(described, value)) if type(value) is tuple else value


def cast_to(value: Any, dtype: Any) -> Any:
    """Returns an array as another dtype: itself if nothing changes, numpy from numpy, which is far quicker than a JAX
    operation.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value, dtype)
    if value.dtype == dtype and not value.weak_type:
        return value
    return jnp.asarray(value, dtype)
