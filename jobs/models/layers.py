"""Dense layers: weights drawn, and applied with a rectifier between them. Dropout, and vectors brought to one size."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
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


def init_near_zero(key: jax.Array, width_in: int, width: int) -> dict[str, jax.Array]:
    """One layer of weights from N(0, 0.02²) and biases of 0, as of transformers: a block that begins with it adds
    little to what comes in.
    """
    return {"weight": 0.02 * jax.random.normal(key, (width_in, width)), "bias": jnp.zeros(width)}


def rectified(layers: Layers, inputs: jax.Array) -> jax.Array:
    """`[n, last width]`: all layers, each followed by a rectifier."""
    for layer in layers:
        inputs = jax.nn.relu(linear(layer, inputs))
    return inputs


def linear(layer: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """`[n, width]`: one layer alone."""
    return inputs @ layer["weight"] + layer["bias"]


def dropped(key: jax.Array, x: jax.Array, share: float) -> jax.Array:
    """`x` with this share of its numbers replaced by zeros, and the others larger by as much."""
    return x if not share else jnp.where(jax.random.bernoulli(key, 1 - share, x.shape), x / (1 - share), 0.0)


def standardized(x: jax.Array) -> jax.Array:
    """Vectors along the last axis with mean 0 and variance 1: a layer normalization without parameters."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)


def unit(x: jax.Array) -> jax.Array:
    """Vectors along the last axis with length 1; zeros stay zeros."""
    return x * jax.lax.rsqrt((x**2).sum(axis=-1, keepdims=True) + 1e-12)
