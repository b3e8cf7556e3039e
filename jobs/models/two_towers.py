"""Two towers: one vector for the user, one for the item, and their dot product as the score.

The towers meet only in the product, so the vectors of all items can be computed ahead and searched when a user comes.
(Covington et al. 2016, "Deep Neural Networks for YouTube Recommendations".) A tower's vector is the sum of its features
plus what an MLP makes of them side by side. The sum is that of SVD++ (Koren 2008, "Factorization Meets the
Neighborhood"). From few samples it learns much faster than the MLP alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed.jobs.models.layers import Layers, init_layers, linear, rectified


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTowers:
    """All features must have one width, which is that of the vectors, too. Dense inputs are not read.

    Attributes:
      user, item: features of the two towers.
      hidden: hidden widths of each tower's MLP; its last layer, of the vectors' width, is added.
    """

    user: tuple[str, ...]
    item: tuple[str, ...]
    hidden: tuple[int, ...] = (64,)

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, Any]:
        """Layers of both towers, a bias of all scores, and a vector that gives each item its own bias.

        Raises:
          ValueError: a feature is in no tower, a tower has one that is not there, or features differ in width.
        """
        if sorted(widths) != sorted((*self.user, *self.item)):
            raise ValueError(
                f"Found features {list(widths)} for towers of {list(self.user)} and {list(self.item)}. Expected each "
                "in one tower. Name them in TwoTowers(user=..., item=...)."
            )
        if len(set(widths.values())) != 1:
            raise ValueError(
                f"Found features of widths {sorted(set(widths.values()))}. Expected one width. Give every table the "
                "same dim."
            )
        (width,) = set(widths.values())
        user_key, item_key = jax.random.split(key)
        return {
            "user": init_layers(user_key, width * len(self.user), (*self.hidden, width)),
            "item": init_layers(item_key, width * len(self.item), (*self.hidden, width)),
            "item_bias": jnp.zeros(width),
            "bias": jnp.zeros(()),
        }

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        """Logits `[n]`."""
        user = _tower(params["user"], [activations[name] for name in self.user])
        item = _tower(params["item"], [activations[name] for name in self.item])
        return jnp.sum(user * item, axis=1) + item @ params["item_bias"] + params["bias"]


def _tower(layers: Layers, inputs: list[jax.Array]) -> jax.Array:
    """`[n, width]`; the last layer has no rectifier."""
    *hidden, last = layers
    return sum(inputs, linear(last, rectified(hidden, jnp.concatenate(inputs, axis=1))))
