"""Adagrad, Adadelta and RMSprop with the defaults and formulas of `tf.keras.optimizers.experimental` in TensorFlow 2.9.

Import them from `keras_optimizers`, which has all of them together. The three divide by a root of squared gradients:
summed, or averaged with weight `rho`. `g` is the gradient, `w` the variable, `lr` the rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from podembed.embedding.tf.keras.array_operators import cast_to
from podembed.embedding.tf.keras.gradients import dense_gradient
from podembed.embedding.tf.keras.optimizer import KerasOptimizer
from podembed.embedding.tf.keras.row_slices import RowSlices
from podembed.embedding.tf.keras.variable import Variable


class KerasAdagrad(KerasOptimizer):
    """`a += g**2`, `w -= lr * g / sqrt(a + epsilon)` (Duchi et al., 2011). Only the rows of a `RowSlices` are
    touched.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        name: str = "Adagrad",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            name,
            clipnorm,
            clipvalue,
            global_clipnorm,
            use_ema,
            ema_momentum,
            ema_overwrite_frequency,
            jit_compile,
            **kwargs,
        )
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def build(self, var_list: Sequence[Variable]) -> None:
        """Makes one slot, "accumulator", per variable."""
        super().build(var_list)
        if self._built:
            return
        self._accumulators = [
            self.add_variable_from_reference(
                one, "accumulator", initial_value=jnp.full(one.shape, self.initial_accumulator_value, one.dtype)
            )
            for one in var_list
        ]
        self._built = True

    def update_step(self, gradient: Any, variable: Variable) -> None:
        accumulator = self._accumulators[self._index_dict[self._var_key(variable)]]
        rate = cast_to(self.learning_rate.value, variable.dtype)
        value, accumulated = _adagrad(variable.value, gradient, accumulator.value, rate, self.epsilon)
        variable.assign(value)
        accumulator.assign(accumulated)

    def get_config(self) -> dict[str, Any]:
        return self._with_own(super().get_config(), "initial_accumulator_value", "epsilon")


class Adadelta(KerasOptimizer):
    """`w -= lr * sqrt(d + epsilon) / sqrt(a + epsilon) * g` (Zeiler, 2012).

    `a` averages squared gradients and `d` squared steps before the rate, both with weight `rho`; `d` of the step before
    counts.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        name: str = "Adadelta",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            name,
            clipnorm,
            clipvalue,
            global_clipnorm,
            use_ema,
            ema_momentum,
            ema_overwrite_frequency,
            jit_compile,
            **kwargs,
        )
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.rho = rho
        self.epsilon = epsilon

    def build(self, var_list: Sequence[Variable]) -> None:
        """Makes two slots per variable, "accumulated_grad" and "accumulated_delta_var"."""
        super().build(var_list)
        if self._built:
            return
        self._accumulated_grads = [self.add_variable_from_reference(one, "accumulated_grad") for one in var_list]
        self._accumulated_delta_vars = [
            self.add_variable_from_reference(one, "accumulated_delta_var") for one in var_list
        ]
        self._built = True

    def update_step(self, gradient: Any, variable: Variable) -> None:
        index = self._index_dict[self._var_key(variable)]
        slots = (self._accumulated_grads[index], self._accumulated_delta_vars[index])
        rate = cast_to(self.learning_rate.value, variable.dtype)
        value, *moved = _adadelta(
            variable.value,
            dense_gradient(gradient),
            slots[0].value,
            slots[1].value,
            rate,
            self.rho,
            1 - self.rho,
            self.epsilon,
        )
        variable.assign(value)
        for slot, new in zip(slots, moved, strict=True):
            slot.assign(new)

    def get_config(self) -> dict[str, Any]:
        return self._with_own(super().get_config(), "rho", "epsilon")


class RMSprop(KerasOptimizer):
    """`v = rho * v + (1 - rho) * g**2`, `w -= lr * g / (sqrt(v) + epsilon)`; with momentum `m = momentum * m + g /
    (...)`, `w -= lr * m`.

    `centered` does what 2.9 does, which is not the textbook: the "average gradient" averages squares, and its square is
    taken off the kept `v`. So `v` can fall below zero and the variable become NaN. `ema_overwrite_frequency` defaults
    to 100 here, as in 2.9. Without momentum only the rows of a `RowSlices` move, though `v` of every row decays.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = 100,
        jit_compile: bool = True,
        name: str = "RMSprop",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            name,
            clipnorm,
            clipvalue,
            global_clipnorm,
            use_ema,
            ema_momentum,
            ema_overwrite_frequency,
            jit_compile,
            **kwargs,
        )
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.rho = rho
        self.momentum = momentum
        self.epsilon = epsilon
        self.centered = centered

    def build(self, var_list: Sequence[Variable]) -> None:
        """Makes "velocity" per variable, "momentum" with momentum and "average_gradient" if centered."""
        super().build(var_list)
        if self._built:
            return
        self._velocities = [self.add_variable_from_reference(one, "velocity") for one in var_list]
        self._momentums = (
            [self.add_variable_from_reference(one, "momentum") for one in var_list] if self.momentum > 0 else []
        )
        self._average_gradients = (
            [self.add_variable_from_reference(one, "average_gradient") for one in var_list] if self.centered else []
        )
        self._built = True

    def update_step(self, gradient: Any, variable: Variable) -> None:
        index = self._index_dict[self._var_key(variable)]
        rate = cast_to(self.learning_rate.value, variable.dtype)
        velocity, dense = self._velocities[index], dense_gradient(gradient)
        velocity.assign(_decayed_square(velocity.value, dense, self.rho, 1 - self.rho))
        if self.centered:
            average = self._average_gradients[index]
            average.assign(_decayed_square(average.value, dense, self.rho, 1 - self.rho))
            velocity.assign_sub(average.value * average.value)
        if self.momentum > 0:
            momentum = self._momentums[index]
            momentum.assign(self.momentum * momentum.value + _scaled(gradient, velocity.value, self.epsilon))
            variable.assign_sub(rate * momentum.value)
        else:
            variable.assign_sub(rate * _scaled(gradient, velocity.value, self.epsilon))

    def get_config(self) -> dict[str, Any]:
        return self._with_own(super().get_config(), "rho", "momentum", "epsilon", "centered")


def _adagrad(
    value: jax.Array, gradient: jax.Array | RowSlices, accumulator: jax.Array, rate: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    if isinstance(gradient, RowSlices):
        rows, grad = gradient.indices, gradient.values
        accumulator = accumulator.at[rows].add(grad * grad, mode="drop")
        step = rate * grad / jnp.sqrt(accumulator.at[rows].get(mode="clip") + epsilon)
        return value.at[rows].add(-step, mode="drop"), accumulator
    accumulator = accumulator + gradient * gradient
    return value - rate * gradient / jnp.sqrt(accumulator + epsilon), accumulator


def _adadelta(
    value: jax.Array,
    gradient: jax.Array,
    squares: jax.Array,
    steps: jax.Array,
    rate: jax.Array,
    rho: float,
    one_minus_rho: float,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    squares = rho * squares + one_minus_rho * gradient * gradient
    step = -jnp.sqrt(steps + epsilon) * gradient / jnp.sqrt(squares + epsilon)
    return value + rate * step, squares, rho * steps + one_minus_rho * step * step


def _decayed_square(average: jax.Array, gradient: jax.Array, rho: float, one_minus_rho: float) -> jax.Array:
    return rho * average + one_minus_rho * (gradient * gradient)


def _scaled(gradient: jax.Array | RowSlices, velocity: jax.Array, epsilon: float) -> jax.Array:
    """`gradient / (sqrt(velocity) + epsilon)`, dense, zero in rows without gradient whatever their velocity."""
    if isinstance(gradient, RowSlices):
        root = jnp.sqrt(velocity.at[gradient.indices].get(mode="clip"))
        return gradient.with_values(gradient.values / (root + epsilon)).dense()
    return gradient / (jnp.sqrt(velocity) + epsilon)
