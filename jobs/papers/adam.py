"""Adam for rows as papers and their programs mean it."""

from __future__ import annotations

from podembed.embedding import Adam


def adam(learning_rate: float, *, is_lazy: bool = False) -> Adam:
    """With bias correction, and a step of every row. Source: Kingma and Ba, Adam: a method for stochastic optimization,
    2015.

    Args:
      is_lazy: only rows that a batch names take a step. That is cheaper where tables are large, and other numbers.
    """
    return Adam.corrected(learning_rate, epsilon=1e-7, lazy_adam=is_lazy)
