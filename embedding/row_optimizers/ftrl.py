"""`FTRL`: follow the regularized leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from podembed.embedding.kernels.row_vectors import clip, columns_of, jit, load, power, splat, square_root, store
from podembed.embedding.kernels.updates import decayed, gradient_of, limit_weight
from podembed.embedding.row_optimizers.base import (
    TENSORFLOW_ACCUMULATOR,
    ClipValue,
    LearningRate,
    Optimizer,
    SlotSpec,
    check_number,
    refuse,
)


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularized leader (McMahan et al. 2013, algorithm 1), per touched row, with p = -learning_rate_power:

    `a' = a + g²; z' = z + g - (a'^p - a^p) * w / lr; w = (clamp(z', -l1, l1) - z') / ((a'^p + beta) / lr + 2 * l2)`.
    `multiply_linear_by_learning_rate` stores z * lr instead of z. `allow_zero_accumulator` is accepted and changes
    nothing. Without `initial_accumulator_value`, `a` starts as that of `Adagrad`.
    """

    learning_rate: LearningRate = 0.001
    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = TENSORFLOW_ACCUMULATOR
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False
    low_dimensional_packing_status: bool = False
    tpu_message: ClassVar[tuple[str, dict[str, str]] | None] = (
        "ftrl",
        {
            "l1": "l1_regularization_strength",
            "l2": "l2_regularization_strength",
            "lr_power": "learning_rate_power",
            "beta": "beta",
            "multiply_linear_by_lr": "multiply_linear_by_learning_rate",
            "allow_zero_accumulator": "allow_zero_accumulator",
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.initial_accumulator_value > 0:
            found = f"initial_accumulator_value={self.initial_accumulator_value!r}"
            raise refuse(found, "more than 0", "Leave it out for 0.1.")
        # With a positive power a row would learn the faster the more gradients it has seen.
        check_number("learning_rate_power", self.learning_rate_power, most=0.0)
        for name in ("l1_regularization_strength", "l2_regularization_strength", "beta"):
            check_number(name, getattr(self, name), least=0.0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (
            SlotSpec(name="accumulator", width="element", initial_value=float(self.initial_accumulator_value)),
            SlotSpec(name="linear", width="element"),
        )

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        constants = (
            -float(self.learning_rate_power),
            float(self.l1_regularization_strength),
            float(self.l2_regularization_strength),
            float(self.beta),
            bool(self.multiply_linear_by_learning_rate),
        )
        return _update, constants

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        a, z = slots
        l1, l2 = float(self.l1_regularization_strength), float(self.l2_regularization_strength)
        exponent = -float(self.learning_rate_power)
        a_new = a + gradient * gradient
        p, p_new = (xp.sqrt(a), xp.sqrt(a_new)) if exponent == 0.5 else (a**exponent, a_new**exponent)
        if self.multiply_linear_by_learning_rate:
            l1 = l1 * rate
            z = z + rate * gradient - (p_new - p) * weight
            divisor = p_new + self.beta + 2.0 * l2 * rate
        else:
            z = z + gradient - (p_new - p) / rate * weight
            divisor = (p_new + self.beta) / rate + 2.0 * l2
        return (xp.clip(z, -l1, l1) - z) / divisor, [a_new, z]


@jit
def _update(
    width, dim, table, accumulator, linear, rows, head, following, gradients, learning_rate, limits,
    exponent, l1, l2, beta, linear_times_rate,
):  # fmt: skip
    rate, offset = splat(width, np.float32(learning_rate)), splat(width, np.float32(beta))
    scale = learning_rate if linear_times_rate else 1.0
    l1_low, l1_high = splat(width, np.float32(-l1 * scale)), splat(width, np.float32(l1 * scale))
    l2_twice = splat(width, np.float32(2.0 * l2 * scale))
    for u in range(rows.shape[0]):
        row = rows[u]
        for column in range(0, dim, columns_of(width)):
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            a = load(width, accumulator, row, column)
            a_new = a + g * g
            if exponent == 0.5:
                p, p_new = square_root(a), square_root(a_new)
            else:
                p, p_new = power(a, np.float32(exponent)), power(a_new, np.float32(exponent))
            z = load(width, linear, row, column)
            if linear_times_rate:
                z = z + rate * g - (p_new - p) * w
                divisor = p_new + offset + l2_twice
            else:
                z = z + g - (p_new - p) / rate * w
                divisor = (p_new + offset) / rate + l2_twice
            store(accumulator, row, column, a_new)
            store(linear, row, column, z)
            new = (clip(z, l1_low, l1_high) - z) / divisor
            store(table, row, column, limit_weight(width, new, limits))
