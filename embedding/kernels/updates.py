"""What the kernels of all row optimizers share, each one pass over the touched rows.

Order within a row: sum the gradients of its chain of entries (host order) and limit the sum. Then decay the weight,
apply the rule and limit the weight. All arithmetic is IEEE float32, element-wise, so the bits do not depend on the
machine. The rules themselves are in `row_optimizers`, one file each.

Common arguments: `table` and slots are matrices. `gradients` holds the address of each gradient row, since they lie
where each host's part was received. Where ids have weights it has two columns: the address of the bag's gradient and
the bits of the float32 weight that it is multiplied by.

Row `rows[u]` takes entries `head[u]`, `following[head[u]]`, ... of them, none if `head[u]` is -1; with `following`
None, the entries `head[u]` to `head[u + 1] - 1`. `limits` is (lowest gradient, highest gradient, decay, lowest weight,
highest weight), or None for none. Rows may repeat; they are then updated one after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from podembed.embedding.kernels.row_vectors import (
    ANYWHERE,
    HELPER,
    clip,
    columns_of,
    float_of_bits,
    inlined,
    jit,
    load,
    prefetch_to_read,
    splat,
    store,
)

# Rows from the one under way to the one that is fetched ahead.
AHEAD = 12
_ENTRIES_AHEAD = 24
_overload: Any = lambda function: overload(function, jit_options=HELPER)  # noqa: E731


@inlined
def gradient_of(width, gradients, head, u, following, column, limits):
    """The summed and limited gradient of one row."""
    return _limit_gradient(width, _sum_of_entries(width, gradients, head, u, following, column), limits)


@inlined
def _sum_of_chain(width, gradients, head, u, following, column):
    result = splat(width, np.float32(0.0))
    if head[u] >= 0:
        result = _gradient_at(width, gradients, head[u], column)
        entry = following[head[u]]
        while entry >= 0:
            result = result + _gradient_at(width, gradients, entry, column)
            entry = following[entry]
    return result


@inlined
def _sum_of_run(width, gradients, head, u, following, column):
    first, last = head[u], gradients.shape[0] - 1
    prefetch_to_read(width, ANYWHERE, _address(gradients, min(first + _ENTRIES_AHEAD, last)), column)
    result = _gradient_at(width, gradients, first, column)
    for entry in range(first + 1, head[u + 1]):
        prefetch_to_read(width, ANYWHERE, _address(gradients, min(entry + _ENTRIES_AHEAD, last)), column)
        result = result + _gradient_at(width, gradients, entry, column)
    return result


# With or without weights is chosen by numba, by the number of columns of `gradients`.


def _address(gradients, entry):
    """Where the gradient of an entry lies."""
    raise NotImplementedError


def _gradient_at(width, gradients, entry, column):
    """The gradient of an entry, times its weight if it has one."""
    raise NotImplementedError


@_overload(_address)
def _address_of(gradients, entry):
    if gradients.ndim == 1:
        return lambda gradients, entry: gradients[entry]
    return lambda gradients, entry: gradients[entry, 0]


@_overload(_gradient_at)
def _gradient_at_of(width, gradients, entry, column):
    def weighted(width, gradients, entry, column):
        gradient = load(width, ANYWHERE, gradients[entry, 0], column)
        return gradient * splat(width, float_of_bits(gradients[entry, 1]))

    def plain(width, gradients, entry, column):
        return load(width, ANYWHERE, gradients[entry], column)

    return plain if gradients.ndim == 1 else weighted


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


def decayed(width, weight, limits):
    """The weight before the rule."""
    raise NotImplementedError


def limit_weight(width, weight, limits):
    """The new weight within its limits."""
    raise NotImplementedError


@_overload(_limit_gradient)
def _limit_gradient_of(width, gradient, limits):
    def limited(width, gradient, limits):
        return clip(gradient, splat(width, np.float32(limits[0])), splat(width, np.float32(limits[1])))

    return (lambda width, gradient, limits: gradient) if isinstance(limits, types.NoneType) else limited


@_overload(decayed)
def _decay_of(width, weight, limits):
    def smaller(width, weight, limits):
        return weight - splat(width, np.float32(limits[2])) * weight

    return (lambda width, weight, limits: weight) if isinstance(limits, types.NoneType) else smaller


@_overload(limit_weight)
def _limit_weight_of(width, weight, limits):
    def limited(width, weight, limits):
        return clip(weight, splat(width, np.float32(limits[3])), splat(width, np.float32(limits[4])))

    return (lambda width, weight, limits: weight) if isinstance(limits, types.NoneType) else limited


@jit
def summed_gradients(width, dim, num_rows, head, following, gradients, limits, out):
    """The summed and limited gradients themselves, for rules that are not kernels."""
    for u in range(num_rows):
        for column in range(0, dim, columns_of(width)):
            store(out, u, column, gradient_of(width, gradients, head, u, following, column, limits))
