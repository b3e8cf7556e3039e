"""Runs a Keras optimizer as a pure function: `as_optax`, and the compiled update of a step.

An optimizer written over variables becomes pure by letting its variables hold tracers for the length of one call and
collecting what they hold afterwards. This works for every subclass of `KerasOptimizer` whose state is in `Variable`s
reachable from its attributes. A plain Python number it changes in `update_step` would stand still. This module owns
that exchange and none of the formulas.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podembed.embedding.tf.keras.row_slices import RowSlices
from podembed.embedding.tf.keras.variable import Variable, bound
from podembed.embedding.tf.tracing import current_trace

if TYPE_CHECKING:
    from podembed.embedding.tf.keras.optimizer import KerasOptimizer
    from podembed.embedding.tf.keras.optimizer_variables import OptimizerVariables


class KerasState(NamedTuple):
    """State of an optimizer between two updates; arrays only, so any checkpoint of pytrees holds it."""

    iterations: jax.Array  # int32 [], steps applied
    # float32 [], rate of the last step, None if there is none. Replace it to change a fixed rate.
    learning_rate: jax.Array | None
    slots: tuple[jax.Array, ...]  # all other variables of the optimizer in the order `build` made them, averages first


def as_optax(optimizer: KerasOptimizer) -> optax.GradientTransformation:
    """Returns `optimizer` as an optax transformation that gives the same numbers as `apply_gradients`.

    It starts from the present hyperparameters and rate with fresh slots, and `optimizer` itself is never touched. The
    parameters are named by their path ("dense/kernel"). Clipping, schedules, averages and the order of a step are
    included; the sum over processes is
    not: under `jit` gradients of global arrays are sums already. After an overwrite by the average, the update leads to
    the average.

    Raises (from `init` and `update`): ValueError: `params` is missing, the state belongs to another optimizer, or the
      class makes slots and never sets `self._built`.
    """
    template = _unbuilt_twin(optimizer)

    def init(params: Any) -> KerasState:
        twin, _ = _built_twin(template, params)
        return _state_of(twin)

    def update(updates: Any, state: KerasState, params: Any = None) -> tuple[Any, KerasState]:
        if params is None:
            raise ValueError(
                "Found no params. Expected the parameters the gradients belong to. Call update(grads, state, params)."
            )
        twin, variables = _built_twin(template, params)
        _restore(twin, state)
        gradients = jax.tree.structure(params).flatten_up_to(updates)
        twin.apply_gradients(list(zip(gradients, variables, strict=True)), skip_gradients_aggregation=True)
        moved = [
            variable.value - jnp.asarray(before)
            for variable, before in zip(variables, jax.tree.leaves(params), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), moved), _state_of(twin)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def update_compiled(
    optimizer: KerasOptimizer, gradients: Sequence[jax.Array | RowSlices], variables: Sequence[Variable]
) -> None:
    """Calls `update_step` for all pairs inside one compiled program and stores the results.

    Hyperparameters that are plain numbers are constants of the program: a change after the first step has no effect.
    """
    program = optimizer._compiled_update
    if program is None:
        program = optimizer._compiled_update = jax.jit(_UpdateProgram(optimizer), static_argnums=0)
    own = own_variables(optimizer)
    keys = tuple(optimizer._var_key(one) for one in variables)
    moved, own_moved = program(keys, list(gradients), [one.value for one in variables], [one.value for one in own])
    for variable, value in zip([*variables, *own], [*moved, *own_moved], strict=True):
        if variable is not optimizer.iterations:
            variable.assign(value)


class _UpdateProgram:
    """The pure function that is compiled; its identity is the key of JAX's cache."""

    def __init__(self, optimizer: KerasOptimizer) -> None:
        self._optimizer = optimizer

    def __call__(
        self, keys: tuple[int, ...], gradients: list[Any], values: list[jax.Array], own_values: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        variables = [self._optimizer._model_variables[key] for key in keys]
        own = own_variables(self._optimizer)
        with bound(variables, values), bound(own, own_values):
            for gradient, variable in zip(gradients, variables, strict=True):
                self._optimizer._decay(variable)
                self._optimizer.update_step(gradient, variable)
            return [one.value for one in variables], [one.value for one in own]


def own_variables(optimizer: OptimizerVariables) -> list[Variable]:
    """All variables an optimizer holds in its attributes, in the order they were set, without the model's."""
    model = {id(one) for one in optimizer._model_variables.values()}
    found: dict[int, Variable] = {}
    for name, attribute in vars(optimizer).items():
        if name != "_before_build":
            _collect(attribute, found)
    return [one for key, one in found.items() if key not in model]


def attributes_of(optimizer: OptimizerVariables) -> dict[str, Any]:
    """A copy of the attributes as they are before `build`: variables and containers are copied, anything else is
    shared.
    """
    copies: dict[int, Variable] = {}
    return {name: _copied(value, copies) for name, value in vars(optimizer).items()}


def _unbuilt_twin(optimizer: KerasOptimizer) -> KerasOptimizer:
    """An optimizer with the present hyperparameters and rate, and none of the state since the first build."""
    start = optimizer._before_build or vars(optimizer)
    copies: dict[int, Variable] = {}
    twin = object.__new__(type(optimizer))
    for name, value in start.items():
        is_state = isinstance(value, (list, tuple, dict, set, Variable))
        vars(twin)[name] = _copied(value, copies) if is_state else vars(optimizer)[name]
    twin._built = False
    twin._trace = current_trace()
    twin._before_build = None
    twin._compiled_update = None
    twin.jit_compile = False
    if isinstance(twin._learning_rate, Variable):
        twin._learning_rate.assign(optimizer.learning_rate.value)
    twin._iterations = Variable(int(twin._iterations), trainable=False, name="iteration", dtype=np.int32)
    return twin


def _built_twin(template: KerasOptimizer, params: Any) -> tuple[KerasOptimizer, list[Variable]]:
    twin = _unbuilt_twin(template)
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    variables = [Variable(leaf, name=jax.tree_util.keystr(path, simple=True, separator="/")) for path, leaf in paths]
    num_before = len(twin._created)
    with twin._named_scope():
        twin.build(variables)
    num_slots = len(twin._created) - num_before - len(twin._averages)
    if num_slots and not twin._built:
        raise ValueError(
            f"Found {num_slots} slots made by build of {type(twin).__name__}, which is still not built. Expected "
            "`self._built` to be True after it, or its slots start anew in every step. End `build` with `self._built = "
            "True`, and return early if it is."
        )
    return twin, variables


def _named_parts(optimizer: KerasOptimizer) -> tuple[Variable, Variable | None, list[Variable]]:
    found = None if optimizer._learning_rate is None else optimizer.learning_rate
    rate = found if isinstance(found, Variable) else None
    rest = [one for one in own_variables(optimizer) if one is not optimizer.iterations and one is not rate]
    return optimizer.iterations, rate, rest


def _state_of(optimizer: KerasOptimizer) -> KerasState:
    iterations, rate, rest = _named_parts(optimizer)
    # As JAX arrays, so that counters of 64 bits look the same here as after a compiled update.
    return KerasState(
        iterations.value, None if rate is None else rate.value, tuple(jnp.asarray(one.value) for one in rest)
    )


def _restore(optimizer: KerasOptimizer, state: KerasState) -> None:
    iterations, rate, rest = _named_parts(optimizer)
    if len(rest) != len(state.slots) or (rate is None) != (state.learning_rate is None):
        raise ValueError(
            f"Found a state with {len(state.slots)} slots. Expected {len(rest)} for these parameters. "
            "Use the state that init of this transformation made for parameters of the same structure."
        )
    iterations.assign(state.iterations)
    if rate is not None:
        rate.assign(state.learning_rate)
    for variable, value in zip(rest, state.slots, strict=True):
        variable.assign(value)


def _collect(attribute: Any, found: dict[int, Variable]) -> None:
    if isinstance(attribute, Variable):
        found.setdefault(id(attribute), attribute)
    elif isinstance(attribute, (list, tuple, set)):
        for one in attribute:
            _collect(one, found)
    elif isinstance(attribute, dict):
        for one in attribute.values():
            _collect(one, found)


def _copied(value: Any, copies: dict[int, Variable]) -> Any:
    if isinstance(value, Variable):
        return copies.setdefault(id(value), value.clone())
    if isinstance(value, dict):
        # A copy keeps what a subclass has besides its items, such as the factory of a defaultdict.
        twin = copy.copy(value)
        twin.update((key, _copied(one, copies)) for key, one in value.items())
        return twin
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)(*(_copied(one, copies) for one in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)(_copied(one, copies) for one in value)
    return value
