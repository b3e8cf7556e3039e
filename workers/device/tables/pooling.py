"""From rows of a table on the device to the vectors of bags, and from gradients of vectors to those of ids.

The same arithmetic in the same order as `embedding.kernels.pool`: the ids of a bag are summed one after another. Bags
lie one behind the other without room between them, so a long one makes no other longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from podembed.embedding.config import QuantizationConfig
from podembed.workers.device.tables.lines import rows_at
from podembed.workers.device.tables.updates import sums_of_runs


@dataclass(frozen=True, slots=True)
class BagIds:
    """The ids of a feature, as one device has them.

    Attributes:
      rows: int32 `[n]`; -1 where there is none.
      bags: int32 `[n]`, rising: the bag of each; `num_bags` where there is no id. None if each bag has a place of its
        own, and one id at most.
      weights: float32 `[n]`, or None for all ones.
      combiner: combiner of the feature.
      num_bags: number of bags.
    """

    rows: jax.Array
    bags: jax.Array | None
    weights: jax.Array | None
    combiner: str
    num_bags: int

    def sums(self, values: jax.Array, *, in_a_tree: bool) -> jax.Array:
        """The sum of each bag, `[num_bags, width]`, of the values of ids, `[n, width]`.

        Args:
          in_a_tree: as of `sums_of_runs`.
        """
        if self.bags is None:
            return jnp.where(self.rows[:, None] >= 0, values, 0)
        if in_a_tree:
            is_first = jnp.concatenate([jnp.ones(1, bool), self.bags[1:] != self.bags[:-1]])
            return sums_of_runs(values, is_first, self.bags, num=self.num_bags, in_a_tree=True)
        start = jnp.zeros((self.num_bags, values.shape[1]), values.dtype)
        return start.at[self.bags].add(values, mode="drop", indices_are_sorted=True)


def pooled(
    table: jax.Array, ids: BagIds, quantization: QuantizationConfig | None, *, dim: int, in_a_tree: bool
) -> jax.Array:
    """The vectors of all bags, `[num_bags, dim]`; zeros for an empty bag, and where weights cancel.

    Args:
      table: rows of `dim` columns, or lines of them.
    """
    vectors = rows_at(table, jnp.maximum(ids.rows, 0), dim, fill=0)
    if quantization is not None:
        vectors = _quantized(vectors, quantization)
    if ids.weights is not None:
        vectors = vectors * ids.weights[:, None]
    return _divided(ids.sums(vectors, in_a_tree=in_a_tree), ids, in_a_tree=in_a_tree)


def gradients_of_bags(gradients: jax.Array, ids: BagIds, *, in_a_tree: bool) -> jax.Array:
    """The gradient of each id of a bag, before its weight: `[num_bags, dim]` to the same."""
    return _divided(gradients, ids, in_a_tree=in_a_tree)


def gradients_of_ids(each: jax.Array, bags: jax.Array | None, weights: jax.Array | None) -> jax.Array:
    """`[num_bags, dim]` of `gradients_of_bags` to `[n, dim]`."""
    spread = each if bags is None else each[jnp.minimum(bags, each.shape[0] - 1)]
    return spread if weights is None else spread * weights[:, None]


def gains_of_ids(ids: BagIds) -> jax.Array:
    """What each id's row counts in its bag, float32 `[n]`: its weight by what the bag is divided by. 0 where that is 0.

    On TPUs alone, whose sums have an order.
    """
    amount = _denominators(ids, in_a_tree=False)
    divisor = jnp.where((amount == 0) | (ids.combiner == "sum"), 1, amount)
    shares = jnp.where(amount == 0, jnp.float32(0), 1 / divisor)
    return gradients_of_ids(shares[:, None], ids.bags, ids.weights)[:, 0]


def _divided(vectors: jax.Array, ids: BagIds, *, in_a_tree: bool) -> jax.Array:
    amount = _denominators(ids, in_a_tree=in_a_tree)[:, None]
    divided = vectors if ids.combiner == "sum" else vectors / jnp.where(amount == 0, 1, amount)
    return jnp.where(amount == 0, jnp.zeros_like(vectors), divided)


def _denominators(ids: BagIds, *, in_a_tree: bool) -> jax.Array:
    """What the sum over each bag is divided by, `[num_bags]`; 0 for an empty bag."""
    if ids.combiner == "sum" or ids.weights is None:
        parts = jnp.ones_like(ids.rows, jnp.float32)
    else:
        parts = ids.weights if ids.combiner == "mean" else ids.weights * ids.weights
    amount = ids.sums(parts[:, None], in_a_tree=in_a_tree)[:, 0]
    if ids.combiner == "sum":
        return (amount > 0).astype(jnp.float32)
    return jnp.sqrt(amount) if ids.combiner == "sqrtn" else amount


def _quantized(rows: jax.Array, config: QuantizationConfig) -> jax.Array:
    """As `QuantizationConfig.apply`."""
    lower, upper = jnp.float32(config.lower), jnp.float32(config.upper)
    step = jnp.float32((config.upper - config.lower) / (config.num_buckets - 1))
    return jnp.floor((jnp.clip(rows, lower, upper) - lower) / step + jnp.float32(0.5)) * step + lower
