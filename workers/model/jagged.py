"""`Jagged`: the sequences of a batch, one after another, without the room between their length and the longest one.

Padded to one length, histories that differ tenfold are mostly padding. Here a position of a sample is one row, so what
a model does by row costs as much as there are positions. `padded` gives the usual form to what needs it, such as
attention.

Gradients of rows that are spread or put side by side are gathered, never scattered, since each row has one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp


@partial(
    jax.tree_util.register_dataclass, data_fields=["values", "lengths", "starts"], meta_fields=["longest", "is_compact"]
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Jagged:
    """Sequences of vectors, or of anything else that has a row for each position. A JAX pytree.

    Attributes:
      values: `[capacity, ...]`, the positions of all samples, sample after sample. Rows behind the last one are
        filling. They begin as zeros, and `mask` tells them apart.
      lengths: int32 `[n]`, positions of each sample.
      starts: int32 `[n]`, the row of each sample's first position.
      longest: no sample of the batch, on any host, is longer. It differs from batch to batch, in steps of two.
      is_compact: whether every sample begins where the one before ends.
    """

    values: jax.Array
    lengths: jax.Array
    starts: jax.Array
    longest: int = field(default=1)
    is_compact: bool = True

    @staticmethod
    def of(values: jax.Array, lengths: jax.Array, *, longest: int) -> Jagged:
        """A `Jagged` of rows that follow each other without a gap."""
        starts = jnp.cumsum(lengths, dtype=jnp.int32) - lengths
        return Jagged(values=values, lengths=lengths, starts=starts, longest=longest)

    @staticmethod
    def of_padded(values: jax.Array, lengths: jax.Array) -> Jagged:
        """A `Jagged` of `[n, length, ...]`, without moving anything: every sample keeps `length` rows."""
        num_samples, length = values.shape[:2]
        return Jagged(
            values=values.reshape(num_samples * length, *values.shape[2:]),
            lengths=lengths,
            starts=jnp.arange(num_samples, dtype=jnp.int32) * length,
            longest=length,
            is_compact=False,
        )

    @property
    def capacity(self) -> int:
        return self.values.shape[0]

    @property
    def samples(self) -> jax.Array:
        """int32 `[capacity]`: the sample that each row belongs to. Those of filling are samples, too."""
        if not self.is_compact:
            return jnp.arange(self.capacity, dtype=jnp.int32) // self.longest
        rows = jnp.arange(self.capacity, dtype=jnp.int32)
        found = jnp.searchsorted(self.starts + self.lengths, rows, side="right", method="scan_unrolled")
        return jnp.minimum(found.astype(jnp.int32), self.lengths.shape[0] - 1)

    @property
    def positions(self) -> jax.Array:
        """int32 `[capacity]`: the position of each row in its sample, from 0."""
        return jnp.arange(self.capacity, dtype=jnp.int32) - self.starts[self.samples]

    @property
    def mask(self) -> jax.Array:
        """bool `[capacity]`: whether a row is a position of a sample."""
        samples = self.samples
        positions = jnp.arange(self.capacity, dtype=jnp.int32) - self.starts[samples]
        return positions < self.lengths[samples]

    def with_values(self, values: jax.Array) -> Jagged:
        """Other rows, `[capacity, ...]`, in the same places."""
        return replace(self, values=values)

    def of_samples(self, values: jax.Array) -> jax.Array:
        """`[n, ...]` → `[capacity, ...]`: at every row what its sample has; zeros at filling."""
        return _spread(self.with_values(jnp.zeros((self.capacity, 0))), values)

    def sum(self) -> jax.Array:
        """`[n, ...]`: the sum over the positions of each sample."""
        return _summed(self.with_values(jnp.zeros((self.capacity, 0))), self.values)

    def padded(self, length: int | None = None) -> jax.Array:
        """`[n, length, ...]`: the positions of a sample side by side, and zeros behind them.

        Args:
          length: later positions are left out; None stands for `longest`.
        """
        length = self.longest if length is None else length
        return _padded(self.with_values(jnp.zeros((self.capacity, 0))), length, self.values)

    def rows_of(self, padded: jax.Array) -> jax.Array:
        """`[n, length, ...]` → `[capacity, ...]`: what lies side by side as rows again; zeros at filling, and at
        positions from `length` on.
        """
        return _rows(self.with_values(jnp.zeros((self.capacity, 0))), padded.shape[1], padded)

    def mask_padded(self, length: int | None = None) -> jax.Array:
        """bool `[n, length]`: which positions of `padded` there are."""
        return jnp.arange(self.longest if length is None else length) < self.lengths[:, None]


def _masked(mask: jax.Array, values: jax.Array) -> jax.Array:
    kept = mask.reshape(*mask.shape, *(1,) * (values.ndim - mask.ndim))
    return jnp.where(kept, values, jnp.zeros((), values.dtype))


def _side_by_side(places: Jagged, length: int, values: jax.Array) -> jax.Array:
    rows = places.starts[:, None] + jnp.arange(length, dtype=jnp.int32)
    found = jnp.take(values, jnp.minimum(rows, values.shape[0] - 1), axis=0)
    return _masked(places.mask_padded(length), found)


def _one_after_another(places: Jagged, padded: jax.Array) -> jax.Array:
    samples, positions = places.samples, places.positions
    length = padded.shape[1]
    flat = padded.reshape(-1, *padded.shape[2:])
    found = jnp.take(flat, samples * length + jnp.clip(positions, 0, length - 1), axis=0)
    return _masked(places.mask & (positions < length), found)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _padded(places: Jagged, length: int, values: jax.Array) -> jax.Array:
    return _side_by_side(places, length, values)


def _padded_forward(places: Jagged, length: int, values: jax.Array) -> tuple[jax.Array, Jagged]:
    return _side_by_side(places, length, values), places


def _padded_backward(length: int, places: Jagged, gradient: jax.Array) -> tuple[None, jax.Array]:
    return None, _one_after_another(places, gradient)


_padded.defvjp(_padded_forward, _padded_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rows(places: Jagged, length: int, padded: jax.Array) -> jax.Array:
    return _one_after_another(places, padded)


def _rows_forward(places: Jagged, length: int, padded: jax.Array) -> tuple[jax.Array, Jagged]:
    return _one_after_another(places, padded), places


def _rows_backward(length: int, places: Jagged, gradient: jax.Array) -> tuple[None, jax.Array]:
    return None, _side_by_side(places, length, gradient)


_rows.defvjp(_rows_forward, _rows_backward)


def _sum_of_each(places: Jagged, values: jax.Array) -> jax.Array:
    num_samples = places.lengths.shape[0]
    samples = jnp.where(places.mask, places.samples, num_samples)
    return jax.ops.segment_sum(values, samples, num_samples + 1)[:-1]


def _at_each(places: Jagged, values: jax.Array) -> jax.Array:
    return _masked(places.mask, jnp.take(values, places.samples, axis=0))


@jax.custom_vjp
def _spread(places: Jagged, values: jax.Array) -> jax.Array:
    return _at_each(places, values)


_spread.defvjp(
    lambda places, values: (_at_each(places, values), places),
    lambda places, gradient: (None, _sum_of_each(places, gradient)),
)


@jax.custom_vjp
def _summed(places: Jagged, values: jax.Array) -> jax.Array:
    return _sum_of_each(places, values)


_summed.defvjp(
    lambda places, values: (_sum_of_each(places, values), places),
    lambda places, gradient: (None, _at_each(places, gradient)),
)
