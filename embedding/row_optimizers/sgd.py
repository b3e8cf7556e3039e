"""`SGD`: no state beside the weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from podembed.embedding.kernels.row_vectors import columns_of, jit, load, prefetch_to_write, splat, store
from podembed.embedding.kernels.updates import AHEAD, decayed, gradient_of, limit_weight
from podembed.embedding.row_optimizers.base import ClipValue, LearningRate, Optimizer


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w -= lr * g`."""

    learning_rate: LearningRate = 0.01
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False
    tpu_message: ClassVar[tuple[str, dict[str, str]] | None] = ("stochastic_gradient_descent", {})

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _update, ()

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        return weight - rate * gradient, []


@jit
def _update(width, dim, table, rows, head, following, gradients, learning_rate, limits):
    rate = splat(width, np.float32(learning_rate))
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + AHEAD, last)]
        for column in range(0, dim, columns_of(width)):
            prefetch_to_write(width, table, ahead, column)
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            store(table, row, column, limit_weight(width, w - rate * g, limits))
