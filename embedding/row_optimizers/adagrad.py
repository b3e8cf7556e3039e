"""`Adagrad`: a sum of squares for each element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from podembed.embedding.kernels.row_vectors import columns_of, jit, load, prefetch_to_write, splat, square_root, store
from podembed.embedding.kernels.updates import AHEAD, decayed, gradient_of, limit_weight
from podembed.embedding.row_optimizers.base import (
    TENSORFLOW_ACCUMULATOR,
    ClipValue,
    LearningRate,
    Optimizer,
    SlotSpec,
    check_accumulator,
)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """`a += g²; w -= lr * g / (sqrt(a) + epsilon)`; epsilon is 0 unless given, then the accumulator may start at 0.

    Without `initial_accumulator_value`, `a` starts at 0.1 as in TensorFlow, and in a job at what
    `JobConfig.initial_accumulator_value` says.
    """

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = TENSORFLOW_ACCUMULATOR
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False
    epsilon: float = field(default=0.0, kw_only=True)
    tpu_message: ClassVar[tuple[str, dict[str, str]] | None] = ("adagrad", {})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_accumulator(self.initial_accumulator_value, self.epsilon)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="accumulator", width="element", initial_value=float(self.initial_accumulator_value)),)

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _update, (float(self.epsilon),)

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        a = slots[0] + gradient * gradient
        return weight - rate * gradient / (xp.sqrt(a) + self.epsilon), [a]


@jit
def _update(width, dim, table, accumulator, rows, head, following, gradients, learning_rate, limits, epsilon):
    rate, eps = splat(width, np.float32(learning_rate)), splat(width, np.float32(epsilon))
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + AHEAD, last)]
        for column in range(0, dim, columns_of(width)):
            prefetch_to_write(width, table, ahead, column)
            prefetch_to_write(width, accumulator, ahead, column)
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            a = load(width, accumulator, row, column) + g * g
            store(accumulator, row, column, a)
            store(table, row, column, limit_weight(width, w - rate * g / (square_root(a) + eps), limits))
