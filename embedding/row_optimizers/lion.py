"""`Lion`: steps of one size, in the direction of a momentum's sign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.kernels.row_vectors import (
    clip,
    columns_of,
    inlined,
    jit,
    load,
    prefetch_to_write,
    splat,
    store,
)
from podembed.embedding.kernels.updates import AHEAD, decayed, gradient_of, limit_weight
from podembed.embedding.row_optimizers.base import ClipValue, LearningRate, Optimizer, SlotSpec, refuse


@dataclass(frozen=True)
class Lion(Optimizer):
    """`w -= lr * sign(b1 * m + (1 - b1) * g); m = b2 * m + (1 - b2) * g`: Chen et al., Symbolic Discovery of
    Optimization Algorithms, 2023, algorithm 2.

    The sign of 0 is 0. The decay of the paper, lambda, is `weight_decay_factor` with
    `multiply_weight_decay_factor_by_learning_rate=True`. Every number of a row moves by the whole rate, so rates are 3
    to 10 times smaller than those of Adam.

    Lazy: only the rows that a batch names take a step. Between two batches that name a row, its m stands still and
    moves nothing, however many steps pass. So numbers are those of `optax.lion` while every step names every row.
    """

    learning_rate: LearningRate = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.99
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
        for name, beta in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0.0 <= beta < 1.0:
                raise refuse(f"{name}={beta!r}", "at least 0 and below 1", "Leave it out for the default.")

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="momentum", width="element"),)

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _update, (float(self.beta_1), float(self.beta_2))

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        b1, b2, m, g = self.beta_1, self.beta_2, slots[0], gradient
        return weight - rate * xp.sign(b1 * m + (1.0 - b1) * g), [b2 * m + (1.0 - b2) * g]


@inlined
def _sign(width, value):
    """-1, 0 or 1 in each column, exactly; not-a-number stays what it is.

    Two times 2^127 lifts even the smallest float32 above 1.
    """
    large, one = splat(width, np.float32(2.0**127)), splat(width, np.float32(1.0))
    return clip(value * large * large, splat(width, np.float32(-1.0)), one)


@jit
def _update(
    width, dim, table, momentum, rows, head, following, gradients, learning_rate, limits, beta_1, beta_2
):  # fmt: skip
    rate = splat(width, np.float32(learning_rate))
    keep_1, add_1 = splat(width, np.float32(beta_1)), splat(width, np.float32(1.0 - beta_1))
    keep_2, add_2 = splat(width, np.float32(beta_2)), splat(width, np.float32(1.0 - beta_2))
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + AHEAD, last)]
        for column in range(0, dim, columns_of(width)):
            prefetch_to_write(width, table, ahead, column)
            prefetch_to_write(width, momentum, ahead, column)
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            m = load(width, momentum, row, column)
            store(momentum, row, column, keep_2 * m + add_2 * g)
            step = _sign(width, keep_1 * m + add_1 * g)
            store(table, row, column, limit_weight(width, w - rate * step, limits))
