"""Dense layers: weights drawn, and applied with a rectifier between them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

Layers = list[dict[str, jax.Array]]


def init_layers(key: jax.Array, width_in: int, widths: Sequence[int]) -> Layers:
    """Glorot-normal weights and small random biases of layers of these widths, one after the other."""
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


def rectified(layers: Layers, inputs: jax.Array) -> jax.Array:
    """`[n, last width]`: all layers, each followed by a rectifier."""
    for layer in layers:
        inputs = jax.nn.relu(linear(layer, inputs))
    return inputs


def linear(layer: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """`[n, width]`: one layer alone."""
    return inputs @ layer["weight"] + layer["bias"]
