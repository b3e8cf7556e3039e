"""`AdagradMomentum`: Adagrad whose scaled gradients build up a momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from podembed.embedding.kernels.row_vectors import columns_of, jit, load, power, splat, square_root, store
from podembed.embedding.kernels.updates import decayed, gradient_of, limit_weight
from podembed.embedding.row_optimizers.base import ClipValue, LearningRate, Optimizer, SlotSpec, check_number, refuse


@dataclass(frozen=True)
class AdagradMomentum(Optimizer):
    """`a += g²` (or its moving average), `s = g * (a + epsilon)^(-1/exponent)`, `m = momentum * m + s`, `w -= lr * m`.

    With `use_nesterov` the step is `lr * (momentum * m + s)`, with the new m.
    """

    learning_rate: LearningRate = 0.001
    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2
    beta2: float = 1
    epsilon: float = 1e-10
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False
    tpu_message: ClassVar[tuple[str, dict[str, str]] | None] = (
        "adagrad_momentum",
        {name: name for name in ("momentum", "use_nesterov", "exponent", "beta2", "epsilon")},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon > 0:
            raise refuse(f"epsilon={self.epsilon!r}", "more than 0", "Leave it out for 1e-10.")
        if not self.exponent > 0:
            raise refuse(f"exponent={self.exponent!r}", "more than 0", "Leave it out for 2.")
        check_number("momentum", self.momentum, least=0.0, most=1.0)
        check_number("beta2", self.beta2, least=0.0, most=1.0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="accumulator", width="element"), SlotSpec(name="momentum", width="element"))

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        constants = (self.momentum, bool(self.use_nesterov), self.exponent, self.beta2, self.epsilon)
        return _update, tuple(one if isinstance(one, bool) else float(one) for one in constants)

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        a, m = slots
        g, beta2, exponent = gradient, float(self.beta2), float(self.exponent)
        a = a + g * g if beta2 == 1 else beta2 * a + (1.0 - beta2) * (g * g)
        scaled = g / xp.sqrt(a + self.epsilon) if exponent == 2 else g * (a + self.epsilon) ** (-1.0 / exponent)
        m = self.momentum * m + scaled
        return weight - rate * (self.momentum * m + scaled if self.use_nesterov else m), [a, m]


@jit
def _update(
    width, dim, table, accumulator, momentum, rows, head, following, gradients, learning_rate, limits,
    beta, nesterov, exponent, beta2, epsilon,
):  # fmt: skip
    rate, eps, keep = (
        splat(width, np.float32(learning_rate)),
        splat(width, np.float32(epsilon)),
        splat(width, np.float32(beta)),
    )
    old_share, new_share = splat(width, np.float32(beta2)), splat(width, np.float32(1.0 - beta2))
    for u in range(rows.shape[0]):
        row = rows[u]
        for column in range(0, dim, columns_of(width)):
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            a = load(width, accumulator, row, column)
            if beta2 == 1.0:
                a = a + g * g
            else:
                a = old_share * a + new_share * (g * g)
            store(accumulator, row, column, a)
            if exponent == 2.0:
                s = g / square_root(a + eps)
            else:
                s = g * power(a + eps, np.float32(-1.0 / exponent))
            m = keep * load(width, momentum, row, column) + s
            store(momentum, row, column, m)
            if nesterov:
                m = keep * m + s
            store(table, row, column, limit_weight(width, w - rate * m, limits))
