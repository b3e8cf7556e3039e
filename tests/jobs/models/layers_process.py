"""Gradients of layers whose samples lie on four devices of the processor. Prints the name of each program that gathers
nothing, and ends with an error for one that does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podembed.jobs.models.layers import in_heads, linear_each, of_heads, product, standardized

NUM_SAMPLES, LONGEST, WIDTH = 64, 24, 16


def attention(layers: Any, x: jax.Array) -> jax.Array:
    q, k, v = (in_heads(one, 2) for one in linear_each(layers, standardized(x)))
    return of_heads(jnp.einsum("nhqk,nhkd->nhqd", jax.nn.softmax(jnp.einsum("nhqd,nhkd->nhqk", q, k)), v))


def require_no_gathering(function: Callable[..., jax.Array], whole: Any, spread: jax.Array) -> None:
    """Compiles the gradients by what lies whole on every device, and by what is spread by sample."""
    mesh = Mesh(np.asarray(jax.devices()), ("samples",))
    whole = jax.device_put(whole, NamedSharding(mesh, P()))
    spread = jax.device_put(spread, NamedSharding(mesh, P("samples")))
    gradients = jax.grad(lambda whole, spread: (function(whole, spread) ** 2).sum(), argnums=(0, 1))
    program = str(jax.jit(gradients).lower(whole, spread).compile().as_text())
    assert "all-reduce" in program, "The gradients of weights are sums over all devices."
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in program, collective


def main() -> None:
    assert len(jax.devices()) == 4
    weight, layer = jnp.ones((WIDTH, WIDTH)), {"weight": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)}
    multiplied = lambda weight, x: product(x, weight)  # noqa: E731
    require_no_gathering(multiplied, weight, jnp.ones((NUM_SAMPLES, LONGEST, WIDTH)))
    print("positions")
    require_no_gathering(multiplied, weight, jnp.ones((NUM_SAMPLES * LONGEST, WIDTH)))
    print("rows")
    require_no_gathering(attention, [layer] * 3, jnp.ones((NUM_SAMPLES, LONGEST, WIDTH)))
    print("attention")


if __name__ == "__main__":
    main()
