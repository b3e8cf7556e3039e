"""`as_optax`: the same numbers as `apply_gradients`, purity, state, own subclasses."""

from __future__ import annotations

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podembed.embedding.tf.keras.functional import KerasState
from podembed.embedding.tf.keras.keras_optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    Nadam,
    RMSprop,
)
from podembed.embedding.tf.keras.optimizer import KerasOptimizer
from podembed.embedding.tf.keras.row_slices import RowSlices
from podembed.embedding.tf.keras.schedules import CosineDecayRestarts, PiecewiseConstantDecay
from podembed.embedding.tf.keras.variable import Variable

PARAMS = {"dense": {"kernel": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2), "bias": np.zeros(2, np.float32)}}
PATHS = ["dense/bias", "dense/kernel"]


class Signed(KerasOptimizer):
    """Moves against the sign of an average gradient; slots from the model and one of its own made in the
    constructor.
    """

    def __init__(self, learning_rate=0.1, name="Signed", **kwargs):
        super().__init__(name, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.steps_seen = self.add_variable(None, name="steps_seen")
        self.averages = []

    def build(self, var_list):
        super().build(var_list)
        if hasattr(self, "_built") and self._built:
            return
        for variable in var_list:
            self.averages.append(self.add_variable_from_reference(variable, "average_gradient"))
        self._built = True

    def update_step(self, gradient, variable):
        average = self.averages[self._index_dict[self._var_key(variable)]]
        average.assign(0.5 * average + 0.5 * gradient)
        self.steps_seen.assign_add(0.5)
        variable.assign_sub(self.learning_rate * jnp.sign(average.value) * self.steps_seen)


def gradients_at(step):
    random = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), PARAMS)


def run_with_variables(optimizer, steps):
    variables = [Variable(leaf, name=name) for leaf, name in zip(jax.tree.leaves(PARAMS), PATHS, strict=True)]
    for step in range(steps):
        optimizer.apply_gradients(zip(jax.tree.leaves(gradients_at(step)), variables, strict=True))
    return [one.numpy() for one in variables]


def run_with_optax(transformation, steps, state=None, params=None, first=0):
    params = jax.tree.map(jnp.asarray, PARAMS) if params is None else params
    state = transformation.init(params) if state is None else state
    update = jax.jit(transformation.update)
    for step in range(first, first + steps):
        updates, state = update(gradients_at(step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


OPTIMIZERS = [
    lambda: SGD(0.1),
    lambda: SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
    lambda: Adagrad(0.1, global_clipnorm=0.5),
    lambda: Adadelta(1.0, clipvalue=0.3),
    lambda: Adam(0.1, amsgrad=True, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    lambda: AdamW(0.1, weight_decay=0.1),
    lambda: Adamax(0.1),
    lambda: Nadam(CosineDecayRestarts(0.1, 3)),
    lambda: RMSprop(0.1, momentum=0.5, use_ema=True),
    lambda: Ftrl(PiecewiseConstantDecay([1], [0.1, 0.05]), l1_regularization_strength=0.1, beta=0.1),
    lambda: Signed(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_same_numbers_as_with_variables(make):
    params, state = run_with_optax(make().as_optax(), steps=5)
    for leaf, expected in zip(jax.tree.leaves(params), run_with_variables(make(), steps=5), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
    assert state.iterations == 5


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_state_has_arrays_only_and_comes_from_parameters_alone(make):
    transformation = make().as_optax()
    state = transformation.init(PARAMS)
    assert isinstance(state, KerasState)
    assert all(isinstance(leaf, jax.Array) and not leaf.weak_type for leaf in jax.tree.leaves(state))
    assert (state.iterations.dtype, state.learning_rate.dtype) == (np.int32, np.float32)
    abstract = jax.eval_shape(transformation.init, PARAMS)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )
    _, after = transformation.update(gradients_at(0), state, PARAMS)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )


def test_a_run_cut_by_a_checkpoint_of_the_leaves_goes_on_bitwise():
    whole, _ = run_with_optax(Adam(0.1, use_ema=True, ema_overwrite_frequency=2).as_optax(), steps=5)
    params, state = run_with_optax(Adam(0.1, use_ema=True, ema_overwrite_frequency=2).as_optax(), steps=2)
    stored = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    fresh = Adam(0.1, use_ema=True, ema_overwrite_frequency=2).as_optax()
    structure = jax.tree.structure(jax.eval_shape(fresh.init, PARAMS))
    resumed, _ = run_with_optax(fresh, steps=3, state=jax.tree.unflatten(structure, stored), params=params, first=2)
    for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(left, right)


def test_overwriting_leads_to_the_average():
    transformation = SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3).as_optax()
    params = jnp.float32(2.0)
    state = transformation.init(params)
    seen = []
    for _ in range(3):
        updates, state = jax.jit(transformation.update)(jnp.float32(1.0), state, params)
        params = optax.apply_updates(params, updates)
        seen.append(float(params))
    assert seen == [1.0, 0.0, -0.125]


@pytest.mark.parametrize("is_used_before", [False, True])
def test_the_optimizer_and_its_transformation_do_not_touch_each_other(is_used_before):
    optimizer = Signed(0.1, use_ema=True)
    if is_used_before:
        run_with_variables(optimizer, steps=3)
    before = [one.numpy() for one in optimizer.variables]
    transformation = optimizer.as_optax()
    optimizer.learning_rate = 5.0
    params, state = run_with_optax(transformation, steps=3)
    optimizer.learning_rate = 0.1
    for one, expected in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(one.numpy(), expected)
    assert (int(state.iterations), len(optimizer.averages)) == (3, 2 * is_used_before)
    for leaf, expected in zip(
        jax.tree.leaves(params), run_with_variables(Signed(0.1, use_ema=True), steps=3), strict=True
    ):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)


def test_it_starts_with_the_hyperparameters_of_the_moment():
    optimizer = SGD(0.1)
    run_with_variables(optimizer, steps=2)
    optimizer.learning_rate, optimizer.clipvalue = 1.0, 0.5
    updates, state = optimizer.as_optax().update(
        jnp.float32(3.0), optimizer.as_optax().init(jnp.float32(0.0)), jnp.float32(0.0)
    )
    assert (float(updates), int(state.iterations)) == (-0.5, 1)


def test_iterations_set_before_the_first_step_are_where_it_starts():
    optimizer = SGD(PiecewiseConstantDecay([4], [1.0, 0.5]))
    optimizer.iterations = 5
    transformation = optimizer.as_optax()
    updates, state = transformation.update(jnp.float32(1.0), transformation.init(jnp.float32(0.0)), jnp.float32(0.0))
    assert (float(updates), int(state.iterations), float(state.learning_rate)) == (-0.5, 6, 0.5)


def test_a_fixed_rate_can_be_replaced_in_the_state():
    transformation = SGD(0.1).as_optax()
    state = transformation.init(jnp.float32(0.0))._replace(learning_rate=jnp.float32(2.0))
    updates, _ = transformation.update(jnp.float32(1.0), state, jnp.float32(0.0))
    assert float(updates) == -2.0


def test_parameters_are_named_by_their_paths():
    optimizer = AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias$"])
    params = {"dense": {"kernel": jnp.ones(1), "bias": jnp.ones(1)}}
    transformation = optimizer.as_optax()
    updates, _ = transformation.update(jax.tree.map(jnp.zeros_like, params), transformation.init(params), params)
    assert float(updates["dense"]["kernel"][0]) == pytest.approx(-0.05)
    assert float(updates["dense"]["bias"][0]) == 0.0
    optimizer.exclude_from_weight_decay(var_list=[Variable(1.0, name="w")])
    with pytest.raises(ValueError, match="var_names"):
        optimizer.as_optax()


def test_row_slices_pass_through_jit():
    transformation = Adagrad(0.5).as_optax()
    params = {"table": jnp.zeros((4, 2))}
    slices = {"table": RowSlices([3, 1, 3], np.ones((3, 2), np.float32), (4, 2))}
    dense = {"table": slices["table"].dense()}
    results = [jax.jit(transformation.update)(one, transformation.init(params), params) for one in (slices, dense)]
    for left, right in zip(*(jax.tree.leaves(one) for one in results), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)


def test_scanning_and_chaining():
    transformation = optax.chain(optax.scale(0.5), Adam(0.1).as_optax())
    params = jnp.ones(3)

    def step(carry, _):
        params, state = carry
        updates, state = transformation.update(params, state, params)
        return (optax.apply_updates(params, updates), state), params[0]

    (last, _), path = jax.lax.scan(step, (params, transformation.init(params)), length=4)
    assert (jnp.diff(path) < 0).all()
    assert last.shape == (3,)


class Pair(NamedTuple):
    slow: Variable
    fast: Variable


class Contained(KerasOptimizer):
    """Two slots per variable, made without `add_variable`, in a container of the given kind."""

    def __init__(self, container, name="Contained", **kwargs):
        super().__init__(name, **kwargs)
        self._learning_rate = self._build_learning_rate(0.1)
        self.slots = container()

    def build(self, var_list):
        super().build(var_list)
        if self._built:
            return
        for one in var_list:
            slow, fast = (Variable(jnp.zeros(one.shape), trainable=False) for _ in range(2))
            self.slots[self._var_key(one)] = Pair(slow, fast)
        self._built = True

    def update_step(self, gradient, variable):
        slow, fast = self.slots[self._var_key(variable)]
        fast.assign(0.5 * fast + gradient)
        slow.assign_add(0.1 * fast)
        variable.assign_sub(self.learning_rate * slow)


@pytest.mark.parametrize(
    "container",
    [dict, collections.OrderedDict, lambda: collections.defaultdict(lambda: Pair(Variable(0.0), Variable(0.0)))],
)
def test_slots_in_containers_of_other_kinds(container):
    optimizer = Contained(container)
    params, state = run_with_optax(optimizer.as_optax(), steps=4)
    for leaf, expected in zip(jax.tree.leaves(params), run_with_variables(Contained(container), steps=4), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
    assert (len(state.slots), len(optimizer.slots)) == (4, 0)


class Counting(KerasOptimizer):
    """Divides by how often it has updated, a counter of 64 bits."""

    def __init__(self, name="Counting", **kwargs):
        super().__init__(name, **kwargs)
        self.count = self.add_variable(None, np.int64, "zeros", "count")

    def update_step(self, gradient, variable):
        self.count.assign_add(1)
        variable.assign_sub(gradient / self.count)


def test_a_counter_of_64_bits_works_in_a_program_too():
    params, state = run_with_optax(Counting().as_optax(), steps=3)
    for leaf, expected in zip(jax.tree.leaves(params), run_with_variables(Counting(), steps=3), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
    assert (int(state.slots[0]), Counting().count.dtype) == (6, np.int64)
    assert jax.eval_shape(Counting().as_optax().init, PARAMS).slots[0].dtype == state.slots[0].dtype


def test_a_class_that_never_says_it_is_built_is_refused_if_it_has_slots():
    class Forgetful(KerasOptimizer):
        def build(self, var_list):
            super().build(var_list)
            self.slots = [self.add_variable_from_reference(one, "m") for one in var_list]

    with pytest.raises(ValueError, match=r"2 slots made by build of Forgetful.*self\._built = True"):
        Forgetful("forgetful", use_ema=True).as_optax().init(PARAMS)


def test_wrong_calls():
    transformation = Adam(0.1).as_optax()
    state = transformation.init(PARAMS)
    with pytest.raises(ValueError, match="no params"):
        transformation.update(gradients_at(0), state)
    with pytest.raises(ValueError, match=r"4 slots\. Expected 2"):
        transformation.update(jnp.ones(1), state, jnp.ones(1))


def test_an_optimizer_without_rate_has_none_in_its_state():
    class Plain(KerasOptimizer):
        def update_step(self, gradient, variable):
            variable.assign_sub(gradient)

    transformation = Plain("plain").as_optax()
    state = transformation.init(jnp.ones(2))
    assert (state.learning_rate, state.slots) == (None, ())
    updates, _ = transformation.update(jnp.ones(2), state, jnp.ones(2))
    np.testing.assert_array_equal(updates, [-1.0, -1.0])
