"""What happens to gradients before an update: pairs are checked, missing gradients are left out, limits are applied.

The limits are each one's norm, the norm of all together, or each element, by the formulas of TensorFlow's
`clip_by_norm`, `clip_by_global_norm` and `clip_by_value`. Row slices are clipped on their values as they came, so a row
that occurs twice counts twice in a norm; merging comes after.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.tf.keras.array_operators import plain
from podembed.embedding.tf.keras.row_slices import RowSlices
from podembed.embedding.tf.keras.variable import Variable

Gradient = jax.Array | RowSlices
GradsAndVars = Sequence[tuple[Gradient | None, Variable]]
_logger = logging.getLogger(__name__)


def dense_gradient(gradient: Any) -> jax.Array:
    """A gradient of any kind as an array of its variable's shape."""
    return gradient.dense() if isinstance(gradient, RowSlices) else jnp.asarray(plain(gradient))


def checked_pairs(grads_and_vars: Iterable[Any]) -> list[tuple[Gradient | None, Variable]]:
    """Pairs of a gradient, or None, and a variable, as `checked_pair` makes each.

    Raises:
      TypeError, ValueError: none is there, or one is no such pair.
    """
    if isinstance(grads_and_vars, (str, bytes)) or not isinstance(grads_and_vars, Iterable):
        raise TypeError(
            f"Found {type(grads_and_vars).__name__}. Expected (gradient, variable) pairs. Pass zip(gradients, "
            "variables)."
        )
    pairs = list(grads_and_vars)
    if not pairs:
        raise ValueError("Found no (gradient, variable) pair. Expected at least one. Pass zip(gradients, variables).")
    return [checked_pair(pair) for pair in pairs]


def checked_pair(pair: Any) -> tuple[Gradient | None, Variable]:
    """The gradient as an array or row slices of its variable's shape, and the variable.

    Raises:
      TypeError, ValueError: it is no such pair.
    """
    if isinstance(pair, (tuple, list)) and len(pair) != 2:
        raise ValueError(
            f"Found {len(pair)} values: {pair!r}. Expected a (gradient, variable) pair. Pass zip(gradients, variables)."
        )
    if not isinstance(pair, (tuple, list)) or not isinstance(pair[1], Variable):
        raise TypeError(f"Found {pair!r}. Expected a (gradient, Variable) pair. Pass zip(gradients, variables).")
    gradient, variable = pair
    if gradient is None:
        return None, variable
    gradient = gradient.of_shape(variable.shape) if isinstance(gradient, RowSlices) else jnp.asarray(plain(gradient))
    if not jnp.issubdtype(gradient.dtype, jnp.inexact):
        # Limits below 1 would round to 0 among integers.
        gradient = _as_dtype(gradient, variable.dtype)
    if tuple(gradient.shape) != variable.shape:
        raise ValueError(
            f"Found a gradient of shape {tuple(gradient.shape)} for variable '{variable.name}'. Expected "
            f"{variable.shape}. Check the order of gradients and variables."
        )
    return gradient, variable


def _as_dtype(gradient: Gradient, dtype: np.dtype) -> Gradient:
    if isinstance(gradient, RowSlices):
        return gradient.with_values(gradient.values.astype(dtype))
    return gradient.astype(dtype)


def present(pairs: GradsAndVars, warned: set[str]) -> list[tuple[Gradient, Variable]]:
    """The pairs that have a gradient. Raises ValueError if there is none at all.

    Args:
      warned: names of variables that a warning has named as having none; gets the new ones.
    """
    present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    missing = [variable.name for gradient, variable in pairs if gradient is None]
    if not present:
        raise ValueError(
            f"Found no gradient for any variable of {missing}. Expected at least one. Check that the loss depends on "
            "them."
        )
    if not warned.issuperset(missing):
        _logger.warning("Gradients do not exist for variables %s; they stay as they are in such a step.", missing)
        warned.update(missing)
    return present


def clipped(
    gradients: Sequence[Gradient], *, clipnorm: float | None, global_clipnorm: float | None, clipvalue: float | None
) -> list[Gradient]:
    """Returns the gradients under the first limit of the three that is above 0, unchanged if none is."""
    values = [one.values if isinstance(one, RowSlices) else one for one in gradients]
    if clipnorm and clipnorm > 0:
        limited = [_clipped_by_norm(one, clipnorm) for one in values]
    elif global_clipnorm and global_clipnorm > 0:
        limited = _clipped_by_global_norm(values, global_clipnorm)
    elif clipvalue and clipvalue > 0:
        limited = [jnp.clip(one, -clipvalue, clipvalue) for one in values]
    else:
        return list(gradients)
    pairs = zip(gradients, limited, strict=True)
    return [gradient.with_values(one) if isinstance(gradient, RowSlices) else one for gradient, one in pairs]


def _clipped_by_norm(values: jax.Array, limit: float) -> jax.Array:
    """`values * limit / max(norm, limit)`."""
    norm = jnp.sqrt(jnp.sum(values * values))
    return values * limit / jnp.maximum(norm, limit)


def _clipped_by_global_norm(values: list[jax.Array], limit: float) -> list[jax.Array]:
    """Scales all to a common norm of at most `limit`. A norm that is not finite makes everything NaN, so that it is
    noticed.
    """
    norm = jnp.sqrt(sum(jnp.sum(one * one) for one in values))
    scale = limit * jnp.minimum(1.0 / norm, 1.0 / limit)
    scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
    return [one * scale.astype(one.dtype) for one in values]
