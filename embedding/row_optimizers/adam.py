"""`Adam`: moving averages of the gradient and its square, of touched rows or of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from podembed.embedding.kernels.row_vectors import columns_of, jit, load, prefetch_to_write, splat, square_root, store
from podembed.embedding.kernels.updates import AHEAD, decayed, gradient_of, limit_weight
from podembed.embedding.row_optimizers.base import (
    ClipValue,
    LearningRate,
    Optimizer,
    SlotSpec,
    check_number,
    learning_rate_at,
    refuse,
)


@dataclass(frozen=True)
class _CorrectedRate:
    """The rate at each step, counted from 0. A value, so that equal optimizers are equal."""

    learning_rate: LearningRate
    beta_1: float
    beta_2: float

    def __call__(self, step: Any) -> float:
        count = int(step) + 1
        rate = learning_rate_at(self.learning_rate, int(step))
        return rate * (1 - self.beta_2**count) ** 0.5 / (1 - self.beta_1**count)


@dataclass(frozen=True)
class Adam(Optimizer):
    """`m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g²; w -= lr * m / sqrt(v + epsilon²)`, without bias
    correction.

    Without `sum_inside_sqrt` the divisor is `sqrt(v) + epsilon`. Without `lazy_adam` every row of the table takes the
    step, with g = 0 where no sample named it. `Adam.corrected` makes the one of optax and torch.

    `l2` adds `l2 * w` to the gradient of every row that takes a step, as `weight_decay` of `torch.optim.Adam` does: the
    gradient of `l2 / 2` times the sum of its squared numbers. `weight_decay_factor` is the decoupled decay of AdamW.
    """

    learning_rate: LearningRate = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-07
    lazy_adam: bool = True
    sum_inside_sqrt: bool = True
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False
    l2: float = field(default=0.0, kw_only=True)
    tpu_message: ClassVar[tuple[str, dict[str, str]] | None] = (
        "adam",
        {
            "beta1": "beta_1",
            "beta2": "beta_2",
            "epsilon": "epsilon",
            "use_non_lazy_adam": "not lazy_adam",
            "use_sum_inside_sqrt": "sum_inside_sqrt",
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beta in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0.0 <= beta < 1.0:
                raise refuse(f"{name}={beta!r}", "at least 0 and below 1", "Leave it out for the default.")
        if not self.epsilon > 0:
            raise refuse(f"epsilon={self.epsilon!r}", "more than 0", "Leave it out for 1e-7.")
        check_number("l2", self.l2, least=0.0)
        if not self.use_gradient_accumulation and not self.lazy_adam:
            raise refuse(
                "lazy_adam=False with use_gradient_accumulation=False",
                "accumulated gradients, since every row takes exactly one step",
                "Turn one of the two on.",
            )

    @classmethod
    def corrected(
        cls,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        lazy_adam: bool = False,
        **others: Any,
    ) -> Adam:
        """Adam with bias correction, where every row takes a step, as `optax.adam` and `torch.optim.Adam` do it.

        The rate of the update that follows t - 1 others is `learning_rate * sqrt(1 - b2^t) / (1 - b1^t)`. So epsilon
        stands beside a root that is not corrected yet: it is the epsilon hat of Kingma and Ba 2015, section 2.

        Args:
          lazy_adam: only rows that a batch names take a step. That is cheaper where tables are large, and other
            numbers.
          others: further arguments of the class.
        """
        rate = _CorrectedRate(learning_rate, beta_1, beta_2)
        return cls(rate, beta_1, beta_2, epsilon, lazy_adam, sum_inside_sqrt=False, **others)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="momentum", width="element"), SlotSpec(name="velocity", width="element"))

    @property
    def touches_all_rows(self) -> bool:
        return not self.lazy_adam

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _update, (
            float(self.beta_1),
            float(self.beta_2),
            float(self.epsilon),
            bool(self.sum_inside_sqrt),
            float(self.l2),
        )

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        b1, b2, g = self.beta_1, self.beta_2, gradient
        if self.l2:
            g = g + self.l2 * weight
        m = b1 * slots[0] + (1.0 - b1) * g
        v = b2 * slots[1] + (1.0 - b2) * (g * g)
        divisor = xp.sqrt(v + self.epsilon * self.epsilon) if self.sum_inside_sqrt else xp.sqrt(v) + self.epsilon
        return weight - rate * m / divisor, [m, v]


@jit
def _update(
    width, dim, table, momentum, velocity, rows, head, following, gradients, learning_rate, limits,
    beta_1, beta_2, epsilon, sum_inside_sqrt, l2,
):  # fmt: skip
    rate, eps = splat(width, np.float32(learning_rate)), splat(width, np.float32(epsilon))
    eps_squared = splat(width, np.float32(epsilon * epsilon))
    penalty = splat(width, np.float32(l2))
    keep_1, add_1 = splat(width, np.float32(beta_1)), splat(width, np.float32(1.0 - beta_1))
    keep_2, add_2 = splat(width, np.float32(beta_2)), splat(width, np.float32(1.0 - beta_2))
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + AHEAD, last)]
        for column in range(0, dim, columns_of(width)):
            prefetch_to_write(width, table, ahead, column)
            prefetch_to_write(width, momentum, ahead, column)
            prefetch_to_write(width, velocity, ahead, column)
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            if l2 != 0.0:
                g = g + penalty * w
            m = keep_1 * load(width, momentum, row, column) + add_1 * g
            v = keep_2 * load(width, velocity, row, column) + add_2 * (g * g)
            store(momentum, row, column, m)
            store(velocity, row, column, v)
            if sum_inside_sqrt:
                divisor = square_root(v + eps_squared)
            else:
                divisor = square_root(v) + eps
            store(table, row, column, limit_weight(width, w - rate * m / divisor, limits))
