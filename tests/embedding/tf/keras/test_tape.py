"""Gradients over variables: values, what has none, the tape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.tf.keras.tape import GradientTape, gradients_of
from podembed.embedding.tf.keras.variable import Variable


@pytest.fixture
def pair():
    return Variable(1.0, name="a"), Variable(2.0, name="b")


def floats(gradients):
    return [None if one is None else np.asarray(one).tolist() for one in gradients]


def test_values_and_order(pair):
    a, b = pair
    assert floats(gradients_of(lambda: 3 * a * a + 2 * b * b, [a, b])) == [6.0, 8.0]
    assert floats(gradients_of(lambda: 3 * a * a + 2 * b * b, [b, a, b])) == [8.0, 6.0, 8.0]


def test_a_loss_that_is_no_scalar_counts_with_the_sum_of_its_elements():
    vector = Variable([1.0, 2.0, 3.0])
    assert floats(gradients_of(lambda: vector**2, [vector])) == [[2.0, 4.0, 6.0]]


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: b * 2,
        lambda a, b: b + jax.lax.stop_gradient(a.value),
        lambda a, b: b + jnp.floor(a.value),
        lambda a, b: b + a.value.astype(jnp.int32),
        lambda a, b: jax.jit(lambda x, y: (x * 2, y * 3))(a.value, b.value)[1],
        lambda a, b: jax.lax.scan(lambda s, _: ((s[0] * a.value, s[1] * 2), None), (a.value, b.value), jnp.arange(3))[
            0
        ][1],
    ],
)
def test_no_dependence_gives_none(pair, loss):
    a, b = pair
    first, second = gradients_of(lambda: loss(a, b), [a, b])
    assert first is None
    assert second is not None


@pytest.mark.parametrize(
    "loss",
    [
        lambda a: 0.0 * a,
        lambda a: jnp.minimum(a.value, 0.5),
        lambda a: (a - 1.0) ** 2,
        lambda a: jnp.maximum(a.value, 0.0) * 0,
    ],
)
def test_a_gradient_of_zero_is_not_none(pair, loss):
    assert floats(gradients_of(lambda: loss(pair[0]), pair)) == [0.0, None]


def test_no_variable_no_float(pair):
    counter = Variable(3)
    assert gradients_of(lambda: 5.0, pair) == [None, None]
    assert gradients_of(lambda: pair[0].value.astype(jnp.int32), pair) == [None, None]
    assert floats(gradients_of(lambda: pair[0] * counter, [pair[0], counter])) == [3.0, None]
    assert floats(gradients_of(lambda: pair[0], pair)) == [1.0, None]


def test_hand_written_rules_also_when_they_ignore_what_comes_in(pair):
    @jax.custom_vjp
    def square(x, y):
        return x * x

    square.defvjp(lambda x, y: (x * x, x), lambda x, gradient: (2 * x, jnp.zeros_like(x)))
    assert floats(gradients_of(lambda: square(pair[0].value, pair[1].value), pair)) == [2.0, None]


def test_branches_on_values_and_values_afterwards(pair):
    a, b = pair
    assert floats(gradients_of(lambda: a * 2 if b > 1 else a * 3, [a])) == [2.0]
    assert not isinstance(a.value, jax.core.Tracer)
    with pytest.raises(ZeroDivisionError):
        gradients_of(lambda: a * (1 / 0), [a])
    assert a == 1.0


def test_assigning_in_a_loss_is_refused(pair):
    with pytest.raises(RuntimeError, match="Expected a loss that only reads"):
        gradients_of(lambda: pair[0].assign_add(1.0) * 2, pair)


def test_inside_a_program(pair):
    a, _ = pair
    gradient = jax.jit(lambda scale: gradients_of(lambda: a * a * scale, [a])[0])
    assert gradient(3.0) == 6.0


def test_tape_keeps_the_values_of_the_moment_it_recorded(pair):
    a, b = pair
    with GradientTape() as tape:
        loss = tape.record(lambda: 3 * a * a + 2 * b * b)
    a.assign(10.0)
    assert loss == 11.0
    assert floats(tape.gradient(loss, [a, b])) == [6.0, 8.0]
    assert tape.gradient(loss, a) == 6.0
    assert a == 10.0


def test_tape_keeps_several_losses(pair):
    a, b = pair
    tape = GradientTape()
    first, second = tape.record(lambda: a * b), tape.record(lambda: b)
    assert floats(tape.gradient(first, [a, b])) == [2.0, 1.0]
    assert floats(tape.gradient(second, [a, b])) == [None, 1.0]


def test_only_what_is_trainable_or_watched():
    frozen = Variable(2.0, trainable=False)
    tape = GradientTape()
    loss = tape.record(lambda: frozen * 3)
    assert tape.gradient(loss, [frozen]) == [None]
    assert tape.gradient(loss, frozen) is None
    tape.watch(frozen)
    assert tape.gradient(loss, frozen) == 3.0


def test_results_the_tape_does_not_know(pair):
    tape = GradientTape()
    loss = tape.record(lambda: pair[0] * 2)
    for target in (loss * 2, pair[0].value, 2.0):
        with pytest.raises(ValueError, match=r"tape\.record"):
            tape.gradient(target, pair)
