"""DCN-V2: layers that cross all inputs with each other, then an MLP (Wang et al. 2021, "DCN V2", arXiv:2008.13535)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.features.feature_order import FeatureOrder
from podembed.jobs.models.layers import init_layers, linear, rectified


@dataclass(frozen=True, slots=True, kw_only=True)
class DCNv2:
    """The stacked form: the MLP reads what the last cross layer gives. Features may differ in width.

    Let x_0 be all inputs side by side. A cross layer is x_{l+1} = x_0 * (W x_l + b) + x_l, entry by entry (equation 1
    of the paper). So l layers reach products of l + 1 inputs.

    Attributes:
      cross_layers: how many.
      rank: None for a full W; else W = U V^T of this rank (equation 2), which has 2 · width · rank parameters instead
        of width².
      deep: hidden widths of the MLP; its last layer, of width 1, is added.
      order: in which features lie side by side.
    """

    cross_layers: int = 3
    rank: int | None = None
    deep: tuple[int, ...] = (64, 32)
    order: FeatureOrder = field(default_factory=FeatureOrder, init=False, repr=False, compare=False)

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, Any]:
        """Glorot-normal weights; biases of the cross layers are 0, so that they begin near the identity for small
        inputs.
        """
        self.order.tell(widths)
        width = num_dense + sum(widths.values())
        cross_key, deep_key = jax.random.split(key)
        return {
            "cross": [self._cross_layer(key, width) for key in jax.random.split(cross_key, self.cross_layers)],
            "deep": init_layers(deep_key, width, (*self.deep, 1)),
        }

    def _cross_layer(self, key: jax.Array, width: int) -> dict[str, jax.Array]:
        bias = jnp.zeros(width)
        if self.rank is None:
            return {"weight": jax.random.normal(key, (width, width)) * np.sqrt(1.0 / width), "bias": bias}
        first, second = jax.random.split(key)
        scale = np.sqrt(2.0 / (width + self.rank))
        return {
            "v": jax.random.normal(first, (width, self.rank)) * scale,
            "u": jax.random.normal(second, (self.rank, width)) * scale,
            "bias": bias,
        }

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        """Logits `[n]`."""
        inputs = crossed = jnp.concatenate([dense, *self.order.read(activations)], axis=1)
        for layer in params["cross"]:
            crossed = cross(layer, inputs, crossed)
        *hidden, last = params["deep"]
        return linear(last, rectified(hidden, crossed))[:, 0]


def cross(layer: Mapping[str, jax.Array], inputs: jax.Array, crossed: jax.Array) -> jax.Array:
    """One cross layer, `[n, width]`, of x_0 `inputs` and x_l `crossed`. Rows are samples, so W stands on the right,
    transposed.
    """
    product = crossed @ layer["weight"] if "weight" in layer else (crossed @ layer["v"]) @ layer["u"]
    return inputs * (product + layer["bias"]) + crossed
