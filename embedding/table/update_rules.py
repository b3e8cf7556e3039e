"""Which kernel an optimizer means, and with which constants.

`apply_update` is the only door from an optimizer value to the arrays of a table. Custom rules are compiled by numba if
it understands them and otherwise run row by row in Python.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numba.core.errors import NumbaError

from podembed.embedding.kernels import updates as kernels_update
from podembed.embedding.kernels.arrays import matrix_of, row_addresses
from podembed.embedding.kernels.row_vectors import width_of
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Optimizer,
    RowWiseAdagrad,
)

Limits: TypeAlias = tuple[float, float, float, float, float]
_NO_LIMITS: Limits = (-math.inf, math.inf, 0.0, -math.inf, math.inf)
_MAX_COMPILED_SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TouchedRows:
    """The rows of one update and the gradient rows that belong to each, see `kernels_ids.merge`.

    Attributes:
      rows: int64 `[U]`, local rows.
      head: int32 `[U]`, the first gradient row of each, -1 for none; `[U + 1]` with `following` None.
      following: int32 `[m]`, the next gradient row of the same row, -1 after the last. None where the gradient rows of
        each row follow each other: then row u has those from `head[u]` to `head[u + 1] - 1`.
    """

    rows: np.ndarray
    head: np.ndarray
    following: np.ndarray | None


def apply_update(
    optimizer: Optimizer,
    *,
    rows: np.ndarray,
    slots: Sequence[np.ndarray],
    touched: TouchedRows,
    gradients: Sequence[np.ndarray] | np.ndarray,
    learning_rate: float,
) -> None:
    """Updates the touched rows and their slots in place.

    Args:
      rows: float32 `[R, dim]`.
      slots: of the optimizer, in their order, float32 `[R, dim or 1]` each.
      touched: which rows, and which gradients belong to them.
      gradients: float32 matrices with m rows of `dim` columns in all, or one int64 array of the addresses of m rows.
      learning_rate: of this step.

    Raises:
      ValueError: a matrix of another dtype or width.
    """
    limits = _limits(optimizer, learning_rate)
    dim = rows.shape[1]
    addresses = gradients if isinstance(gradients, np.ndarray) else row_addresses(gradients, dim)
    if isinstance(optimizer, CustomRowOptimizer):
        _apply_custom(optimizer, rows, slots, touched, addresses, learning_rate, limits)
        return
    kernel, constants = _kernel(optimizer)
    kernel(
        width_of(dim),
        dim,
        matrix_of(rows),
        *(matrix_of(slot) for slot in slots),
        touched.rows,
        touched.head,
        touched.following,
        addresses,
        float(learning_rate),
        limits,
        *constants,
    )


def _limits(optimizer: Optimizer, learning_rate: float) -> Limits | None:
    """(lowest gradient, highest gradient, decay, lowest weight, highest weight), or None where there is nothing to
    do.
    """
    decay = float(optimizer.weight_decay_factor or 0.0)
    if optimizer.multiply_weight_decay_factor_by_learning_rate:
        decay *= learning_rate
    limits = (
        -math.inf if optimizer.clip_gradient_min is None else float(optimizer.clip_gradient_min),
        math.inf if optimizer.clip_gradient_max is None else float(optimizer.clip_gradient_max),
        decay,
        -math.inf if optimizer.clip_weight_min is None else float(optimizer.clip_weight_min),
        math.inf if optimizer.clip_weight_max is None else float(optimizer.clip_weight_max),
    )
    return None if limits == _NO_LIMITS else limits


@cache
def _kernel(optimizer: Optimizer) -> tuple[Callable[..., None], tuple[Any, ...]]:
    match optimizer:
        case SGD():
            return kernels_update.sgd, ()
        case Adagrad():
            return kernels_update.adagrad, (float(optimizer.epsilon),)
        case RowWiseAdagrad():
            return kernels_update.row_wise_adagrad, (float(optimizer.epsilon),)
        case AdagradMomentum(momentum=momentum, use_nesterov=nesterov, exponent=exponent, beta2=beta2, epsilon=epsilon):
            constants = (float(momentum), bool(nesterov), float(exponent), float(beta2), float(epsilon))
            return kernels_update.adagrad_momentum, constants
        case Adam(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, sum_inside_sqrt=inside):
            return kernels_update.adam, (float(beta_1), float(beta_2), float(epsilon), bool(inside))
        case FTRL():
            constants = (
                -float(optimizer.learning_rate_power),
                float(optimizer.l1_regularization_strength),
                float(optimizer.l2_regularization_strength),
                float(optimizer.beta),
                bool(optimizer.multiply_linear_by_learning_rate),
            )
            return kernels_update.ftrl, constants
    raise ValueError(
        f"{optimizer!r} is an unsupported optimizer class. Expected one of podembed.embedding. Use CustomRowOptimizer."
    )


def _apply_custom(
    optimizer: CustomRowOptimizer,
    rows: np.ndarray,
    slots: Sequence[np.ndarray],
    touched: TouchedRows,
    addresses: np.ndarray,
    learning_rate: float,
    limits: Limits | None,
) -> None:
    dim = rows.shape[1]
    summed = np.empty((len(touched.rows), dim), np.float32)
    kernels_update.summed_gradients(
        width_of(dim), dim, len(touched.rows), touched.head, touched.following, addresses, limits, matrix_of(summed)
    )
    if not len(touched.rows):
        return
    custom_rule(optimizer, dim)(
        rows, tuple(slots), touched.rows, summed, float(learning_rate), (limits or _NO_LIMITS)[2:]
    )


def custom_rule(optimizer: CustomRowOptimizer, dim: int) -> Callable[..., None]:
    """The function that runs a custom rule over rows: compiled if numba can, otherwise in Python.

    Tried once on a row of zeros, so that an error of the rule itself shows before any row of the table has changed.

    Raises:
      ValueError: the rule returns something else than a row and its slots.
    """
    widths = tuple(slot.columns(dim) for slot in optimizer.slots)
    return _custom_rule(optimizer.update, tuple(dict(optimizer.hyperparameters).items()), dim, widths)


@cache
def _custom_rule(
    update: Callable[..., Any], constants: tuple[tuple[str, float], ...], dim: int, widths: tuple[int, ...]
) -> Callable[..., None]:
    names = [name for name, _ in constants]
    hyperparameters = namedtuple("hyperparameters", names)(*(float(value) for _, value in constants))
    _check_rule(update, hyperparameters, dim, widths)
    in_python = _rule_over_rows(update, hyperparameters, _take_slots, _put_slots)
    if len(widths) > _MAX_COMPILED_SLOTS:
        return in_python
    take, put = _TAKE_AND_PUT[len(widths)]
    compiled = njit(nogil=True)(_rule_over_rows(njit(update), hyperparameters, njit(take), njit(put)))
    trial = tuple(np.zeros((1, width), np.float32) for width in widths)
    row = np.zeros((1, dim), np.float32)
    try:
        compiled(row, trial, np.zeros(1, np.int64), row.copy(), 0.0, (0.0, 0.0, 0.0))
    except NumbaError:
        return in_python
    return compiled


def _check_rule(update: Callable[..., Any], hyperparameters: Any, dim: int, widths: tuple[int, ...]) -> None:
    slots = tuple(np.zeros(width, np.float32) for width in widths)
    with np.errstate(all="ignore"):
        result = update(np.zeros(dim, np.float32), np.zeros(dim, np.float32), slots, 0.0, hyperparameters)
    fits = (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[1], tuple)
        and len(result[1]) == len(widths)
    )
    if (
        not fits
        or np.shape(result[0]) != (dim,)
        or [np.shape(slot) for slot in result[1]] != [(width,) for width in widths]
    ):
        raise ValueError(
            f"The rule {update!r} returned {result!r} for a row of {dim} columns with slots of {widths} columns. "
            "Expected (new_row, (new_slot, ...)) of the same shapes. Return a tuple of slots even for one or none."
        )


def _rule_over_rows(
    update: Callable[..., Any], hyperparameters: Any, take: Callable[..., Any], put: Callable[..., Any]
) -> Callable[..., None]:
    def run(table, slots, rows, gradients, learning_rate, limits):
        for u in range(len(rows)):
            row = rows[u]
            weight = table[row] - np.float32(limits[0]) * table[row]
            new_weight, new_slots = update(gradients[u], weight, take(slots, row), learning_rate, hyperparameters)
            table[row] = np.minimum(np.maximum(new_weight, np.float32(limits[1])), np.float32(limits[2]))
            put(slots, row, new_slots)

    return run


def _take_slots(slots, row):
    return tuple(slot[row] for slot in slots)


def _put_slots(slots, row, new):
    for number in range(len(slots)):
        slots[number][row] = new[number]


def _put_nothing(slots, row, new):
    pass


# Numba builds a tuple only of a number of parts that it can see.
_TAKE_AND_PUT = (
    (lambda slots, row: (), _put_nothing),
    (lambda slots, row: (slots[0][row],), _put_slots),
    (lambda slots, row: (slots[0][row], slots[1][row]), _put_slots),
    (lambda slots, row: (slots[0][row], slots[1][row], slots[2][row]), _put_slots),
    (lambda slots, row: (slots[0][row], slots[1][row], slots[2][row], slots[3][row]), _put_slots),
)
