"""`Activations`: what a model reads, by feature, in one order everywhere.

JAX sorts the keys of a plain dict whenever it takes one apart, as `jit`, `grad`, `vmap` and `tree.map` do. A model that
reads such a dict in its order would be trained in one order and jitted in another. `Activations` is a pytree of its own
that keeps its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.tree_util import DictKey


class Activations(Mapping[str, Any]):
    """One array a feature, in the order of the features. Read-only; a JAX pytree whose structure holds the names and
    their order.

    ```python
    scores = jax.jit(model.apply)(params, dense, Activations(user=user_vectors, item=item_vectors))
    ```

    Args:
      values: a mapping or pairs, in the order of the features.
      named: more of them, after `values`.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **named: Any) -> None:
        self._values = {**dict(values), **named}

    def __getitem__(self, feature: str) -> Any:
        try:
            return self._values[feature]
        except KeyError:
            raise KeyError(
                f"Found no feature {feature!r} among the activations. Expected one of {list(self._values)}. Read one "
                "of these, or declare it in the job's features."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, feature: object) -> bool:
        return feature in self._values

    def __repr__(self) -> str:
        return f"Activations({self._values!r})"


def _flatten_with_keys(activations: Activations) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    return [(DictKey(name), value) for name, value in activations._values.items()], tuple(activations._values)


def _flatten(activations: Activations) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    return tuple(activations._values.values()), tuple(activations._values)


def _unflatten(features: tuple[str, ...], values: Iterable[Any]) -> Activations:
    return Activations(zip(features, values, strict=True))


jax.tree_util.register_pytree_with_keys(Activations, _flatten_with_keys, _unflatten, _flatten)
