"""First values of an optimizer's variables, from whatever says how they begin.

Names are those of `tf.keras.initializers`, with its defaults; the distributions are JAX's (`jax.nn.initializers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podembed.embedding.initializers import initializer_style, table_seed

_jax = jax.nn.initializers
_NAMED: dict[str, Callable[..., Any]] = {
    "random_normal": _jax.normal(0.05),
    "random_uniform": lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -0.05, 0.05),
    "truncated_normal": lambda key, shape, dtype: 0.05 * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype),
    "glorot_normal": _jax.glorot_normal(),
    "glorot_uniform": _jax.glorot_uniform(),
    "he_normal": _jax.he_normal(),
    "he_uniform": _jax.he_uniform(),
    "lecun_normal": _jax.lecun_normal(),
    "lecun_uniform": _jax.lecun_uniform(),
    "orthogonal": _jax.orthogonal(),
    # numpy's, since JAX's would warn about counters of 64 bits.
    "zeros": lambda key, shape, dtype: np.zeros(shape, dtype),
    "ones": lambda key, shape, dtype: np.ones(shape, dtype),
}
# The names of Keras' classes stand for the same.
_BY_NAME = _NAMED | {name.title().replace("_", ""): function for name, function in _NAMED.items()}


def initial_value_of(initializer: str | Callable[..., Any], shape: tuple[int, ...], dtype: np.dtype, name: str) -> Any:
    """The first value of a variable.

    Args:
      initializer: a name of Keras such as "glorot_uniform" or "GlorotUniform", one of `embedding.initializers`, or a
        function of (key, shape, dtype) as JAX's, or of (shape, dtype) as Keras'.
      name: of the variable, which decides random values.

    Raises:
      ValueError: an unknown name, or parameters of no such function.
    """
    if isinstance(initializer, str):
        if initializer not in _BY_NAME:
            raise ValueError(
                f"Found initializer '{initializer}'. Expected one of {sorted(_NAMED)}. Pass one of them or a function "
                "of (shape, dtype)."
            )
        return _BY_NAME[initializer](_key(name), shape, dtype)
    style = initializer_style(initializer, f"the variable '{name}'")
    if style == "key":
        return initializer(_key(name), shape, dtype)
    if style == "rows":
        # Of tables: rows and columns; a variable of another rank has its last axis as columns.
        num_rows = int(np.prod(shape[:-1], dtype=np.int64))
        values = initializer(np.arange(num_rows), shape[-1] if shape else 1, table_seed(0, name))
        return np.asarray(values).reshape(shape).astype(dtype)
    return initializer(shape, dtype)


def _key(name: str) -> jax.Array:
    return jax.random.key(table_seed(0, name) & 0x7FFFFFFF)
