"""SGD and FTRL with the defaults and formulas of `tf.keras.optimizers.experimental` in TensorFlow 2.9.

`g` is the gradient, `w` the variable, `lr` the rate. A complement such as `1 - rho` is formed in Python, before
rounding to float32, and operations keep Keras' order. Run one by one, they give its float32 results to the last digit
nearly everywhere. Compiled programs fuse products into sums and round differently.
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


class KerasSGD(KerasOptimizer):
    """`w -= lr * g`; with momentum `m = momentum * m - lr * g` and `w += m`, with nesterov `w += momentum * m - lr *
    g`.

    `amsgrad` is accepted for the order of 2.9's arguments, where it has no meaning either.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        amsgrad: bool = False,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        name: str = "SGD",
        **kwargs: Any,
    ) -> None:
        """Checks the arguments.

        Raises:
          ValueError: a momentum outside 0 to 1, or as `KerasOptimizer`.
        """
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
        if isinstance(momentum, (int, float)) and not 0 <= momentum <= 1:
            raise ValueError(
                f"Found momentum={momentum}. Expected a number from 0 to 1. Use 0.9 for momentum, 0 for none."
            )
        self.momentum = momentum
        self.nesterov = nesterov

    def build(self, var_list: Sequence[Variable]) -> None:
        """Makes one slot, "m", per variable; none without momentum."""
        super().build(var_list)
        if self._built:
            return
        self.momentums = [self.add_variable_from_reference(one, "m") for one in var_list] if self.momentum != 0 else []
        self._built = True

    def update_step(self, gradient: Any, variable: Variable) -> None:
        """One step; without momentum only the rows of a `RowSlices` are touched."""
        rate = cast_to(self.learning_rate.value, variable.dtype)
        if self.momentum == 0:
            variable.assign(_moved(variable.value, gradient, rate))
            return
        slot = self.momentums[self._index_dict[self._var_key(variable)]]
        value, momentum = _sgd_with_momentum(
            variable.value, dense_gradient(gradient), slot.value, rate, self.momentum, is_nesterov=self.nesterov
        )
        variable.assign(value)
        slot.assign(momentum)

    def get_config(self) -> dict[str, Any]:
        return self._with_own(super().get_config(), "momentum", "nesterov")


class Ftrl(KerasOptimizer):
    """Follow the regularized leader, with L1, L2 and shrinkage (McMahan et al., 2013).

    `n' = n + g**2`, `z += g + 2 * shrinkage * w - (n'**p - n**p) / lr * w`, `w = (clip(z, -l1, l1) - z) / (n'**p / lr +
    2 * l2')`, where `p = -learning_rate_power` and `l2' = l2 + beta / (2 * lr)`. Dense, as in Keras: a row without
    gradient also moves, to the value its `z` stands for, which is 0 in the first step.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        name: str = "Ftrl",
        **kwargs: Any,
    ) -> None:
        """Checks the arguments.

        Raises:
          ValueError: a negative strength or accumulator, a positive power, or as `KerasOptimizer`.
        """
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
        _require_not_negative("initial_accumulator_value", initial_accumulator_value)
        _require_not_negative("l1_regularization_strength", l1_regularization_strength)
        _require_not_negative("l2_regularization_strength", l2_regularization_strength)
        _require_not_negative("l2_shrinkage_regularization_strength", l2_shrinkage_regularization_strength)
        if learning_rate_power > 0:
            raise ValueError(
                f"Found learning_rate_power={learning_rate_power}. Expected a number of at most 0. Use -0.5, or 0 for "
                "a fixed rate."
            )
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.learning_rate_power = learning_rate_power
        self.initial_accumulator_value = initial_accumulator_value
        self.l1_regularization_strength = l1_regularization_strength
        self.l2_regularization_strength = l2_regularization_strength
        self.l2_shrinkage_regularization_strength = l2_shrinkage_regularization_strength
        self.beta = beta

    def build(self, var_list: Sequence[Variable]) -> None:
        """Makes two slots per variable, "accumulator" (`n`) and "linear" (`z`)."""
        super().build(var_list)
        if self._built:
            return
        self._accumulators = [
            self.add_variable_from_reference(
                one, "accumulator", initial_value=jnp.full(one.shape, self.initial_accumulator_value, one.dtype)
            )
            for one in var_list
        ]
        self._linears = [self.add_variable_from_reference(one, "linear") for one in var_list]
        self._built = True

    def update_step(self, gradient: Any, variable: Variable) -> None:
        index = self._index_dict[self._var_key(variable)]
        accumulator, linear = self._accumulators[index], self._linears[index]
        value, accumulated, summed = _ftrl(
            variable.value,
            dense_gradient(gradient),
            accumulator.value,
            linear.value,
            cast_to(self.learning_rate.value, variable.dtype),
            power=-self.learning_rate_power,
            l1=self.l1_regularization_strength,
            l2=self.l2_regularization_strength,
            twice_shrinkage=2 * self.l2_shrinkage_regularization_strength,
            beta=self.beta,
        )
        variable.assign(value)
        accumulator.assign(accumulated)
        linear.assign(summed)

    def get_config(self) -> dict[str, Any]:
        return self._with_own(
            super().get_config(),
            "learning_rate_power",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "l2_shrinkage_regularization_strength",
            "beta",
        )


def _require_not_negative(name: str, value: float) -> None:
    if value < 0:
        raise ValueError(f"Found {name}={value}. Expected a number of at least 0. Use 0 for none.")


def _moved(value: jax.Array, gradient: jax.Array | RowSlices, rate: jax.Array) -> jax.Array:
    if isinstance(gradient, RowSlices):
        return value.at[gradient.indices].add(-gradient.values * rate, mode="drop")
    return value - gradient * rate


def _sgd_with_momentum(
    value: jax.Array, gradient: jax.Array, slot: jax.Array, rate: jax.Array, momentum: float, *, is_nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    step = -gradient * rate
    slot = step + slot * momentum
    return value + (step + slot * momentum if is_nesterov else slot), slot


def _ftrl(
    value: jax.Array,
    gradient: jax.Array,
    accumulator: jax.Array,
    linear: jax.Array,
    rate: jax.Array,
    *,
    power: float,
    l1: float,
    l2: float,
    twice_shrinkage: float,
    beta: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    strength = l2 + beta / (2.0 * rate)
    accumulated = accumulator + gradient * gradient
    root = jnp.power(accumulated, power)
    linear = linear + (gradient + twice_shrinkage * value - (root - jnp.power(accumulator, power)) / rate * value)
    quadratic = root / rate + 2.0 * strength
    return (jnp.clip(linear, -l1, l1) - linear) / quadratic, accumulated, linear
