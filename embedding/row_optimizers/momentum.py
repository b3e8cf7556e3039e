"""`Momentum`: SGD with heavy-ball or Nesterov momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.kernels.row_vectors import columns_of, jit, load, prefetch_to_write, splat, store
from podembed.embedding.kernels.updates import AHEAD, decayed, gradient_of, limit_weight
from podembed.embedding.row_optimizers.base import ClipValue, LearningRate, Optimizer, SlotSpec, check_number


@dataclass(frozen=True)
class Momentum(Optimizer):
    """`m = momentum * m + g; w -= lr * m`: SGD with the heavy ball of Polyak 1964, as `optax.sgd(lr, momentum)` and
    `torch.optim.SGD` have it.

    With `use_nesterov` the step is `lr * (momentum * m + g)`, with the new m (Sutskever et al., On the importance of
    initialization and momentum in deep learning, 2013, after a change of variables).

    Lazy: only the rows that a batch names take a step. Between two batches that name a row, its m stands still and
    moves nothing, however many steps pass. So numbers are those of optax while every step names every row.
    """

    learning_rate: LearningRate = 0.01
    momentum: float = 0.9
    use_nesterov: bool = False
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
        check_number("momentum", self.momentum, least=0.0, most=1.0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="momentum", width="element"),)

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _update, (float(self.momentum), bool(self.use_nesterov))

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        m = self.momentum * slots[0] + gradient
        return weight - rate * (self.momentum * m + gradient if self.use_nesterov else m), [m]


@jit
def _update(
    width, dim, table, momentum, rows, head, following, gradients, learning_rate, limits, beta, nesterov
):  # fmt: skip
    rate, keep = splat(width, np.float32(learning_rate)), splat(width, np.float32(beta))
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + AHEAD, last)]
        for column in range(0, dim, columns_of(width)):
            prefetch_to_write(width, table, ahead, column)
            prefetch_to_write(width, momentum, ahead, column)
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            m = keep * load(width, momentum, row, column) + g
            store(momentum, row, column, m)
            if nesterov:
                m = keep * m + g
            store(table, row, column, limit_weight(width, w - rate * m, limits))
