"""`EquinoxModel`: a module of equinox as a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed.workers.model.batch import ModelBatch, WithState
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.extras import check_create, framework


@dataclass(frozen=True, slots=True)
class EquinoxModel:
    """A module of equinox as a model.

    ```python
    model = EquinoxModel(lambda key, spec: MyModule(spec.num_dense, key=key))
    ```

    Its floating-point arrays are parameters, its other arrays are state. The module is called with a batch and the
    context of the step. Modules of equinox are written for one sample: map them with `jax.vmap`, and
    `context.sample_keys` are the keys of dropout. `create` may return the module and an `equinox.nn.State`, as
    `equinox.nn.make_with_state` does. The module is then called with that as a third argument, and returns outputs and
    state. In evaluations it is in `equinox.nn.inference_mode`.

    Args:
      create: makes the module from a key and a `ModelSpec`.
      loss: `loss(outputs, batch, context)`, as `podembed.Model` says; left out, that of the job.
    """

    create: Callable[[jax.Array, ModelSpec], Any]
    loss: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_create(self.create, adapter="EquinoxModel", arguments="key, spec")

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        """First values: the module's own."""
        eqx = framework("equinox", extra="equinox")

        module, kept = self._made(key, spec)
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        arrays = eqx.filter(rest, eqx.is_array)
        return WithState(_leaves(params), {"arrays": _leaves(arrays), "kept": _leaves(kept)})

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        """Calls the module."""
        eqx = framework("equinox", extra="equinox")

        from podembed.workers.model.flax_models import spec_of

        made, kept = eqx.filter_eval_shape(self._made, jax.random.key(0), spec_of(batch, context))
        shaped, rest = eqx.partition(made, _is_inexact)
        arrays, fixed = eqx.partition(rest, _is_shaped)
        module = eqx.combine(_filled(shaped, params), _filled(arrays, context.state["arrays"]), fixed)
        module = eqx.nn.inference_mode(module, value=not context.training)
        if kept is None:
            return WithState(module(batch, context), context.state)
        outputs, after = module(batch, context, _filled(kept, context.state["kept"]))
        return WithState(outputs, {**context.state, "kept": _leaves(after)})

    def _made(self, key: jax.Array, spec: ModelSpec) -> tuple[Any, Any]:
        made = self.create(key, spec)
        return made if isinstance(made, tuple) else (made, None)


def _is_shaped(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_inexact(leaf: Any) -> bool:
    return _is_shaped(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a module by their paths, as commits name them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _filled(tree: Any, values: dict[str, Any]) -> Any:
    """A module with these arrays in the places of its shapes."""

    def value(path: Any, leaf: Any) -> Any:
        return values[jax.tree_util.keystr(path, simple=True, separator=".")]

    return jax.tree_util.tree_map_with_path(value, tree)
