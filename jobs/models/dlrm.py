"""DLRM: a bottom MLP over the dense inputs, dot products of all pairs of vectors, a top MLP (Naumov et al. 2019, arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jobs.models.interaction import with_products

Layers = list[dict[str, jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRM:
    """All features must have one width, which is also the width of the bottom MLP's output.

    Attributes:
      bottom: hidden widths of the bottom MLP; its last layer, of the features' width, is added.
      top: hidden widths of the top MLP; its last layer, of width 1, is added.
    """

    bottom: tuple[int, ...] = (64, 32)
    top: tuple[int, ...] = (64, 32)

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
        (width,) = set(widths.values())
        vectors = len(widths) + 1
        bottom_key, top_key = jax.random.split(key)
        return {
            "bottom": _layers(bottom_key, num_dense, (*self.bottom, width)),
            "top": _layers(top_key, width + vectors * (vectors - 1) // 2, (*self.top, 1)),
        }

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        """Logits `[n]`."""
        bottom = dense
        for layer in params["bottom"]:
            bottom = jax.nn.relu(bottom @ layer["weight"] + layer["bias"])
        top = with_products([bottom, *activations.values()])
        *hidden, last = params["top"]
        for layer in hidden:
            top = jax.nn.relu(top @ layer["weight"] + layer["bias"])
        return (top @ last["weight"] + last["bias"])[:, 0]


def _layers(key: jax.Array, width_in: int, widths: Sequence[int]) -> Layers:
    layers = []
    for width in widths:
        key, weight_key, bias_key = jax.random.split(key, 3)
        layers.append(
            {
                "weight": jax.random.normal(weight_key, (width_in, width)) * np.sqrt(2.0 / (width_in + width)),
                "bias": jax.random.normal(bias_key, (width,)) * np.sqrt(1.0 / width),
            }
        )
        width_in = width
    return layers
