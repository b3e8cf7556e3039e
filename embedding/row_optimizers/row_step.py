"""One step of a row optimizer as arrays: which rows, with which gradients, within which limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from podembed.embedding.kernels.arrays import matrix_of, row_addresses
from podembed.embedding.kernels.row_vectors import width_of
from podembed.embedding.kernels.updates import summed_gradients

# Lowest gradient, highest gradient, decay, lowest weight, highest weight.
Limits: TypeAlias = tuple[float, float, float, float, float]
NO_LIMITS: Limits = (-math.inf, math.inf, 0.0, -math.inf, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TouchedRows:
    """The rows of one update and the gradient rows that belong to each, see `kernels.ids.merge`.

    Attributes:
      rows: int64 `[U]`, local rows.
      head: int32 `[U]`, the first gradient row of each, -1 for none; `[U + 1]` with `following` None.
      following: int32 `[m]`, the next gradient row of the same row, -1 after the last. None where the gradient rows of
        each row follow each other: then row u has those from `head[u]` to `head[u + 1] - 1`.
    """

    rows: np.ndarray
    head: np.ndarray
    following: np.ndarray | None

    def run(self, first: int, stop: int) -> TouchedRows:
        """Those from `first` to `stop - 1`."""
        head = self.head[first : stop + 1] if self.following is None else self.head[first:stop]
        return TouchedRows(rows=self.rows[first:stop], head=head, following=self.following)


@dataclass(frozen=True, slots=True, eq=False)
class RowStep:
    """What a rule works on.

    Attributes:
      rows, slots: the table's arrays, changed in place.
      touched: which rows, and which gradients belong to them.
      addresses: int64 `[m]`, of the gradient rows; `[m, 2]` with weights, see `kernels.updates`.
      limits: None where there is nothing to do.
    """

    rows: np.ndarray
    slots: Sequence[np.ndarray]
    touched: TouchedRows
    addresses: np.ndarray
    learning_rate: float
    limits: Limits | None

    @staticmethod
    def of(
        rows: np.ndarray,
        slots: Sequence[np.ndarray],
        touched: TouchedRows,
        gradients: Sequence[np.ndarray] | np.ndarray,
        learning_rate: float,
        limits: Limits | None,
    ) -> RowStep:
        """Arguments as `Optimizer.apply`."""
        addresses = gradients if isinstance(gradients, np.ndarray) else row_addresses(gradients, rows.shape[1])
        return RowStep(rows, slots, touched, addresses, float(learning_rate), limits)

    def summed_gradients(self) -> np.ndarray:
        """The summed and limited gradients, float32 `[U, dim]`, for rules that are not kernels."""
        touched, dim = self.touched, self.rows.shape[1]
        summed = np.empty((len(touched.rows), dim), np.float32)
        summed_gradients(
            width_of(dim),
            dim,
            len(touched.rows),
            touched.head,
            touched.following,
            self.addresses,
            self.limits,
            matrix_of(summed),
        )
        return summed


def run_kernel(step: RowStep, kernel: Callable[..., None], constants: tuple[Any, ...]) -> None:
    """Calls a compiled rule."""
    dim, touched = step.rows.shape[1], step.touched
    kernel(
        width_of(dim),
        dim,
        matrix_of(step.rows),
        *(matrix_of(slot) for slot in step.slots),
        touched.rows,
        touched.head,
        touched.following,
        step.addresses,
        step.learning_rate,
        step.limits,
        *constants,
    )
