"""Adamax and Nadam, the relatives of Adam, with the defaults and formulas of TensorFlow 2.9; terms as in `adam`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.tf.keras.adam import step_number
from podembed.embedding.tf.keras.array_operators import cast_to
from podembed.embedding.tf.keras.gradients import dense_gradient
from podembed.embedding.tf.keras.optimizer import KerasOptimizer
from podembed.embedding.tf.keras.variable import Variable


class Adamax(KerasOptimizer):
    """Adam with the largest recent gradient instead of a root mean square (Kingma & Ba, 2015, section 7.1).

    `m += (g - m) * (1 - b1)`, `u = max(b2 * u, |g|)`, `w -= lr * m / ((1 - b1**t) * (u + epsilon))`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        name: str = "Adamax",
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
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def build(self, var_list: Sequence[Variable]) -> None:
        """Makes "m" and "u" per variable."""
        super().build(var_list)
        if self._built:
            return
        self._m = [self.add_variable_from_reference(one, "m") for one in var_list]
        self._u = [self.add_variable_from_reference(one, "u") for one in var_list]
        self._built = True

    def update_step(self, gradient: Any, variable: Variable) -> None:
        index = self._index_dict[self._var_key(variable)]
        slot, largest = self._m[index], self._u[index]
        value, new_slot, new_largest = _adamax(
            variable.value,
            dense_gradient(gradient),
            slot.value,
            largest.value,
            cast_to(self.learning_rate.value, variable.dtype),
            step_number(self, variable),
            betas=(self.beta_1, self.beta_2),
            complement_1=1 - self.beta_1,
            epsilon=self.epsilon,
        )
        variable.assign(value)
        slot.assign(new_slot)
        largest.assign(new_largest)

    def get_config(self) -> dict[str, Any]:
        return self._with_own(super().get_config(), "beta_1", "beta_2", "epsilon")


class Nadam(KerasOptimizer):
    """Adam with Nesterov momentum (Dozat, 2016), the momentum warming up as `u_t = b1 * (1 - 0.5 * 0.96**t)`.

    `m_hat = u_{t+1} * m / (1 - u_1 ... u_{t+1}) + (1 - u_t) * g / (1 - u_1 ... u_t)`, `v_hat = v / (1 - b2**t)`, `w -=
    lr * m_hat / (sqrt(v_hat) + epsilon)`. The product runs over the steps this object took: `iterations` set to start
    later does not change that.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        name: str = "Nadam",
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
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def build(self, var_list: Sequence[Variable]) -> None:
        """Makes "m" and "v" per variable, the product of the momenta, and the step it includes last."""
        super().build(var_list)
        if self._built:
            return
        self._momentums = [self.add_variable_from_reference(one, "m") for one in var_list]
        self._velocities = [self.add_variable_from_reference(one, "v") for one in var_list]
        self._u_product = self.add_variable(None, var_list[0].dtype, "ones", "u_product")
        self._u_product_step = self.add_variable(None, np.int32, "zeros", "u_product_step")
        self._built = True

    def update_step(self, gradient: Any, variable: Variable) -> None:
        index = self._index_dict[self._var_key(variable)]
        slot, velocity = self._momentums[index], self._velocities[index]
        step = cast_to(self.iterations.value + 1, np.int32)
        value, new_slot, new_velocity, product = _nadam(
            variable.value,
            dense_gradient(gradient),
            slot.value,
            velocity.value,
            cast_to(self._u_product.value, variable.dtype),
            self._u_product_step.value == step,
            cast_to(self.learning_rate.value, variable.dtype),
            step_number(self, variable),
            np.array((self.beta_1, self.beta_2), variable.dtype),
            self.epsilon,
        )
        variable.assign(value)
        slot.assign(new_slot)
        velocity.assign(new_velocity)
        self._u_product.assign(product)
        self._u_product_step.assign(step)

    def get_config(self) -> dict[str, Any]:
        return self._with_own(super().get_config(), "beta_1", "beta_2", "epsilon")


def _adamax(
    value: jax.Array,
    gradient: jax.Array,
    slot: jax.Array,
    largest: jax.Array,
    rate: jax.Array,
    step: jax.Array,
    *,
    betas: tuple[float, float],
    complement_1: float,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    first_power = jnp.power(np.asarray(betas[0], value.dtype), step)
    slot = slot + (gradient - slot) * complement_1
    largest = jnp.maximum(betas[1] * largest, jnp.abs(gradient))
    return value - rate * slot / ((1 - first_power) * (largest + epsilon)), slot, largest


def _nadam(
    value: jax.Array,
    gradient: jax.Array,
    slot: jax.Array,
    velocity: jax.Array,
    product_before: jax.Array,
    is_counted: jax.Array,
    rate: jax.Array,
    step: jax.Array,
    betas: np.ndarray,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`is_counted`: the product already includes this step, since another variable of it came first."""
    decay = np.asarray(0.96, value.dtype)
    now = betas[0] * (1.0 - 0.5 * jnp.power(decay, step))
    after = betas[0] * (1.0 - 0.5 * jnp.power(decay, step + 1))
    product = jnp.where(is_counted, product_before, product_before * now)
    slot = slot + (gradient - slot) * (1 - betas[0])
    velocity = velocity + (gradient * gradient - velocity) * (1 - betas[1])
    ahead = after * slot / (1 - product * after) + (1 - now) * gradient / (1 - product)
    root = jnp.sqrt(velocity / (1 - jnp.power(betas[1], step)))
    return value - ahead * rate / (root + epsilon), slot, velocity, product
