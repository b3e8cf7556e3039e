"""Update rules through `Table.update`: the same bits as numpy, the formulas in float64 by hand, every option, and
custom rules.
"""

import math
import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import Uniform
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Lion,
    Momentum,
    RowWiseAdagrad,
    SlotSpec,
    learning_rate_at,
)
from podembed.embedding.row_optimizers.custom import custom_rule
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from tests.embedding import reference
from tests.long_tests import VARIABLE, examples, is_long, long_case

NUM_ROWS = 12
RATE = 0.05
RULES = {
    "sgd": SGD(),
    "adagrad": Adagrad(),
    "adagrad epsilon": Adagrad(initial_accumulator_value=0.0, epsilon=1e-3),
    "row-wise": RowWiseAdagrad(),
    "row-wise started": RowWiseAdagrad(initial_accumulator_value=0.3, epsilon=0.0),
    "momentum": AdagradMomentum(momentum=0.9),
    "momentum nesterov": AdagradMomentum(momentum=0.9, use_nesterov=True, epsilon=1e-3),
    "momentum decaying": AdagradMomentum(momentum=0.5, beta2=0.9, epsilon=1e-6),
    "momentum exponent": AdagradMomentum(momentum=0.5, exponent=3, epsilon=1e-2),
    "ftrl": FTRL(),
    "ftrl all": FTRL(l1_regularization_strength=0.3, l2_regularization_strength=0.2, beta=0.5),
    "ftrl power": FTRL(learning_rate_power=-0.7, l1_regularization_strength=0.1),
    "ftrl times rate": FTRL(
        l1_regularization_strength=0.3, l2_regularization_strength=0.2, beta=0.5, multiply_linear_by_learning_rate=True
    ),
    "ftrl times rate power": FTRL(learning_rate_power=-0.7, multiply_linear_by_learning_rate=True),
    "heavy ball": Momentum(),
    "heavy ball nesterov": Momentum(momentum=0.6, use_nesterov=True),
    "lion": Lion(),
    "lion betas": Lion(beta_1=0.0, beta_2=0.5),
    "adam": Adam(),
    "adam outside": Adam(sum_inside_sqrt=False, epsilon=1e-3),
    "adam all rows": Adam(lazy_adam=False, beta_1=0.5, beta_2=0.9),
    "adam l2": Adam(beta_1=0.5, l2=0.3),
    "adam l2 all rows": Adam(lazy_adam=False, beta_1=0.5, beta_2=0.9, l2=0.3),
}
OPTIONS = {
    "plain": {},
    "clip gradient": {"clipvalue": 0.4},
    "clip gradient above": {"clipvalue": (None, 0.2)},
    "decay": {"weight_decay_factor": 0.1},
    "decay times rate": {"weight_decay_factor": 0.5, "multiply_weight_decay_factor_by_learning_rate": True},
    "clip weight": {"clip_weight_min": -0.3, "clip_weight_max": 0.35},
    "clip weight below": {"clip_weight_min": 0.0},
    "everything": {"clipvalue": 0.5, "weight_decay_factor": 0.1, "clip_weight_min": -0.3, "clip_weight_max": 0.3},
    "one by one": {"use_gradient_accumulation": False, "weight_decay_factor": 0.1, "clip_weight_max": 0.3},
}
# Each is compiled for itself.
WIDTHS = [1, 3, 17, 64, 256] if VARIABLE in os.environ else [3, 256]
USES_POWERS = {"momentum exponent", "ftrl power", "ftrl times rate power"}


def make_table(optimizer, dim=8, num_rows=NUM_ROWS):
    config = TableConfig(num_rows, dim, Uniform(-0.5, 0.5), optimizer, name="t")
    table = Table(TableSpec.of(config, seed=0), np.array([0]))
    table.initialize()
    return table


def a_step(rng, num_rows, dim, count):
    return rng.integers(0, num_rows, count), rng.standard_normal((count, dim)).astype(np.float32)


def with_options(rule, option):
    optimizer = RULES[rule]
    if option == "one by one" and optimizer.touches_all_rows:
        pytest.skip("every row takes exactly one step")
    return replace(optimizer, **OPTIONS[option])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_same_bits_as_numpy(rule, option):
    optimizer = with_options(rule, option)
    table = make_table(optimizer)
    rows, slots = table.rows.copy(), {name: slot.copy() for name, slot in table.slots.items()}
    rng = np.random.default_rng(1)
    for _ in range(3):
        local_rows, gradients = a_step(rng, NUM_ROWS, 8, 9)
        table.update(local_rows, gradients, RATE)
        reference.update(optimizer, rows, slots, local_rows, gradients, RATE)
    # Powers come from two libraries that may differ in the last bit.
    same = np.array_equal if rule not in USES_POWERS else lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert same(table.rows, rows)
    for name, slot in slots.items():
        assert same(table.slots[name], slot)


@given(dim=st.sampled_from(WIDTHS), rule=st.sampled_from(["sgd", "row-wise", "adam", "lion"]), data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_same_bits_as_numpy_at_every_width(dim, rule, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table = make_table(RULES[rule], dim)
    rows, slots = table.rows.copy(), {name: slot.copy() for name, slot in table.slots.items()}
    local_rows, gradients = a_step(rng, NUM_ROWS, dim, data.draw(st.integers(0, 20)))
    table.update(local_rows, gradients, RATE)
    reference.update(RULES[rule], rows, slots, local_rows, gradients, RATE)
    assert np.array_equal(table.rows, rows)
    assert all(np.array_equal(table.slots[name], slot) for name, slot in slots.items())


# The formulas again, one number at a time in Python's float64, written from the specification and not from the kernels.


def by_hand_adagrad(o, w, s, g, lr):
    s["accumulator"] += g * g
    return w - lr * g / (math.sqrt(s["accumulator"]) + o.epsilon)


def by_hand_momentum(o, w, s, g, lr):
    s["accumulator"] = s["accumulator"] + g * g if o.beta2 == 1 else o.beta2 * s["accumulator"] + (1 - o.beta2) * g * g
    scaled = g * (s["accumulator"] + o.epsilon) ** (-1 / o.exponent)
    s["momentum"] = o.momentum * s["momentum"] + scaled
    return w - lr * (o.momentum * s["momentum"] + scaled if o.use_nesterov else s["momentum"])


def by_hand_adam(o, w, s, g, lr):
    g += o.l2 * w
    s["momentum"] = o.beta_1 * s["momentum"] + (1 - o.beta_1) * g
    s["velocity"] = o.beta_2 * s["velocity"] + (1 - o.beta_2) * g * g
    inside = math.sqrt(s["velocity"] + o.epsilon**2)
    return w - lr * s["momentum"] / (inside if o.sum_inside_sqrt else math.sqrt(s["velocity"]) + o.epsilon)


def by_hand_heavy_ball(o, w, s, g, lr):
    s["momentum"] = o.momentum * s["momentum"] + g
    return w - lr * (o.momentum * s["momentum"] + g if o.use_nesterov else s["momentum"])


def by_hand_lion(o, w, s, g, lr):
    direction = o.beta_1 * s["momentum"] + (1 - o.beta_1) * g
    s["momentum"] = o.beta_2 * s["momentum"] + (1 - o.beta_2) * g
    return w - lr * ((direction > 0) - (direction < 0))


def by_hand_ftrl(o, w, s, g, lr):
    p, l1, l2 = -o.learning_rate_power, o.l1_regularization_strength, o.l2_regularization_strength
    old, s["accumulator"] = s["accumulator"], s["accumulator"] + g * g
    change = s["accumulator"] ** p - old**p
    if o.multiply_linear_by_learning_rate:
        z = s["linear"] = s["linear"] + lr * g - change * w
        return (min(max(z, -lr * l1), lr * l1) - z) / (s["accumulator"] ** p + o.beta + 2 * lr * l2)
    z = s["linear"] = s["linear"] + g - change * w / lr
    return (min(max(z, -l1), l1) - z) / ((s["accumulator"] ** p + o.beta) / lr + 2 * l2)


BY_HAND = {
    SGD: lambda o, w, s, g, lr: w - lr * g,
    Adagrad: by_hand_adagrad,
    AdagradMomentum: by_hand_momentum,
    FTRL: by_hand_ftrl,
    Adam: by_hand_adam,
    Momentum: by_hand_heavy_ball,
    Lion: by_hand_lion,
}


def step_by_hand(optimizer, rows, slots, local_rows, gradients):
    if optimizer.use_gradient_accumulation:
        touched = range(len(rows)) if optimizer.touches_all_rows else sorted(set(local_rows.tolist()))
        work = [(row, gradients[local_rows == row].astype(np.float64).sum(axis=0)) for row in touched]
    else:
        work = [(row, gradient.astype(np.float64)) for row, gradient in zip(local_rows, gradients, strict=True)]
    decay = optimizer.weight_decay_factor or 0.0
    decay *= RATE if optimizer.multiply_weight_decay_factor_by_learning_rate else 1.0
    for row, g in work:
        low, high = optimizer.clip_gradient_min, optimizer.clip_gradient_max
        g = np.clip(g, -math.inf if low is None else low, math.inf if high is None else high)
        w = rows[row] - decay * rows[row]
        rows[row] = np.array(rule_by_hand(optimizer, w, slots, row, g))
        low, high = optimizer.clip_weight_min, optimizer.clip_weight_max
        rows[row] = np.clip(rows[row], -math.inf if low is None else low, math.inf if high is None else high)


def rule_by_hand(optimizer, w, slots, row, g):
    if isinstance(optimizer, RowWiseAdagrad):
        slots["accumulator"][row] += (g * g).mean()
        return w - RATE * g / (math.sqrt(slots["accumulator"][row, 0]) + optimizer.epsilon)
    new = []
    for column in range(len(w)):
        state = {name: float(slot[row, column]) for name, slot in slots.items()}
        new.append(BY_HAND[type(optimizer)](optimizer, float(w[column]), state, float(g[column]), RATE))
        for name, value in state.items():
            slots[name][row, column] = value
    return new


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_five_steps_stay_within_rounding_of_float64(rule, option):
    optimizer = with_options(rule, option)
    table = make_table(optimizer)
    rows = table.rows.astype(np.float64)
    slots = {name: slot.astype(np.float64) for name, slot in table.slots.items()}
    rng = np.random.default_rng(2)
    for _ in range(5):
        local_rows, gradients = a_step(rng, NUM_ROWS, 8, 14)
        table.update(local_rows, gradients, RATE)
        step_by_hand(optimizer, rows, slots, local_rows, gradients)
    assert np.abs(table.rows - rows).max() <= 3e-5 * np.abs(rows).max()
    for name, slot in slots.items():
        assert np.abs(table.slots[name] - slot).max() <= 3e-5 * max(np.abs(slot).max(), 1e-30)
    assert np.isfinite(table.rows).all()


def test_zero_gradients_on_touched_rows():
    """What a zero gradient does is part of each formula; of FTRL it loses the initial value of a fresh row."""
    moved = {}
    for rule in RULES:
        table = make_table(RULES[rule])
        before = table.rows.copy()
        table.update(np.array([3]), np.ones((1, 8), np.float32), RATE)
        after_one = table.rows.copy()
        table.update(np.array([3, 4]), np.zeros((2, 8), np.float32), RATE)
        moved[rule] = (not np.array_equal(table.rows[3], after_one[3]), not np.array_equal(table.rows[4], before[4]))
        untouched = [row for row in range(NUM_ROWS) if row not in (3, 4)]
        is_still = np.array_equal(table.rows[untouched], before[untouched])
        assert is_still == (rule != "adam l2 all rows"), "a penalty on all rows moves them"
    assert moved["sgd"] == moved["adagrad"] == moved["row-wise"] == (False, False)
    assert moved["adam"] == moved["adam all rows"] == (True, False)
    assert moved["momentum"] == moved["heavy ball"] == moved["lion"] == (True, False)
    assert moved["ftrl"][1]
    table = make_table(FTRL())
    table.update(np.array([4]), np.zeros((1, 8), np.float32), RATE)
    assert not table.rows[4].any()


def test_non_lazy_adam_moves_rows_that_nobody_named():
    table = make_table(Adam(lazy_adam=False))
    table.update(np.array([2]), np.ones((1, 8), np.float32), RATE)
    before = table.rows.copy()
    table.update(np.empty(0, np.int64), np.empty((0, 8), np.float32), RATE)
    assert (table.rows[2] != before[2]).all()
    assert np.array_equal(np.delete(table.rows, 2, axis=0), np.delete(before, 2, axis=0))


@pytest.mark.parametrize("rate", [0.05, optax.linear_schedule(0.1, 0.01, 4)])
def test_corrected_adam_is_that_of_optax_also_on_rows_that_nobody_named(rate):
    rng = np.random.default_rng(0)
    rule, theirs = Adam.corrected(rate, 0.8, 0.9), optax.adam(rate, 0.8, 0.9)
    assert rule == Adam.corrected(rate, 0.8, 0.9)
    table = make_table(rule, 3)
    weights = jnp.asarray(table.rows)
    state = theirs.init(weights)
    for step in range(6):
        gradient = np.zeros((NUM_ROWS, 3), np.float32)
        named = rng.permutation(NUM_ROWS)[:5]
        gradient[named] = rng.normal(size=(5, 3))
        table.update(named, gradient[named], learning_rate_at(rule.learning_rate, step))
        updates, state = theirs.update(jnp.asarray(gradient), state, weights)
        weights = optax.apply_updates(weights, updates)
        np.testing.assert_allclose(table.rows, np.asarray(weights), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Momentum(RATE, 0.8), optax.sgd(RATE, 0.8)),
        (Momentum(RATE, 0.8, use_nesterov=True), optax.sgd(RATE, 0.8, nesterov=True)),
        (Lion(RATE, 0.8, 0.95), optax.lion(RATE, 0.8, 0.95, weight_decay=0.0)),
        (
            Lion(RATE, weight_decay_factor=0.3, multiply_weight_decay_factor_by_learning_rate=True),
            optax.lion(RATE, weight_decay=0.3),
        ),
    ],
    ids=["heavy ball", "nesterov", "lion", "lion with decay"],
)
def test_momentum_and_lion_are_those_of_optax_while_every_row_is_named(ours, theirs):
    rng = np.random.default_rng(0)
    table = make_table(ours, 3)
    weights = jnp.asarray(table.rows)
    state = theirs.init(weights)
    for _ in range(8):
        gradient, order = rng.standard_normal((NUM_ROWS, 3)).astype(np.float32), rng.permutation(NUM_ROWS)
        table.update(order, gradient[order], RATE)
        updates, state = theirs.update(jnp.asarray(gradient), state, weights)
        weights = optax.apply_updates(weights, updates)
        np.testing.assert_allclose(table.rows, np.asarray(weights), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [Momentum(RATE), Lion(RATE)], ids=["momentum", "lion"])
def test_the_momentum_of_a_row_stands_still_while_no_batch_names_it(rule):
    """Lazy: the dense rule would let it decay, and go on moving the row by it."""
    table, other = make_table(rule, 3), make_table(rule, 3)
    ones, two, five = np.ones((1, 3), np.float32), np.array([2]), np.array([5])
    table.update(two, ones, RATE)
    row, momentum = table.rows[2].copy(), table.slots["momentum"][2].copy()
    assert momentum.all()
    for _ in range(3):
        table.update(five, ones, RATE)
    assert np.array_equal(table.rows[2], row)
    assert np.array_equal(table.slots["momentum"][2], momentum)
    table.update(two, ones, RATE)
    other.update(two, ones, RATE)
    other.update(two, ones, RATE)
    assert np.array_equal(table.rows[2], other.rows[2])


def test_the_sign_of_lion_is_exact_for_the_smallest_and_largest_numbers():
    """Also below the smallest normal float32, for infinities, zeros of both signs and what is not a number."""
    smallest, largest = np.float32(1e-45), np.finfo(np.float32).max
    gradient = np.array([[smallest, -smallest, 1e-38, -1e-38, 0.0, -0.0, largest, -np.inf, np.nan]], np.float32)
    table = make_table(Lion(1.0, beta_1=0.0), 9)
    before = table.rows[3].copy()
    table.update(np.array([3]), gradient, 1.0)
    np.testing.assert_array_equal(before - table.rows[3], before - (before - np.sign(gradient[0])))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"l2": 0.2}, optax.chain(optax.add_decayed_weights(0.2), optax.adam(0.05, 0.8, 0.9))),
        ({"weight_decay_factor": 0.05 * 0.2}, optax.adamw(0.05, 0.8, 0.9, weight_decay=0.2)),
    ],
)
@pytest.mark.parametrize("lazy_adam", [False, True])
def test_penalties_on_all_rows_are_those_of_optax_on_the_whole_table(ours, theirs, lazy_adam):
    """In the gradient, which is torch's Adam(weight_decay=...), and decoupled, AdamW. Lazy ones leave rows alone."""
    rng = np.random.default_rng(0)
    rule = Adam.corrected(0.05, 0.8, 0.9, lazy_adam=lazy_adam, **ours)
    table = make_table(rule, 3)
    first = table.rows.copy()
    weights = jnp.asarray(first)
    state = theirs.init(weights)
    for step in range(6):
        gradient = np.zeros((NUM_ROWS, 3), np.float32)
        named = rng.permutation(NUM_ROWS // 2)[:5]
        gradient[named] = rng.normal(size=(5, 3))
        table.update(named, gradient[named], learning_rate_at(rule.learning_rate, step))
        updates, state = theirs.update(jnp.asarray(gradient), state, weights)
        weights = optax.apply_updates(weights, updates)
        if not lazy_adam:
            np.testing.assert_allclose(table.rows, np.asarray(weights), rtol=2e-5, atol=1e-6)
    is_still = np.array_equal(table.rows[NUM_ROWS // 2 :], first[NUM_ROWS // 2 :])
    assert is_still == lazy_adam


def penalized_adagrad(gradient, row, slots, learning_rate, hyperparameters):
    gradient = gradient + hyperparameters.l2 * row
    accumulator = slots[0] + gradient * gradient
    return row - learning_rate * gradient / np.sqrt(accumulator), (accumulator,)


@pytest.mark.parametrize(
    "rule",
    [
        SGD(RATE, weight_decay_factor=0.2, multiply_weight_decay_factor_by_learning_rate=True),
        # numba needs seconds for a new rule.
        pytest.param(
            CustomRowOptimizer(
                penalized_adagrad,
                slots=(SlotSpec(name="accumulator", width="element", initial_value=0.1),),
                hyperparameters={"l2": 0.2},
            ),
            marks=is_long,
        ),
    ],
    ids=["SGD", "Adagrad"],
)
def test_l2_in_the_gradient_of_the_rows_of_a_batch_as_the_docs_say_it(rule):
    """For rules without such a penalty of their own. Other rows stand still."""
    rng = np.random.default_rng(0)
    table = make_table(rule, 3)
    weights, accumulators = table.rows.astype(np.float64), np.full((NUM_ROWS, 3), 0.1)
    for _ in range(4):
        named, gradient = rng.permutation(NUM_ROWS)[:5], rng.normal(size=(5, 3)).astype(np.float32)
        table.update(named, gradient, RATE)
        penalized = gradient + 0.2 * weights[named]
        accumulators[named] += penalized**2
        weights[named] -= RATE * penalized / (1.0 if isinstance(rule, SGD) else np.sqrt(accumulators[named]))
        np.testing.assert_allclose(table.rows, weights, rtol=2e-5, atol=1e-6)


def test_ftrl_times_rate_equals_the_first_form_at_a_constant_rate_and_survives_rate_zero():
    first, second = make_table(FTRL()), make_table(FTRL(multiply_linear_by_learning_rate=True))
    rng = np.random.default_rng(3)
    for _ in range(4):
        local_rows, gradients = a_step(rng, NUM_ROWS, 8, 6)
        first.update(local_rows, gradients, RATE)
        second.update(local_rows, gradients, RATE)
    assert np.allclose(first.rows, second.rows, rtol=1e-4, atol=1e-6)
    second.update(local_rows, gradients, 0.0)
    assert np.isfinite(second.rows).all()


def test_a_gradient_that_is_not_a_number_is_not_hidden_by_limits():
    table = make_table(SGD(clipvalue=1.0, clip_weight_min=-1.0, clip_weight_max=1.0))
    table.update(np.array([1]), np.full((1, 8), np.nan, np.float32), RATE)
    assert np.isnan(table.rows[1]).all()
    assert np.isfinite(table.rows[0]).all()


# Custom rules.


def momentum_rule(gradient, row, slots, learning_rate, hyperparameters):
    velocity = hyperparameters.momentum * slots[0] + gradient
    count = slots[1] + 1.0
    return row - learning_rate * velocity, (velocity, count)


def momentum_rule_in_python(gradient, row, slots, learning_rate, hyperparameters):
    # Numba does not understand getattr with a name made at run time.
    velocity = getattr(hyperparameters, "mom" + "entum".lower()) * slots[0] + gradient
    return row - learning_rate * velocity, (velocity, slots[1] + 1.0)


def momentum_rule_with_import(gradient, row, slots, learning_rate, hyperparameters):
    from math import sqrt

    velocity = sqrt(hyperparameters.momentum**2) * slots[0] + gradient
    return row - learning_rate * velocity, (velocity, slots[1] + 1.0)


MOMENTUM_SLOTS = (SlotSpec(name="velocity", width="element"), SlotSpec(name="count", width="row", initial_value=2.0))


def custom(update, **arguments):
    return CustomRowOptimizer(update, MOMENTUM_SLOTS, {"momentum": 0.5}, **arguments)


def is_compiled(optimizer, dim):
    return hasattr(custom_rule(optimizer, dim), "py_func")


ALL_LIMITS = {"clipvalue": 0.5, "weight_decay_factor": 0.1, "clip_weight_max": 0.2}


@pytest.mark.parametrize(
    ("options", "rule_in_python"),
    [
        ({}, momentum_rule_with_import),
        (ALL_LIMITS, momentum_rule_in_python),
        long_case({}, momentum_rule_in_python),
        long_case(ALL_LIMITS, momentum_rule_with_import),
    ],
)
def test_custom_rule_compiled_and_in_python(options, rule_in_python):
    compiled, in_python = custom(momentum_rule, **options), custom(rule_in_python, **options)
    assert is_compiled(compiled, 8)
    assert not is_compiled(in_python, 8)
    tables = [make_table(compiled), make_table(in_python)]
    rng = np.random.default_rng(4)
    rows, velocity = tables[0].rows.astype(np.float64), np.zeros((NUM_ROWS, 8))
    for _ in range(3):
        local_rows, gradients = a_step(rng, NUM_ROWS, 8, 7)
        for table in tables:
            table.update(local_rows, gradients, RATE)
        for row in set(local_rows.tolist()):
            g = gradients[local_rows == row].sum(axis=0)
            g = np.clip(g, -0.5, 0.5) if options else g
            velocity[row] = 0.5 * velocity[row] + g
            rows[row] = rows[row] * (0.9 if options else 1.0) - RATE * velocity[row]
            rows[row] = np.minimum(rows[row], 0.2) if options else rows[row]
    for table in tables:
        assert np.allclose(table.rows, rows, rtol=1e-5, atol=1e-6)
        assert np.allclose(table.slots["velocity"], velocity, rtol=1e-5, atol=1e-6)
    assert np.array_equal(tables[0].slots["count"], tables[1].slots["count"])
    assert tables[0].slots["count"].shape == (NUM_ROWS, 1)


@pytest.mark.parametrize("num_slots", [long_case(0), long_case(1), 4, 5])
def test_custom_rule_with_any_number_of_slots(num_slots):
    def adds_to_each(gradient, row, slots, learning_rate, hyperparameters):
        return row - learning_rate * gradient, slots

    slots = tuple(SlotSpec(name=f"slot{k}", width="element", initial_value=float(k)) for k in range(num_slots))
    optimizer = CustomRowOptimizer(adds_to_each, slots)
    table = make_table(optimizer)
    before = table.rows.copy()
    table.update(np.array([5]), np.ones((1, 8), np.float32), 0.25)
    assert np.allclose(table.rows[5], before[5] - 0.25)
    assert [float(table.slots[f"slot{k}"].mean()) for k in range(num_slots)] == [float(k) for k in range(num_slots)]
    assert is_compiled(optimizer, 8) == (num_slots <= 4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda g, w, s, lr, h: w,
        lambda g, w, s, lr, h: (w, s[0]),
        lambda g, w, s, lr, h: (w, (s[0],)),
        lambda g, w, s, lr, h: (w[:-1], s),
        lambda g, w, s, lr, h: (w, (s[1], s[0])),
    ],
)
def test_custom_rule_that_returns_something_else_is_refused_before_anything_changes(wrong):
    table = make_table(custom(wrong))
    before = table.rows.copy()
    with pytest.raises(ValueError, match="Expected \\(new_row, \\(new_slot"):
        table.update(np.array([1]), np.ones((1, 8), np.float32), RATE)
    assert np.array_equal(table.rows, before)


def test_custom_rule_one_by_one():
    table = make_table(custom(momentum_rule, use_gradient_accumulation=False))
    table.update(np.array([1, 1, 1]), np.ones((3, 8), np.float32), RATE)
    assert table.slots["velocity"][1].tolist() == [1.75] * 8
    assert table.slots["count"][1].tolist() == [5.0]
