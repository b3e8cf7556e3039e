"""The update rules, each one pass over the touched rows.

Order within a row: sum the gradients of its chain of entries (host order), limit the sum, decay the weight, apply the
rule, limit the weight. Formulas are those of the TPU embedding engine; all arithmetic is IEEE float32, element-wise, so
the bits do not depend on the machine. The numpy versions are in `reference.py`, the choice of rule in
`update_rules.py`.

Common arguments: `table` and slots are matrices. `gradients` holds the address of each gradient row, since they lie
where each host's part was received. Row `rows[u]` takes entries `head[u]`, `following[head[u]]`, ... of them, none if
`head[u]` is -1; with `following` None, the entries `head[u]` to `head[u + 1] - 1`. `limits` is (lowest gradient,
highest gradient, decay, lowest weight, highest weight), or None for none. Rows may repeat; they are then updated one
after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from podembed.embedding.kernels.row_vectors import (
    ANYWHERE,
    clip,
    columns_of,
    inlined,
    jit,
    load,
    load_float,
    power,
    prefetch_float,
    prefetch_to_read,
    prefetch_to_write,
    splat,
    square_root,
    store,
    store_float,
    total,
)

_AHEAD = 6
_ENTRIES_AHEAD = 12
_overload: Any = lambda function: overload(function, inline="always")  # noqa: E731


@inlined
def _gradient(width, gradients, head, u, following, column, limits):
    """The summed and limited gradient of one row."""
    return _limit_gradient(width, _sum_of_entries(width, gradients, head, u, following, column), limits)


@inlined
def _sum_of_chain(width, gradients, head, u, following, column):
    result = splat(width, np.float32(0.0))
    if head[u] >= 0:
        result = load(width, ANYWHERE, gradients[head[u]], column)
        entry = following[head[u]]
        while entry >= 0:
            result = result + load(width, ANYWHERE, gradients[entry], column)
            entry = following[entry]
    return result


@inlined
def _sum_of_run(width, gradients, head, u, following, column):
    first, last = head[u], gradients.shape[0] - 1
    prefetch_to_read(width, ANYWHERE, gradients[min(first + _ENTRIES_AHEAD, last)], column)
    result = load(width, ANYWHERE, gradients[first], column)
    for entry in range(first + 1, head[u + 1]):
        prefetch_to_read(width, ANYWHERE, gradients[min(entry + _ENTRIES_AHEAD, last)], column)
        result = result + load(width, ANYWHERE, gradients[entry], column)
    return result


def _sum_of_entries(width, gradients, head, u, following, column):
    """The sum over the entries of a row; numba chooses how they are listed by the type of `following`."""
    raise NotImplementedError


@_overload(_sum_of_entries)
def _sum_of_entries_of(width, gradients, head, u, following, column):
    if isinstance(following, types.NoneType):
        return lambda width, gradients, head, u, following, column: _sum_of_run(
            width, gradients, head, u, following, column
        )
    return lambda width, gradients, head, u, following, column: _sum_of_chain(
        width, gradients, head, u, following, column
    )


# The three functions below are chosen by numba, by the type of `limits`: with None, the usual case, they cost nothing.


def _limit_gradient(width, gradient, limits):
    """The gradient within its limits."""
    raise NotImplementedError


def _decay(width, weight, limits):
    """The weight before the rule."""
    raise NotImplementedError


def _limit_weight(width, weight, limits):
    """The new weight within its limits."""
    raise NotImplementedError


@_overload(_limit_gradient)
def _limit_gradient_of(width, gradient, limits):
    def limited(width, gradient, limits):
        return clip(gradient, splat(width, np.float32(limits[0])), splat(width, np.float32(limits[1])))

    return (lambda width, gradient, limits: gradient) if isinstance(limits, types.NoneType) else limited


@_overload(_decay)
def _decay_of(width, weight, limits):
    def decayed(width, weight, limits):
        return weight - splat(width, np.float32(limits[2])) * weight

    return (lambda width, weight, limits: weight) if isinstance(limits, types.NoneType) else decayed


@_overload(_limit_weight)
def _limit_weight_of(width, weight, limits):
    def limited(width, weight, limits):
        return clip(weight, splat(width, np.float32(limits[3])), splat(width, np.float32(limits[4])))

    return (lambda width, weight, limits: weight) if isinstance(limits, types.NoneType) else limited


@jit
def sgd(width, dim, table, rows, head, following, gradients, learning_rate, limits):
    rate = splat(width, np.float32(learning_rate))
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + _AHEAD, last)]
        for column in range(0, dim, columns_of(width)):
            prefetch_to_write(width, table, ahead, column)
            g = _gradient(width, gradients, head, u, following, column, limits)
            w = _decay(width, load(width, table, row, column), limits)
            store(table, row, column, _limit_weight(width, w - rate * g, limits))


@jit
def adagrad(width, dim, table, accumulator, rows, head, following, gradients, learning_rate, limits, epsilon):
    rate, eps = splat(width, np.float32(learning_rate)), splat(width, np.float32(epsilon))
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + _AHEAD, last)]
        for column in range(0, dim, columns_of(width)):
            prefetch_to_write(width, table, ahead, column)
            prefetch_to_write(width, accumulator, ahead, column)
            g = _gradient(width, gradients, head, u, following, column, limits)
            w = _decay(width, load(width, table, row, column), limits)
            a = load(width, accumulator, row, column) + g * g
            store(accumulator, row, column, a)
            store(table, row, column, _limit_weight(width, w - rate * g / (square_root(a) + eps), limits))


@jit
def row_wise_adagrad(width, dim, table, accumulator, rows, head, following, gradients, learning_rate, limits, epsilon):
    step = columns_of(width)
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + _AHEAD, last)]
        prefetch_float(accumulator, ahead)
        prefetch_to_write(width, table, ahead, 0)
        g = _gradient(width, gradients, head, u, following, 0, limits)
        squares = total(g * g)
        for column in range(step, dim, step):
            prefetch_to_write(width, table, ahead, column)
            part = _gradient(width, gradients, head, u, following, column, limits)
            squares += total(part * part)
        a = load_float(accumulator, row) + squares / np.float32(dim)
        store_float(accumulator, row, a)
        scale = splat(width, np.float32(learning_rate) / (np.sqrt(a) + np.float32(epsilon)))
        # A row of up to 128 columns is one part, whose gradient is still in registers; only wider ones are summed
        # again.
        w = _decay(width, load(width, table, row, 0), limits)
        store(table, row, 0, _limit_weight(width, w - scale * g, limits))
        for column in range(step, dim, step):
            part = _gradient(width, gradients, head, u, following, column, limits)
            w = _decay(width, load(width, table, row, column), limits)
            store(table, row, column, _limit_weight(width, w - scale * part, limits))


@jit
def adagrad_momentum(
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
            g = _gradient(width, gradients, head, u, following, column, limits)
            w = _decay(width, load(width, table, row, column), limits)
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
            store(table, row, column, _limit_weight(width, w - rate * m, limits))


@jit
def adam(
    width, dim, table, momentum, velocity, rows, head, following, gradients, learning_rate, limits,
    beta_1, beta_2, epsilon, sum_inside_sqrt,
):  # fmt: skip
    rate, eps = splat(width, np.float32(learning_rate)), splat(width, np.float32(epsilon))
    eps_squared = splat(width, np.float32(epsilon * epsilon))
    keep_1, add_1 = splat(width, np.float32(beta_1)), splat(width, np.float32(1.0 - beta_1))
    keep_2, add_2 = splat(width, np.float32(beta_2)), splat(width, np.float32(1.0 - beta_2))
    last = rows.shape[0] - 1
    for u in range(rows.shape[0]):
        row, ahead = rows[u], rows[min(u + _AHEAD, last)]
        for column in range(0, dim, columns_of(width)):
            prefetch_to_write(width, table, ahead, column)
            prefetch_to_write(width, momentum, ahead, column)
            prefetch_to_write(width, velocity, ahead, column)
            g = _gradient(width, gradients, head, u, following, column, limits)
            w = _decay(width, load(width, table, row, column), limits)
            m = keep_1 * load(width, momentum, row, column) + add_1 * g
            v = keep_2 * load(width, velocity, row, column) + add_2 * (g * g)
            store(momentum, row, column, m)
            store(velocity, row, column, v)
            if sum_inside_sqrt:
                divisor = square_root(v + eps_squared)
            else:
                divisor = square_root(v) + eps
            store(table, row, column, _limit_weight(width, w - rate * m / divisor, limits))


@jit
def ftrl(
    width, dim, table, accumulator, linear, rows, head, following, gradients, learning_rate, limits,
    exponent, l1, l2, beta, linear_times_rate,
):  # fmt: skip
    rate, offset = splat(width, np.float32(learning_rate)), splat(width, np.float32(beta))
    scale = learning_rate if linear_times_rate else 1.0
    l1_low, l1_high = splat(width, np.float32(-l1 * scale)), splat(width, np.float32(l1 * scale))
    l2_twice = splat(width, np.float32(2.0 * l2 * scale))
    for u in range(rows.shape[0]):
        row = rows[u]
        for column in range(0, dim, columns_of(width)):
            g = _gradient(width, gradients, head, u, following, column, limits)
            w = _decay(width, load(width, table, row, column), limits)
            a = load(width, accumulator, row, column)
            a_new = a + g * g
            if exponent == 0.5:
                p, p_new = square_root(a), square_root(a_new)
            else:
                p, p_new = power(a, np.float32(exponent)), power(a_new, np.float32(exponent))
            z = load(width, linear, row, column)
            if linear_times_rate:
                z = z + rate * g - (p_new - p) * w
                divisor = p_new + offset + l2_twice
            else:
                z = z + g - (p_new - p) / rate * w
                divisor = (p_new + offset) / rate + l2_twice
            store(accumulator, row, column, a_new)
            store(linear, row, column, z)
            new = (clip(z, l1_low, l1_high) - z) / divisor
            store(table, row, column, _limit_weight(width, new, limits))


@jit
def summed_gradients(width, dim, num_rows, head, following, gradients, limits, out):
    """The summed and limited gradients themselves, for rules that are not kernels."""
    for u in range(num_rows):
        for column in range(0, dim, columns_of(width)):
            store(out, u, column, _gradient(width, gradients, head, u, following, column, limits))
