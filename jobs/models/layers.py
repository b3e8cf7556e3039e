"""Dense layers: weights drawn, and applied with a rectifier between them. Dropout, and vectors brought to one size.

A product of matrices is `product`: the same numbers everywhere up to rounding, and on CPUs in forms that XLA is fast at
(`benchmarks/products.py`). Layers that read the same inputs are one product, see `linear_each`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from podembed.workers.model.portable import is_portable

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
    return shifted(product(inputs, layer["weight"]), layer["bias"])


def linear_each(layers: Sequence[dict[str, jax.Array]], inputs: jax.Array) -> list[jax.Array]:
    """Per layer `[n, width]`. All of them read the inputs, so they are one product, and so is each of its gradients."""
    joined = {name: jnp.concatenate([layer[name] for layer in layers], axis=-1) for name in ("weight", "bias")}
    ends = np.cumsum([layer["bias"].shape[0] for layer in layers])[:-1]
    return jnp.split(linear(joined, inputs), ends.tolist(), axis=-1)


def product(inputs: jax.Array, weight: jax.Array) -> jax.Array:
    """`inputs @ weight`: `[n, ..., width_in]` times `[width_in, width]`. Has gradients in reverse mode alone."""
    return _product(*_of_one_type(inputs, weight))


def _of_one_type(*arrays: jax.Array) -> list[jax.Array]:
    dtype = jnp.result_type(*arrays)
    return [one.astype(dtype) for one in arrays]


@jax.custom_vjp
def _product(inputs: jax.Array, weight: jax.Array) -> jax.Array:
    return inputs @ weight


def _product_forward(inputs: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return inputs @ weight, (inputs, weight)


def _product_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    inputs, weight = kept
    width_in, width = weight.shape
    positions = math.prod(inputs.shape[1:-1])
    # Products of single samples that need no more room than what they are made of.
    is_cut = inputs.ndim > 2 and width_in * width <= positions * (width_in + width)
    is_narrow = weight.dtype == jnp.bfloat16 and not is_portable()
    on_cpu = _in_bfloat16 if is_narrow else _by_sample if is_cut else _at_once
    of_weight = jax.lax.platform_dependent(inputs, gradient, cpu=on_cpu, default=_at_once)
    # A contraction of last axes, and no transposed weight, which XLA's CPU would multiply as float32.
    of_inputs = jax.lax.dot_general(gradient, weight, (((gradient.ndim - 1,), (1,)), ((), ())))
    return of_inputs, of_weight


_product.defvjp(_product_forward, _product_backward)


def _at_once(x: jax.Array, g: jax.Array) -> jax.Array:
    """`[n, ..., width_in]` and `[n, ..., width]` → `[width_in, width]`: the gradient of a weight."""
    return x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])


def _in_bfloat16(x: jax.Array, g: jax.Array) -> jax.Array:
    """As `_at_once`, with the columns of `x` laid out as rows beforehand. XLA's CPU multiplies bfloat16 as such if both
    operands lie row by row, and turns others into float32. It tells by the layout before optimization, so what was laid
    out must come as another shape, here that of a batch of one.
    """
    x, g = (one.reshape(-1, one.shape[-1]) for one in (x, g))
    columns = jax.lax.optimization_barrier(jnp.copy(x.T)[None])
    return jax.lax.dot_general(columns, g[None], (((2,), (1,)), ((0,), (0,))))[0]


def _by_sample(x: jax.Array, g: jax.Array) -> jax.Array:
    """As `_at_once`, where XLA's CPU reads the columns of one long matrix at half the speed of many short ones. Samples
    may lie on several devices, so they are what the rows are cut by.
    """
    positions = math.prod(x.shape[1:-1])
    x, g = (one.reshape(one.shape[0], positions, one.shape[-1]) for one in (x, g))
    parts = jnp.einsum("nlk,nlw->nkw", x, g, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
    return parts.sum(axis=0).astype(x.dtype)


def shifted(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x + bias`. The gradient adds up bfloat16 as float32: closer, and faster on XLA's CPU."""
    return _shifted(*_of_one_type(x, bias))


@jax.custom_vjp
def _shifted(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + bias


def _shifted_backward(bias: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = gradient.reshape(-1, len(bias))
    return gradient, rows.sum(axis=0, dtype=jnp.promote_types(rows.dtype, jnp.float32)).astype(bias.dtype)


_shifted.defvjp(lambda x, bias: (x + bias, bias), _shifted_backward)


def in_heads(x: jax.Array, heads: int) -> jax.Array:
    """`[n, positions, width]` → `[n, heads, positions, width / heads]`, or as it is for one head.

    With heads first the products over positions need no transposed copy. XLA's CPU is slow at an axis of one head.
    """
    return x if heads == 1 else x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def of_heads(x: jax.Array) -> jax.Array:
    """What `in_heads` returned, as `[n, positions, width]`."""
    return x if x.ndim == 3 else x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def dropped(key: jax.Array, x: jax.Array, share: float) -> jax.Array:
    """`x` with this share of its numbers replaced by zeros, and the others larger by as much."""
    if not share:
        return x
    return jnp.where(kept_in_dropout(key, x.shape, share), x / (1 - share), 0.0)


def kept_in_dropout(key: jax.Array, shape: Sequence[int], share: float) -> jax.Array:
    """bool of this shape: True but for a share. The barrier keeps XLA from computing it again in the backward pass."""
    return jax.lax.optimization_barrier(jax.random.bernoulli(key, 1 - share, shape))


def standardized(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Vectors along the last axis with mean 0 and variance 1: a layer normalization without parameters."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)


def unit(x: jax.Array) -> jax.Array:
    """Vectors along the last axis with length 1; zeros stay zeros."""
    return x * jax.lax.rsqrt((x**2).sum(axis=-1, keepdims=True) + 1e-12)
