"""The leaves of a dense state by the keys under which checkpoints have them, such as `params/top/0/w`, and how each
lies on the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from podembed.workers.device.dense_half import DenseStateError, OtherPrecision
from podembed.workers.device.options import AXIS
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
            f"Found several parameters with the key {doubled[0]!r}. Expected one each, since checkpoints name them so. "
            "Leave '/' out of the names of the model's parameters."
        )
    return {key: leaf for key, (_, leaf) in zip(keys, leaves, strict=True)}


def replaced(
    state: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    parts: Collection[str] = DENSE_PARTS,
    put: Callable[[np.ndarray, Any], Any] = lambda values, leaf: jnp.asarray(values),
) -> Any:
    """A state with these arrays as its leaves. Keys, shapes and dtypes must be those of the state.

    Args:
      state: its parts by their names in `DENSE_PARTS`; arrays, or shapes alone.
      parts: what is replaced; the rest stays as it is.
      put: makes an array of JAX, for a leaf of the state.

    Raises:
      OtherPrecision: JAX works with 64 bits here and did not there, or the other way round.
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
            if found.shape == expected.shape and (remedy := _remedy_of_bits(found.dtype, expected.dtype)):
                raise OtherPrecision(
                    f"Found '{key}' as {found.dtype}{list(found.shape)} in the commit. Expected {expected.dtype}, as "
                    f"the job has it in this program. {remedy}"
                )
            raise DenseStateError(
                f"Found '{key}' as {found.dtype}{list(found.shape)}. Expected "
                f"{expected.dtype}{list(expected.shape)}, as in the job."
            )

    def value(key: str, leaf: Any) -> Any:
        if key not in known:
            return leaf
        array = put(arrays[key], leaf)
        return jax.random.wrap_key_data(array, impl=_kind_of_key(leaf)) if _is_random_key(leaf) else array

    return jax.tree_util.tree_unflatten(structure, [value(_key(path), leaf) for path, leaf in leaves])


def _remedy_of_bits(found: np.dtype, expected: np.dtype) -> str:
    """The remedy where two types differ as JAX_ENABLE_X64 makes them differ; else empty."""
    if found.kind != expected.kind or found.kind not in "fiu" or {found.itemsize, expected.itemsize} != {4, 8}:
        return ""
    is_wide = jnp.result_type(float) == np.float64
    if found.itemsize == 8 and not is_wide:
        return "The run was trained with 64 bits. Set JAX_ENABLE_X64=1 here and on all hosts, as it was there."
    if found.itemsize == 4 and is_wide:
        return "The run was trained without JAX_ENABLE_X64. Unset it here and on all hosts."
    return ""


def specs_of(model: Any, state: Mapping[str, Any], axes: Mapping[str, int]) -> dict[str, P]:
    """The cut of a dense state's leaves over the devices, by key; whole leaves are left out.

    What an optimizer keeps of a parameter, in its shape, lies as that does.

    Args:
      model: declares it as `shardings`, in the structure of the parameters or of a part of it. Or that is a function of
        the name and shape of a parameter.
      state: its parts by their names in `DENSE_PARTS`; shapes are enough.
      axes: axes of the mesh, but for that of the samples; without any all leaves are whole.

    Raises:
      DenseStateError: a spec names an axis that is not there, or does not fit its parameter.
    """
    declared = getattr(model, "shardings", None)
    if declared is None or not axes:
        return {}
    params = {key: leaf.shape for key, leaf in by_key(state["params"]).items()}
    specs = _declared(declared, state["params"])
    for name, spec in specs.items():
        _require_fit(name, params[name], spec, axes)
    found = {f"params/{name}": spec for name, spec in specs.items()}
    for key, leaf in by_key({"optimizer": state["optimizer"]}).items():
        # Of several names that end so, such as `w` and `top/w`, the longest is that of the parameter.
        names = [name for name, shape in params.items() if key.endswith(f"/{name}") and shape == leaf.shape]
        found[key] = specs[max(names, key=len)] if names else P()
    return {key: spec for key, spec in found.items() if any(spec)}


def _declared(declared: Any, params: Any) -> dict[str, P]:
    """The specs of all parameters, by name."""
    found: dict[str, Any]
    if callable(declared):
        found = {name: declared(name, leaf.shape) for name, leaf in by_key(params).items()}
    else:
        try:
            spread = jax.tree.map(
                lambda spec, below: jax.tree.map(lambda _: _Declared(spec), below), declared, params, is_leaf=_is_spec
            )
        except (ValueError, TypeError) as error:
            raise DenseStateError(
                f"Found shardings of the model in another structure than its parameters: {error}. Expected a "
                "PartitionSpec or None for each parameter, or for a whole part of them. Name all parts that the "
                "parameters have."
            ) from error
        found = {name: leaf.spec for name, leaf in by_key(spread).items()}
    for name, spec in found.items():
        if not _is_spec(spec):
            raise DenseStateError(
                f"Found {spec!r} as the sharding of the parameter {name!r}. Expected a jax.sharding.PartitionSpec, or "
                "None. Write PartitionSpec(None, 'model')."
            )
    return {name: P() if spec is None else spec for name, spec in found.items()}


@dataclass(frozen=True, slots=True)
class _Declared:
    """Keeps JAX from looking for leaves within a spec or None."""

    spec: Any


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, P)


def _require_fit(name: str, shape: tuple[int, ...], spec: P, axes: Mapping[str, int]) -> None:
    if len(spec) > len(shape):
        raise DenseStateError(
            f"Found the sharding {spec} of the parameter {name!r} of shape {list(shape)}. Expected at most "
            f"{len(shape)} entries, one a dimension. Leave the others out."
        )
    for at, entry in enumerate(spec):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in names:
            if axis not in axes:
                raise DenseStateError(
                    f"Found the axis {axis!r} in the sharding of the parameter {name!r}. Expected one of "
                    f"{sorted(axes)}, the axes of the mesh but for {AXIS!r}. Name one of them, or add {axis}=1 to the "
                    "mesh, which leaves parameters whole."
                )
        parts = math.prod(axes[axis] for axis in names)
        if shape[at] % parts:
            raise DenseStateError(
                f"Found dimension {at} of the parameter {name!r} of shape {list(shape)}, cut over "
                f"{' and '.join(names)} into {parts} parts. Expected a multiple of {parts}. Choose another width, or "
                "another mesh."
            )


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
