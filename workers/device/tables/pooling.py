"""From rows of a table on the device to the vectors of bags, and from gradients of vectors to those of ids.

The same arithmetic in the same order as `embedding.kernels.pool`: the ids of a bag are summed one after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podembed.embedding.config import QuantizationConfig

# Longer bags are summed in a loop of the device, since each turn of one here is a part of the program.
_MOST_UNROLLED = 8


class BagIds(NamedTuple):
    """The ids of a feature, as one device has them.

    Attributes:
      rows: int32 `[num_bags, room]`; -1 where a bag has no more.
      weights: float32 of the same shape, or None for all ones.
      combiner: combiner of the feature.
    """

    rows: jax.Array
    weights: jax.Array | None
    combiner: str


def pooled(table: jax.Array, ids: BagIds, quantization: QuantizationConfig | None) -> jax.Array:
    """The vectors of all bags, `[num_bags, dim]`; zeros for an empty bag, and where weights cancel."""
    start = jnp.zeros((ids.rows.shape[0], table.shape[1]), table.dtype)

    def add(number: Any, total: jax.Array) -> jax.Array:
        rows = _column(ids.rows, number)
        vectors = table[jnp.maximum(rows, 0)]
        if quantization is not None:
            vectors = _quantized(vectors, quantization)
        if ids.weights is not None:
            vectors = vectors * _column(ids.weights, number)[:, None]
        return jnp.where(rows[:, None] >= 0, total + vectors, total)

    return _divided(_over_ids(ids, add, start), ids)


def gradients_of_bags(gradients: jax.Array, ids: BagIds) -> jax.Array:
    """The gradient of each id of a bag, before its weight: `[num_bags, dim]` to the same."""
    return _divided(gradients, ids)


def gradients_of_ids(each: jax.Array, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    """`[num_bags, dim]` of `gradients_of_bags` to `[num_bags * room, dim]`, bag after bag."""
    spread = jnp.broadcast_to(each[:, None, :], (*rows.shape, each.shape[1]))
    if weights is not None:
        spread = spread * weights[:, :, None]
    return spread.reshape(-1, each.shape[1])


def _divided(vectors: jax.Array, ids: BagIds) -> jax.Array:
    amount = _denominators(ids)[:, None]
    divided = vectors if ids.combiner == "sum" else vectors / jnp.where(amount == 0, 1, amount)
    return jnp.where(amount == 0, jnp.zeros_like(vectors), divided)


def _denominators(ids: BagIds) -> jax.Array:
    """What the sum over each bag is divided by, `[num_bags]`; 0 for an empty bag."""
    count = (ids.rows >= 0).sum(axis=1).astype(jnp.float32)
    if ids.combiner == "sum":
        return (count > 0).astype(jnp.float32)
    amount = count
    if ids.weights is not None:
        is_mean, all_weights = ids.combiner == "mean", ids.weights

        def add(number: Any, total: jax.Array) -> jax.Array:
            weights = _column(all_weights, number)
            return total + (weights if is_mean else weights * weights)

        amount = _over_ids(ids, add, jnp.zeros_like(count))
    return jnp.sqrt(amount) if ids.combiner == "sqrtn" else amount


def _over_ids(ids: BagIds, add: Any, start: jax.Array) -> jax.Array:
    """Over the first ids of all bags, then over the second ones, and so on."""
    room = ids.rows.shape[1]
    if room > _MOST_UNROLLED:
        return jax.lax.fori_loop(0, room, add, start)
    total = start
    for number in range(room):
        total = add(number, total)
    return total


def _column(values: jax.Array, number: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(values, number, axis=1, keepdims=False)


def _quantized(rows: jax.Array, config: QuantizationConfig) -> jax.Array:
    """As `QuantizationConfig.apply`."""
    lower, upper = jnp.float32(config.lower), jnp.float32(config.upper)
    step = jnp.float32((config.upper - config.lower) / (config.num_buckets - 1))
    return jnp.floor((jnp.clip(rows, lower, upper) - lower) / step + jnp.float32(0.5)) * step + lower
