"""Adam for rows as papers and their programs mean it."""

from __future__ import annotations

from collections.abc import Callable

from podembed.embedding import Adam

BETA_1, BETA_2 = 0.9, 0.999


def adam(learning_rate: float, *, is_lazy: bool = False) -> Adam:
    """With bias correction, and a step of every row. Source: Kingma and Ba, Adam: a method for stochastic optimization,
    2015.

    Args:
      is_lazy: only rows that a batch names take a step. That is cheaper where tables are large, and other numbers.
    """
    return Adam(_corrected(learning_rate), BETA_1, BETA_2, lazy_adam=is_lazy, sum_inside_sqrt=False)


def _corrected(learning_rate: float) -> Callable[[int], float]:
    def at(step: int) -> float:
        count = int(step) + 1
        return learning_rate * (1 - BETA_2**count) ** 0.5 / (1 - BETA_1**count)

    return at
