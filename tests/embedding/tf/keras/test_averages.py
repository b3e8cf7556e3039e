"""Averages of the parameters (`use_ema`) in `embedding.tf.keras.optimizer`."""

from __future__ import annotations

import pytest

from podembed.embedding.tf.keras.keras_optimizers import SGD
from podembed.embedding.tf.keras.optimizer import KerasOptimizer
from podembed.embedding.tf.keras.variable import Variable


def test_averages_start_as_copies_and_are_not_trainable():
    optimizer, variable = SGD(0.0, use_ema=True, ema_momentum=0.5), Variable([3.0], name="w")
    optimizer.apply_gradients([([1.0], variable)])
    (average,) = [one for one in optimizer.variables if "average" in one.name]
    assert (average.name, average.trainable, average[0]) == ("SGD/average/w", False, 3.0)


def test_finalizing():
    variable = Variable(2.0)
    plain, averaging = SGD(1.0), SGD(1.0, use_ema=True, ema_momentum=0.5)
    plain.finalize_variable_values([])
    with pytest.raises(ValueError, match="Found 1 variables"):
        averaging.finalize_variable_values([variable])
    averaging.apply_gradients([(1.0, variable)])
    with pytest.raises(ValueError, match="Found 2 variables"):
        averaging.finalize_variable_values([variable, variable])
    with pytest.raises(KeyError, match="does not know"):
        averaging.finalize_variable_values([Variable(1.0)])
    averaging.finalize_variable_values([variable])
    assert float(variable) == 1.5


@pytest.mark.parametrize("frequency", [None, 0])
def test_no_frequency_never_overwrites(frequency):
    variable = Variable(0.0)
    optimizer = SGD(1.0, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=frequency)
    for _ in range(4):
        optimizer.apply_gradients([(1.0, variable)])
    assert float(variable) == -4.0


def test_a_class_that_never_says_it_is_built_keeps_its_averages():
    class Bare(KerasOptimizer):
        def update_step(self, gradient, variable):
            variable.assign_sub(gradient)

    optimizer, variable = Bare("Bare", use_ema=True, ema_momentum=0.5), Variable(4.0)
    for _ in range(2):
        optimizer.apply_gradients([(2.0, variable)])
    optimizer.finalize_variable_values([variable])
    assert float(variable) == 1.5  # averages 4, 3, 1.5
    optimizer.apply_gradients([(1.0, Variable(0.0))])  # as in 2.9 it learns variables at every call
    optimizer.iterations = 9  # and counts as never built


def test_every_average_belongs_to_its_variable_whatever_is_missing():
    optimizer = SGD(1.0, use_ema=True, ema_momentum=0.5)
    a, b = Variable(10.0), Variable(100.0)
    optimizer.apply_gradients([(None, a), (20.0, b)])
    optimizer.apply_gradients([(4.0, a), (None, b)])
    optimizer.finalize_variable_values([b, a])
    # a: 10, 10, 6 with averages 10, 10, 8. b: 100, 80, 80 with averages 100, 90, 90.
    assert (float(a), float(b)) == (8.0, 90.0)


def test_a_step_without_a_gradient_leaves_a_variable_and_its_average_alone():
    optimizer = SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    idle, other = Variable(10.0, name="idle"), Variable(0.0)
    optimizer.apply_gradients([(4.0, idle), (1.0, other)])
    (average,) = [one for one in optimizer.variables if one.name.endswith("average/idle")]
    assert (float(idle), float(average)) == (6.0, 8.0)
    for _ in range(3):
        # The second step is one that overwrites, which does not reach a variable without a gradient either.
        optimizer.apply_gradients([(None, idle), (1.0, other)])
        assert (float(idle), float(average)) == (6.0, 8.0)
    optimizer.finalize_variable_values([idle, other])
    assert float(idle) == 8.0
