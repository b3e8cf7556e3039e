"""Limits on gradients before an update: each one's norm, the norm of all together, or each element.

The formulas are those of TensorFlow's `clip_by_norm`, `clip_by_global_norm` and `clip_by_value`. Row slices are clipped
on their values as they came, so a row that occurs twice counts twice in a norm; merging comes after.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from podembed.embedding.keras.row_slices import RowSlices

Gradient = jax.Array | RowSlices


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
