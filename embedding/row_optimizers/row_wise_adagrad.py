"""`RowWiseAdagrad`: one sum of squares a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.kernels.row_vectors import (
    columns_of,
    jit,
    load,
    load_float,
    prefetch_float,
    prefetch_to_write,
    splat,
    store,
    store_float,
    total,
    width_of,
)
from podembed.embedding.kernels.updates import AHEAD, decayed, gradient_of, limit_weight
from podembed.embedding.row_optimizers.base import ClipValue, LearningRate, Optimizer, SlotSpec, check_accumulator


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """`a += mean(g²) over the row; w -= lr * g / (sqrt(a) + epsilon)`: one number of state a row."""

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_accumulator(self.initial_accumulator_value, self.epsilon)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="accumulator", width="row", initial_value=self.initial_accumulator_value),)

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _update, (float(self.epsilon),)

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        g = gradient
        a = slots[0] + _sum_over_columns(g * g, xp) / weight.dtype.type(weight.shape[1])
        return weight - xp.asarray(rate, weight.dtype) / (xp.sqrt(a) + self.epsilon) * g, [a]


@jit
def _update(width, dim, table, accumulator, rows, head, following, gradients, learning_rate, limits, epsilon):
    step = columns_of(width)
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + AHEAD, last)]
        prefetch_float(accumulator, ahead)
        prefetch_to_write(width, table, ahead, 0)
        g = gradient_of(width, gradients, head, u, following, 0, limits)
        squares = total(g * g)
        for column in range(step, dim, step):
            prefetch_to_write(width, table, ahead, column)
            part = gradient_of(width, gradients, head, u, following, column, limits)
            squares += total(part * part)
        a = load_float(accumulator, row) + squares / np.float32(dim)
        store_float(accumulator, row, a)
        scale = splat(width, np.float32(learning_rate) / (np.sqrt(a) + np.float32(epsilon)))
        # A row of up to 128 columns is one part, whose gradient is still in registers; only wider ones are summed
        # again.
        w = decayed(width, load(width, table, row, 0), limits)
        store(table, row, 0, limit_weight(width, w - scale * g, limits))
        for column in range(step, dim, step):
            part = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            store(table, row, column, limit_weight(width, w - scale * part, limits))


def _sum_over_columns(values: Any, xp: Any) -> Any:
    """`[n, dim]` to `[n, 1]` in the order of `row_vectors.total`: parts of a row by halves, then part after part."""
    columns = width_of(values.shape[1]).columns
    parts = []
    for start in range(0, values.shape[1], columns):
        part = values[:, start : start + columns]
        padded = 1 << (columns - 1).bit_length()
        part = xp.concatenate([part, xp.zeros((len(part), padded - columns), part.dtype)], axis=1)
        while part.shape[1] > 1:
            half = part.shape[1] // 2
            part = part[:, :half] + part[:, half:]
        parts.append(part)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
