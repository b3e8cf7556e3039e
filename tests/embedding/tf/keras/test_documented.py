"""The examples of TensorFlow's page on this optimizer, and those of docs/optimizers.md, run."""

from __future__ import annotations

import doctest
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.tf.keras import keras_optimizers, schedules
from podembed.embedding.tf.keras.tape import GradientTape
from podembed.embedding.tf.keras.variable import Variable

OUR_PAGE = Path(__file__).parents[4] / "docs" / "optimizers.md"


def test_our_page():
    found = doctest.testfile(str(OUR_PAGE), module_relative=False)
    assert found.attempted > 30
    assert found.failed == 0


def test_usage():
    opt = keras_optimizers.SGD(learning_rate=0.1)
    var1, var2 = Variable(1.0), Variable(2.0)
    opt.minimize(lambda: 3 * var1 * var1 + 2 * var2 * var2, var_list=[var1, var2])
    assert (float(var1), float(var2)) == (pytest.approx(0.4), pytest.approx(1.2))


def test_processing_gradients_before_applying_them():
    opt = keras_optimizers.SGD(learning_rate=0.1)
    var1, var2 = Variable(1.0), Variable(2.0)
    with GradientTape() as tape:
        loss = tape.record(lambda: 3 * var1 * var1 + 2 * var2 * var2)
    grads = tape.gradient(loss, [var1, var2])
    grads[0] = grads[0] + 1
    opt.apply_gradients(zip(grads, [var1, var2], strict=True))
    assert (float(var1), float(var2)) == (pytest.approx(0.3), pytest.approx(1.2))


def test_dynamic_learning_rate():
    var = Variable(np.random.default_rng(0).random(size=(1,)))
    start = float(var[0])
    learning_rate = schedules.ExponentialDecay(initial_learning_rate=0.01, decay_steps=20, decay_rate=0.1)
    opt = keras_optimizers.SGD(learning_rate=learning_rate)
    opt.minimize(lambda: 3 * var, var_list=[var])
    opt.minimize(lambda: 3 * var, var_list=[var])
    assert float(var[0]) == pytest.approx(start - 0.03 - 0.03 * 0.1 ** (1 / 20), abs=1e-6)


def test_gradients_clipping():
    opt = keras_optimizers.SGD(learning_rate=1, clipvalue=1)
    var1, var2 = Variable(2.0), Variable(2.0)
    with GradientTape() as tape:
        loss = tape.record(lambda: 2 * var1 + 2 * var2)
    grads = tape.gradient(loss, [var1, var2])
    assert [float(grads[0]), float(grads[1])] == [2.0, 2.0]
    opt.apply_gradients(zip(grads, [var1, var2], strict=True))
    assert [var1.numpy(), var2.numpy()] == [1.0, 1.0]


def test_exponential_moving_average():
    opt = keras_optimizers.SGD(learning_rate=1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    var1, var2 = Variable(2.0), Variable(2.0)
    with GradientTape() as tape:
        loss = tape.record(lambda: var1 + var2)
    grads = tape.gradient(loss, [var1, var2])
    for expected in (1.0, 0.0, -0.125):
        opt.apply_gradients(zip(grads, [var1, var2], strict=True))
        assert [float(var1), float(var2)] == [expected, expected]


def test_own_aggregation():
    opt = keras_optimizers.SGD(1.0)
    var = Variable(0.0)
    per_replica = [jnp.float32(1.0), jnp.float32(2.0)]
    opt.apply_gradients(zip([sum(per_replica)], [var], strict=True), skip_gradients_aggregation=True)
    assert float(var) == -3.0


def test_creating_a_custom_optimizer():
    class Momentum(keras_optimizers.Optimizer):
        def __init__(self, learning_rate=0.1, momentum=0.9, name="Momentum", **kwargs):
            super().__init__(name=name, **kwargs)
            self._learning_rate = self._build_learning_rate(learning_rate)
            self.momentum = momentum

        def build(self, var_list):
            super().build(var_list)
            if hasattr(self, "_built") and self._built:
                return
            self.momentums = []
            for var in var_list:
                self.momentums.append(self.add_variable_from_reference(model_variable=var, variable_name="m"))
            self._built = True

        def update_step(self, gradient, variable):
            m = self.momentums[self._index_dict[self._var_key(variable)]]
            m.assign(-gradient * self.learning_rate + m * self.momentum)
            variable.assign_add(m)

        def get_config(self):
            config = super().get_config()
            config.update(
                {"learning_rate": self._serialize_hyperparameter(self._learning_rate), "momentum": self.momentum}
            )
            return config

    mine, theirs = Momentum(0.1, 0.8), keras_optimizers.SGD(0.1, momentum=0.8)
    mine = Momentum.from_config(mine.get_config())
    left, right = Variable([1.0, 2.0]), Variable([1.0, 2.0])
    for _ in range(3):
        mine.minimize(lambda: left**2, [left])
        theirs.minimize(lambda: right**2, [right])
    np.testing.assert_allclose(left.numpy(), right.numpy(), rtol=1e-6)


def test_examples_of_the_classes():
    var = Variable(1.0)
    keras_optimizers.SGD(learning_rate=0.1).minimize(lambda: var**2 / 2.0, [var])
    assert float(var) == pytest.approx(0.9)

    var, opt = Variable(1.0), keras_optimizers.SGD(learning_rate=0.1, momentum=0.9)
    values = [float(var)]
    for _ in range(2):
        opt.minimize(lambda: var**2 / 2.0, [var])
        values.append(float(var))
    assert values == pytest.approx([1.0, 0.9, 0.72])

    var = Variable(10.0)
    keras_optimizers.RMSprop(learning_rate=0.1).minimize(lambda: var**2 / 2.0, [var])
    assert float(var) == pytest.approx(9.683772)
