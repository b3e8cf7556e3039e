"""DLRM: a bottom MLP over the dense inputs, dot products of all pairs of vectors, a top MLP (Naumov et al. 2019,
arXiv:1906.00091).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from podembed.embedding.features.feature_order import FeatureOrder
from podembed.jobs.models.interaction import with_products
from podembed.jobs.models.layers import Layers, init_layers, linear, rectified


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRM:
    """All features must have one width, which is also the width of the bottom MLP's output.

    Attributes:
      bottom: hidden widths of the bottom MLP; its last layer, of the features' width, is added.
      top: hidden widths of the top MLP; its last layer, of width 1, is added.
      order: in which products of features are laid side by side.
    """

    bottom: tuple[int, ...] = (64, 32)
    top: tuple[int, ...] = (64, 32)
    order: FeatureOrder = field(default_factory=FeatureOrder, init=False, repr=False, compare=False)

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, Layers]:
        """Glorot-normal weights and small random biases.

        Raises:
          ValueError: the features differ in width.
        """
        if len(set(widths.values())) != 1:
            raise ValueError(
                f"Found features of widths {sorted(set(widths.values()))}. Expected one width for dot products. "
                f"Give every table the same dim."
            )
        self.order.tell(widths)
        (width,) = set(widths.values())
        vectors = len(widths) + 1
        bottom_key, top_key = jax.random.split(key)
        return {
            "bottom": init_layers(bottom_key, num_dense, (*self.bottom, width)),
            "top": init_layers(top_key, width + vectors * (vectors - 1) // 2, (*self.top, 1)),
        }

    def shardings(self, name: str, shape: tuple[int, ...]) -> PartitionSpec | None:
        """On a mesh with the axis `model`, every second layer is cut by its outputs, and the next one by its inputs. So
        no two devices need the other's activations in between. A last layer without a next one is whole.
        """
        mlp, layer, kind = name.split("/")
        num_layers = len(self.bottom if mlp == "bottom" else self.top) + 1
        if int(layer) % 2:
            return PartitionSpec("model") if kind == "weight" else None
        if int(layer) + 1 == num_layers:
            return None
        return PartitionSpec(None, "model") if kind == "weight" else PartitionSpec("model")

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        """Logits `[n]`."""
        bottom = rectified(params["bottom"], dense)
        *hidden, last = params["top"]
        return linear(last, rectified(hidden, with_products([bottom, *self.order.read(activations)])))[:, 0]
