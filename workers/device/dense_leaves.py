"""The leaves of a dense state by the keys under which checkpoints have them, such as `params/top/0/w`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.workers.device.dense_half import DenseStateError
from podembed.workers.job.job import DENSE_PARTS


def by_key(state: Any) -> dict[str, Any]:
    """The leaves of a state.

    Raises:
      DenseStateError: two leaves have one key.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    keys = [_key(path) for path, _ in leaves]
    if len(set(keys)) != len(keys):
        doubled = sorted({key for key in keys if keys.count(key) > 1})
        raise DenseStateError(
            f"Found several parameters with the key {doubled[0]!r}. Expected one each, since checkpoints name them "
            "so. "
            f"Leave '/' out of the names of the model's parameters."
        )
    return {key: leaf for key, (_, leaf) in zip(keys, leaves, strict=True)}


def replaced(
    state: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    parts: Collection[str] = DENSE_PARTS,
    put: Callable[[np.ndarray], jax.Array] = jnp.asarray,
) -> Any:
    """A state with these arrays as its leaves. Keys, shapes and dtypes must be those of the state.

    Args:
      state: its parts by their names in `DENSE_PARTS`; arrays, or shapes alone.
      parts: what is replaced; the rest stays as it is.
      put: makes an array of JAX.

    Raises:
      DenseStateError: an array is missing, unknown, or has another shape or dtype.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(dict(state))
    known = {key: leaf for path, leaf in leaves if _part(key := _key(path)) in parts}
    if set(known) != set(arrays):
        unknown, missing = _few(set(arrays) - set(known)), _few(set(known) - set(arrays))
        found = f" {unknown} that the job does not have" if unknown else ""
        found += (", and" if unknown and missing else "") + (f" without {missing}" if missing else "")
        raise DenseStateError(f"Found dense arrays{found}. Expected those of the job.")
    # Parameters first: the optimizer's state only follows their shapes.
    for key in sorted(known, key=lambda key: DENSE_PARTS.index(_part(key))):
        found, expected = arrays[key], jax.eval_shape(numbers_of, known[key])
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise DenseStateError(
                f"Found '{key}' as {found.dtype}{list(found.shape)}. Expected "
                f"{expected.dtype}{list(expected.shape)}, as in the job."
            )

    def value(key: str, leaf: Any) -> Any:
        if key not in known:
            return leaf
        array = put(arrays[key])
        return jax.random.wrap_key_data(array, impl=_kind_of_key(leaf)) if _is_random_key(leaf) else array

    return jax.tree_util.tree_unflatten(structure, [value(_key(path), leaf) for path, leaf in leaves])


def numbers_of(leaf: Any) -> Any:
    """A leaf as checkpoints have it: a random key, such as that of `optax.add_noise`, as its numbers."""
    return jax.random.key_data(leaf) if _is_random_key(leaf) else leaf


def _part(key: str) -> str:
    return key.split("/", 1)[0]


def _few(keys: Collection[str]) -> str:
    """The first three of them, parameters before the optimizer's state; empty without any."""
    named = sorted(keys, key=lambda key: (DENSE_PARTS.index(_part(key)), key))
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return ", ".join(f"'{key}'" for key in named[:3]) + more


def _is_random_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind_of_key(leaf: Any) -> Any:
    # Also of a leaf that has no value yet.
    return jax.random.key_impl(jnp.empty((), leaf.dtype))


def _key(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
