"""Adam and AdamW with the defaults and formulas of `tf.keras.optimizers.experimental` in TensorFlow 2.9.

Import them from `keras_optimizers`, which has all optimizers together. `t` counts steps from 1. `epsilon` is added to
the root after the bias correction went into the rate ("epsilon hat" of Kingma & Ba, 2015). Row slices are made dense:
every row's moments decay in every step, as in Keras.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.tf.keras.array_operators import cast_to
from podembed.embedding.tf.keras.gradients import dense_gradient
from podembed.embedding.tf.keras.optimizer import KerasOptimizer
from podembed.embedding.tf.keras.variable import Variable


class KerasAdam(KerasOptimizer):
    """`m += (g - m) * (1 - b1)`, `v += (g**2 - v) * (1 - b2)`, `w -= m * alpha / (sqrt(v) + epsilon)`.

    `alpha = lr * sqrt(1 - b2**t) / (1 - b1**t)`. With `amsgrad` the largest `v` so far divides (Reddi et al., 2018).
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        name: str = "Adam",
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
        self.amsgrad = amsgrad

    def build(self, var_list: Sequence[Variable]) -> None:
        """Makes "m" and "v" per variable, and "vhat" with `amsgrad`."""
        super().build(var_list)
        if self._built:
            return
        self._momentums = [self.add_variable_from_reference(one, "m") for one in var_list]
        self._velocities = [self.add_variable_from_reference(one, "v") for one in var_list]
        self._velocity_hats = (
            [self.add_variable_from_reference(one, "vhat") for one in var_list] if self.amsgrad else []
        )
        self._built = True

    def update_step(self, gradient: Any, variable: Variable) -> None:
        index = self._index_dict[self._var_key(variable)]
        slots = [self._momentums[index], self._velocities[index]]
        if self.amsgrad:
            slots.append(self._velocity_hats[index])
        value, moved = _adam(
            variable.value,
            dense_gradient(gradient),
            [slot.value for slot in slots],
            cast_to(self.learning_rate.value, variable.dtype),
            step_number(self, variable),
            betas=(self.beta_1, self.beta_2),
            complements=(1 - self.beta_1, 1 - self.beta_2),
            epsilon=self.epsilon,
        )
        variable.assign(value)
        for slot, new in zip(slots, moved, strict=True):
            slot.assign(new)

    def get_config(self) -> dict[str, Any]:
        return self._with_own(super().get_config(), "beta_1", "beta_2", "epsilon", "amsgrad")


class AdamW(KerasAdam):
    """Adam after `w -= w * lr * weight_decay`: decay of the weights apart from the gradient (Loshchilov & Hutter,
    2019).

    2.9 itself subtracts `w * (1 - lr * weight_decay)`, which wipes out the weights in one step; here is what it and its
    successors document. It is Adam with a decay by default.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        name: str = "AdamW",
        **kwargs: Any,
    ) -> None:
        """Checks the arguments.

        Raises:
          ValueError: no weight decay, or as `KerasOptimizer`.
        """
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            amsgrad,
            clipnorm,
            clipvalue,
            global_clipnorm,
            use_ema,
            ema_momentum,
            ema_overwrite_frequency,
            jit_compile,
            name,
            weight_decay=weight_decay,
            **kwargs,
        )
        if weight_decay is None:
            raise ValueError(
                "Found no weight_decay. Expected a number. Use 0.004, the default, or the class Adam for none."
            )


def step_number(optimizer: KerasOptimizer, variable: Variable) -> Any:
    """The number of the step under way, from 1, in the variable's dtype."""
    return cast_to(optimizer.iterations.value + 1, variable.dtype)


def _adam(
    value: jax.Array,
    gradient: jax.Array,
    slots: list[jax.Array],
    rate: jax.Array,
    step: jax.Array,
    *,
    betas: tuple[float, float],
    complements: tuple[float, float],
    epsilon: float,
) -> tuple[jax.Array, list[jax.Array]]:
    """`slots` are m, v and, with amsgrad, the largest v so far."""
    first_power, second_power = (jnp.power(np.asarray(beta, value.dtype), step) for beta in betas)
    alpha = rate * jnp.sqrt(1 - second_power) / (1 - first_power)
    momentum, velocity, *largest = slots
    momentum = momentum + (gradient - momentum) * complements[0]
    velocity = velocity + (gradient * gradient - velocity) * complements[1]
    largest = [jnp.maximum(one, velocity) for one in largest]
    divisor = largest[0] if largest else velocity
    return value - momentum * alpha / (jnp.sqrt(divisor) + epsilon), [momentum, velocity, *largest]
