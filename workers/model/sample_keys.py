"""Random keys that know which samples they are used for.

A key of JAX gives the numbers of an array by their places in it. A host has its share of a batch as one array. So with
such a key, dropout would depend on how samples are spread over hosts. The key of a step carries the position of each
sample in the global batch instead. An array whose first axis is that of the samples gets the numbers of each sample
from its position. Any other array gets those of a usual key. Dropout of any framework is therefore the same at any
number of hosts.

`split` and `fold_in` keep the positions. The numbers are those of Threefry (Salmon et al., Parallel random numbers: as
easy as 1, 2, 3, 2011), as for JAX's own keys.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry_prng_impl

_WORDS = math.prod(threefry_prng_impl.key_shape)


@cache
def _implementation(num_samples: int) -> Any:
    """Keys of Threefry, followed by the positions of so many samples."""

    def seed(value: jax.Array) -> jax.Array:
        return jnp.concatenate([threefry_prng_impl.seed(value), jnp.arange(num_samples, dtype=jnp.uint32)])

    def fold_in(key: jax.Array, value: Any) -> jax.Array:
        return jnp.concatenate([threefry_prng_impl.fold_in(key[:_WORDS], value), key[_WORDS:]])

    def split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        parts = threefry_prng_impl.split(key[:_WORDS], shape)
        positions = jnp.broadcast_to(key[_WORDS:], (*parts.shape[:-1], num_samples))
        return jnp.concatenate([parts, positions], axis=-1)

    def random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        if not shape or shape[0] != num_samples:
            return threefry_prng_impl.random_bits(key[:_WORDS], bit_width, shape)

        def of_sample(position: jax.Array) -> jax.Array:
            own = threefry_prng_impl.fold_in(key[:_WORDS], position)
            return threefry_prng_impl.random_bits(own, bit_width, tuple(shape[1:]))

        return jax.vmap(of_sample)(key[_WORDS:])

    return define_prng_impl(
        key_shape=(_WORDS + num_samples,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"samples_{num_samples}",
        tag="smp",
    )


def with_positions(key: jax.Array, positions: jax.Array) -> jax.Array:
    """A key of Threefry as one that knows its samples.

    Args:
      key: scalar, of JAX's default kind.
      positions: int `[n]`, of each sample in the global batch.
    """
    words = jnp.concatenate([jax.random.key_data(key), positions.astype(jnp.uint32)])
    return jax.random.wrap_key_data(words, impl=_implementation(positions.shape[0]))


def of_each(key: jax.Array, positions: jax.Array) -> jax.Array:
    """One usual key a sample, `[n]`, as functions need that are mapped over samples."""
    return jax.vmap(lambda position: jax.random.fold_in(key, position))(positions.astype(jnp.uint32))
