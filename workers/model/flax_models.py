"""Models of flax: `FlaxModel` of a linen module, `NnxModel` of an nnx module.

The module is called with a batch and the context of the step. Batch normalization of flax takes `context.axis` as its
axis name. It counts padding like samples, so it is exact where every host has as many samples. `context.mean` is exact
everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed.embedding.features.column_shape import ColumnShape
from podembed.workers.declared_types import several
from podembed.workers.model.batch import ModelBatch, WithState
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.extras import check_create, framework

_PARAMS = "params"


@dataclass(frozen=True, slots=True)
class FlaxModel:
    """A module of `flax.linen` as a model.

    ```python
    model = FlaxModel(MyModule())  # its __call__(self, batch, context) returns scores, [n]
    ```

    Collections other than `params`, such as `batch_stats`, are the state of the model. Its modules may draw random
    numbers under any of the names in `rngs`.

    Args:
      module: not bound.
      loss: `loss(outputs, batch, context)`, as `podembed.Model` says; left out, that of the job.
      rngs: names under which modules ask for keys.
    """

    module: Any
    loss: Callable[..., Any] | None = None
    rngs: tuple[str, ...] = ("dropout",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rngs", several(self.rngs))

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        """First values, found by a call with a batch of zeros."""
        context = StepContext.alone(1, training=False)
        keys = {name: _named(key, name) for name in self.rngs}
        variables = dict(self.module.init({_PARAMS: key, **keys}, spec.example(), context))
        return WithState(variables.pop(_PARAMS, {}), variables)

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        """Calls the module."""
        keys = {name: _named(context.key, name) for name in self.rngs}
        variables = {_PARAMS: params, **context.state}
        mutable = list(context.state) if context.training else []
        outputs, after = self.module.apply(variables, batch, context, rngs=keys, mutable=mutable)
        return WithState(outputs, {**context.state, **after})


@dataclass(frozen=True, slots=True)
class NnxModel:
    """A module of `flax.nnx` as a model.

    ```python
    model = NnxModel(lambda rngs, spec: MyModule(spec.num_dense, rngs=rngs))
    ```

    Variables of type `nnx.Param` are parameters. All others are state, but for the keys of `nnx.Rngs`, which come from
    the step. The module is in `train()` or `eval()` mode when it is called with a batch and the context.

    Args:
      create: makes the module from `nnx.Rngs` and a `ModelSpec`.
      loss: `loss(outputs, batch, context)`, as `podembed.Model` says; left out, that of the job.
    """

    create: Callable[[Any, ModelSpec], Any]
    loss: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_create(self.create, adapter="NnxModel", arguments="rngs, spec")

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        """First values: the module's own."""
        nnx = framework("flax.nnx", extra="flax")

        _, params, _, state = self._parts(self.create(nnx.Rngs(key), spec))
        return WithState(nnx.to_pure_dict(params), nnx.to_pure_dict(state))

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        """Calls the module."""
        nnx = framework("flax.nnx", extra="flax")

        # Its values are not used, but for plain arrays. While flax traces, these are part of the graph, which is why
        # `nnx.eval_shape` refuses them.
        made = self.create(nnx.Rngs(0), spec_of(batch, context))
        graph, shaped_params, keys, shaped_state = self._parts(made)
        nnx.replace_by_pure_dict(shaped_params, params)
        nnx.replace_by_pure_dict(shaped_state, context.state)
        module = nnx.merge(graph, shaped_params, _keys_of_step(keys, context.key), shaped_state)
        module.train() if context.training else module.eval()
        outputs = module(batch, context)
        return WithState(outputs, nnx.to_pure_dict(self._parts(module)[3]))

    def _parts(self, module: Any) -> Any:
        nnx = framework("flax.nnx", extra="flax")

        return nnx.split(module, nnx.Param, nnx.RngState, ...)


def spec_of(batch: ModelBatch, context: StepContext) -> ModelSpec:
    """What the model of a batch was made with, as `workers.device.dense_half.model_spec` says it of a job."""
    padded = {name: batch.activations if name in batch.sequences else batch.columns for name in batch.lengths}
    return ModelSpec(
        num_dense=batch.dense.shape[1],
        activation_shapes={name: tuple(block.shape[1:]) for name, block in batch.activations.items()},
        batch_size=context.batch_size,
        label=next(iter(batch.labels), ""),
        labels=tuple(batch.labels),
        sequences={name: values[name].shape[1] for name, values in padded.items()},
        # Floating-point columns are float32, also where the model computes with less.
        columns={
            name: ColumnShape(
                tuple(values.shape[1:]),
                "float32" if jnp.issubdtype(values.dtype, jnp.floating) else str(values.dtype),
            )
            for name, values in batch.columns.items()
        },
        log_q=tuple(batch.log_q),
        log_frequency=tuple(batch.log_frequency),
    )


def _keys_of_step(keys: Any, key: jax.Array) -> Any:
    """The states of the streams of `nnx.Rngs`, begun anew with a key of the step for each."""
    nnx = framework("flax.nnx", extra="flax")

    def begun(path: Any, variable: Any) -> Any:
        if isinstance(variable, nnx.RngCount):
            return variable.replace(jnp.zeros((), jnp.uint32))
        return variable.replace(_named(key, "/".join(str(part) for part in path)))

    return nnx.map_state(begun, keys)


def _named(key: jax.Array, name: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(name.encode()))
