"""Positions of histories in the form that a model works on: padded, or as rows.

Padded to one length, histories that differ are mostly filling, and a model computes all of it. As rows, its layers,
norms and gradients cost as much as there are positions; attention alone needs them padded. The copies between both
forms are cheap on a CPU, where this saves more than they cost (docs/fast-models.md). TPUs copy rows slowly, and have
the padded form, as everything else that was not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from podembed import Jagged
from podembed.jobs.models.layers import dropped, kept_in_dropout
from podembed.jobs.models.next_items import last_of

# Rows of a piece: the products of pieces give the gradient of a weight, see `layers.product`. Shorter pieces cost more,
# and with longer ones products of wide layers do. Rooms of a step are multiples of it.
_LONGEST_PIECE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Vectors are `[n, longest, width]`.

    Attributes:
      history: the positions.
    """

    history: Jagged

    @property
    def values(self) -> jax.Array:
        """Vectors of the history; zeros behind it."""
        return self.history.padded()

    @property
    def mask(self) -> jax.Array:
        """bool, with an axis for the width: whether there is such a position."""
        return self.history.mask_padded()[:, :, None]

    @property
    def places(self) -> jax.Array:
        """int32: number of a position in its history, from 0; broadcasts against vectors without their width."""
        return jnp.arange(self.history.longest)

    @property
    def ages(self) -> jax.Array:
        """int32: positions that follow; 0 behind a history."""
        return jnp.maximum(self.history.lengths[:, None] - 1 - self.places, 0)

    def padded(self, x: jax.Array) -> jax.Array:
        """Vectors in the form `[n, longest, width]`, with anything behind a history."""
        return x

    def of_padded(self, x: jax.Array) -> jax.Array:
        """What `padded` gave, in this form."""
        return x

    def last(self, x: jax.Array) -> jax.Array:
        """`[n, 1, width]`: vectors of the last positions; the first one of empty histories."""
        return last_of(x, self.history.lengths)[:, None]

    def dropped(self, key: jax.Array, x: jax.Array, share: float) -> jax.Array:
        """As `layers.dropped`: the same numbers in both forms."""
        return dropped(key, x, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRow(Padded):
    """Vectors are `[pieces, rows, width]`. The last rows are filling."""

    @property
    def values(self) -> jax.Array:
        return self._cut(self.history.values)

    @property
    def mask(self) -> jax.Array:
        return self._cut(self.history.mask[:, None])

    @property
    def places(self) -> jax.Array:
        return self._cut(jnp.minimum(self.history.positions, self.history.longest - 1))

    @property
    def ages(self) -> jax.Array:
        lengths = self.history.lengths[self.history.samples]
        return self._cut(jnp.maximum(lengths - 1 - self.history.positions, 0))

    def padded(self, x: jax.Array) -> jax.Array:
        return self.history.with_values(self._whole(x)).padded()

    def of_padded(self, x: jax.Array) -> jax.Array:
        return self._cut(self.history.rows_of(x))

    def last(self, x: jax.Array) -> jax.Array:
        last = self.history.starts + jnp.maximum(self.history.lengths - 1, 0)
        return self._whole(x)[last][:, None]

    def dropped(self, key: jax.Array, x: jax.Array, share: float) -> jax.Array:
        if not share:
            return x
        shape = (len(self.history.lengths), self.history.longest, x.shape[-1])
        kept = self._cut(self.history.rows_of(kept_in_dropout(key, shape, share)))
        return jnp.where(kept, x / (1 - share), 0.0)

    def _cut(self, x: jax.Array) -> jax.Array:
        rows = max(size for size in range(1, _LONGEST_PIECE + 1) if len(x) % size == 0)
        return x.reshape(-1, rows, *x.shape[1:])

    def _whole(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1])


def on_positions(history: Jagged, function: Callable[[Padded], jax.Array]) -> jax.Array:
    """What the function returns for the history in the form that is faster. It is called for both, and must give the
    same for both, up to rounding.
    """
    # First, since exported models have padded positions, of any number of samples.
    if not history.is_compact or 4 * history.capacity > 3 * history.lengths.shape[0] * history.longest:
        return function(Padded(history=history))
    return jax.lax.platform_dependent(
        history,
        cpu=lambda history: function(ByRow(history=history)),
        default=lambda history: function(Padded(history=history)),
    )
