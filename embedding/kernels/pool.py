"""Kernels over rows: gather from a table, combine the rows of a sample, and go back from activation gradients to
rows.

A *bag* is the run of ids of one sample and feature. Sums run over a bag's ids in their order, and over bags in theirs,
in float32. The result therefore has the same bits each time, and the same as `reference.py`. Rows travel as values in
registers, see `row_vectors.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from podembed.embedding.kernels.arrays import can_stream, matrix_of, plain
from podembed.embedding.kernels.ids import bad_local_row
from podembed.embedding.kernels.row_vectors import (
    ANYWHERE,
    columns_of,
    inlined,
    jit,
    load,
    prefetch_to_read,
    prefetch_to_write,
    publish,
    splat,
    store,
    store_streaming,
    width_of,
)

SUM, MEAN, SQRTN = 0, 1, 2
COMBINER_CODES = {"sum": SUM, "mean": MEAN, "sqrtn": SQRTN}
_NO_WEIGHTS = np.empty(0, np.float32)
_AHEAD = 24


def gather(table: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies `table[rows[i]]` to `out[i]`.

    Args:
      table: float32 `[R, dim]`.
      rows: int64 `[n]`.
      out: float32 `[n, dim]`, columns side by side.

    Raises:
      ValueError: a row outside the table, or shapes that do not fit.
    """
    dim = table.shape[1]
    if len(out) < len(rows):
        raise ValueError(
            f"Found room for {len(out)} rows, for {len(rows)}. Expected as many. Allocate one output row per row."
        )
    target, given = matrix_of(out, dim), plain(rows, np.int64)
    bad = _gather(width_of(dim), dim, matrix_of(table), len(table), given, can_stream(out, dim), target)
    if bad >= 0:
        raise bad_local_row(int(rows[bad]), len(table))


@jit
def _gather(width, dim, table, num_rows, rows, streams, out):
    count = rows.shape[0]
    step = columns_of(width)
    for i in range(count):
        row = rows[i]
        if row < 0 or row >= num_rows:
            return i
        ahead = rows[min(i + _AHEAD, count - 1)]
        for column in range(0, dim, step):
            prefetch_to_read(width, table, ahead, column)
            if streams:
                store_streaming(out, i, column, load(width, table, row, column))
            else:
                store(out, i, column, load(width, table, row, column))
    publish()
    return -1


def gather_to(table: np.ndarray, rows: np.ndarray, addresses: np.ndarray) -> None:
    """Copies `table[rows[i]]` to an address.

    Args:
      table: float32 `[R, dim]`.
      rows: int64 `[n]`.
      addresses: int64 `[n]`, each with room for `dim` float32 side by side. The caller keeps them alive.

    Raises:
      ValueError: a row outside the table, or not one address a row.
    """
    dim = table.shape[1]
    if len(addresses) != len(rows):
        raise ValueError(f"Found {len(addresses)} addresses for {len(rows)} rows. Expected as many. Pass one a row.")
    given, targets = plain(rows, np.int64), plain(addresses, np.int64)
    bad = _gather_to(width_of(dim), dim, matrix_of(table), len(table), given, targets)
    if bad >= 0:
        raise bad_local_row(int(rows[bad]), len(table))


@jit
def _gather_to(width, dim, table, num_rows, rows, addresses):
    count = rows.shape[0]
    step = columns_of(width)
    for i in range(count):
        row = rows[i]
        if row < 0 or row >= num_rows:
            return i
        ahead = rows[min(i + _AHEAD, count - 1)]
        for column in range(0, dim, step):
            prefetch_to_read(width, table, ahead, column)
            store(ANYWHERE, addresses[i], column, load(width, table, row, column))
    return -1


def pool(
    rows: np.ndarray,
    index: np.ndarray,
    row_splits: np.ndarray,
    weights: np.ndarray | None,
    combiner: str,
    out: np.ndarray,
    *,
    bags: np.ndarray | None = None,
    is_packed: bool = False,
    streams: bool | None = None,
) -> None:
    """Combines the rows of each bag into one vector.

    With w = 1 where there are no weights: sum is `Σ w T`, mean `Σ w T / Σ w`, sqrtn `Σ w T / sqrt(Σ w²)`. An id that
    occurs twice counts twice. A zero denominator and an empty bag give a zero vector.

    Args:
      rows: float32 `[U, dim]`.
      index: int32 `[n]`, which of `rows` each id stands for. Not checked.
      row_splits: int64 `[B + 1]`, bag b holds ids `row_splits[b]` to `row_splits[b + 1]`, at most n.
      weights: float32 `[n]` or None.
      combiner: "sum", "mean" or "sqrtn".
      out: float32 `[B, dim]`, columns side by side, any distance from row to row; overwritten.
      bags: int64, those to combine; None for all. The others' vectors are left alone.
      is_packed: whether the vectors of `bags` are written one after another from the start of `out`, instead of each to
        its place.
      streams: whether `out` is a part of what `can_stream` allows to write past the caches; None asks it of `out`.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    dim = rows.shape[1]
    arguments = _bags(index, row_splits, weights, combiner, len(row_splits) - 1 if is_packed else len(out))
    target = matrix_of(out, dim)
    if bags is None:
        streams = can_stream(out, dim) if streams is None else streams
        pool_bags(width_of(dim), dim, matrix_of(rows), *arguments, streams, target)
        return
    if len(bags) and (bags[0] < 0 or bags[-1] >= len(row_splits) - 1 or len(bags) > len(out)):
        raise ValueError(
            f"Found bags {int(bags[0])} to {int(bags[-1])} of {len(row_splits) - 1}, with room for {len(out)}. "
            "Expected rising numbers of bags, and room for them."
        )
    streams = is_packed and (can_stream(out[: len(bags)], dim) if streams is None else streams)
    _pool_some(width_of(dim), dim, matrix_of(rows), *arguments, streams, target, plain(bags, np.int64), is_packed)


def pool_of(rows: np.ndarray, combiner: str) -> Callable[..., None]:
    """`pool` from rows that stay where they are, for callers to whom its checks cost more than its work: `(index,
    row_splits, weights, out)`, C-contiguous arrays as `pool` takes them. Nothing is checked.
    """
    dim, code, matrix = rows.shape[1], COMBINER_CODES[combiner], matrix_of(rows)
    width = width_of(dim)

    def run(index: np.ndarray, row_splits: np.ndarray, weights: np.ndarray | None, out: np.ndarray) -> None:
        has_weights = weights is not None
        given = weights if has_weights else _NO_WEIGHTS
        pool_bags(width, dim, matrix, index, row_splits, given, has_weights, code, False, matrix_of(out, dim))

    return run


def _bags(index: np.ndarray, row_splits: np.ndarray, weights: np.ndarray | None, combiner: str, num_bags: int):
    if len(row_splits) != num_bags + 1 or row_splits[-1] > len(index) or combiner not in COMBINER_CODES:
        raise ValueError(
            f"Found {len(row_splits)} row splits up to {row_splits[-1:]}, {len(index)} ids, {num_bags} bags, combiner "
            f"{combiner!r}. Expected one split more than bags, within the ids, and a combiner of "
            f"{', '.join(COMBINER_CODES)}. Pass one feature's parts."
        )
    if weights is not None and len(weights) != len(index):
        raise ValueError(
            f"Found {len(weights)} weights for {len(index)} ids. Expected one per id. Pass None for all ones."
        )
    checked = _NO_WEIGHTS if weights is None else plain(weights, np.float32)
    return plain(index, np.int32), plain(row_splits, np.int64), checked, weights is not None, COMBINER_CODES[combiner]


@inlined
def denominator(start, stop, weights, is_weighted, combiner):
    """What the sum over a bag is divided by, in float32; 0 for an empty bag."""
    if not is_weighted:
        amount = np.float32(stop - start)
    else:
        amount = np.float32(0.0)
        for j in range(start, stop):
            amount += weights[j] if combiner == MEAN else weights[j] * weights[j]
    if combiner == SUM:
        amount = np.float32(stop > start)
    elif combiner == SQRTN:
        amount = np.sqrt(amount)
    return amount


@inlined
def _pool_bag(width, rows, index, start, stop, last, weights, is_weighted, combiner, divisor, column):
    """The columns from `column` on of one bag's vector."""
    zero = splat(width, np.float32(0.0))
    total = zero
    if is_weighted:
        for j in range(start, stop):
            prefetch_to_read(width, rows, index[min(j + _AHEAD, last)], column)
            total = total + load(width, rows, index[j], column) * splat(width, weights[j])
    else:
        for j in range(start, stop):
            prefetch_to_read(width, rows, index[min(j + _AHEAD, last)], column)
            total = total + load(width, rows, index[j], column)
    if divisor == 0:
        total = zero
    elif combiner != SUM:
        total = total / splat(width, divisor)
    return total


@jit
def pool_bags(width, dim, rows, index, row_splits, weights, is_weighted, combiner, streams, out):
    step = columns_of(width)
    last = index.shape[0] - 1
    for bag in range(row_splits.shape[0] - 1):
        start, stop = row_splits[bag], row_splits[bag + 1]
        divisor = denominator(start, stop, weights, is_weighted, combiner)
        for column in range(0, dim, step):
            total = _pool_bag(width, rows, index, start, stop, last, weights, is_weighted, combiner, divisor, column)
            if streams:
                store_streaming(out, bag, column, total)
            else:
                store(out, bag, column, total)
    publish()


@jit
def _pool_some(width, dim, rows, index, row_splits, weights, is_weighted, combiner, streams, out, bags, is_packed):
    step = columns_of(width)
    last = index.shape[0] - 1
    for number in range(bags.shape[0]):
        bag = bags[number]
        start, stop = row_splits[bag], row_splits[bag + 1]
        divisor = denominator(start, stop, weights, is_weighted, combiner)
        target = np.int64(number) if is_packed else bag
        for column in range(0, dim, step):
            total = _pool_bag(width, rows, index, start, stop, last, weights, is_weighted, combiner, divisor, column)
            if streams:
                store_streaming(out, target, column, total)
            else:
                store(out, target, column, total)
    publish()


def sum_gradients(
    gradient: np.ndarray,
    index: np.ndarray,
    row_splits: np.ndarray,
    weights: np.ndarray | None,
    combiner: str,
    out: np.ndarray,
) -> None:
    """Adds the gradient of each id, `gradient of its bag / denominator * w`, to the row it stands for.

    Features that share a table are added into the same `out`, one call after another. No gradient flows to the weights.

    Args:
      gradient: float32 `[B, dim]` of the pooled vectors, columns side by side, any distance from row to row.
      index, row_splits, weights, combiner: as given to `pool`.
      out: float32 `[U, dim]`; added to, so zeros before the first feature.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    dim = out.shape[1]
    arguments = _bags(index, row_splits, weights, combiner, len(gradient))
    _sum_gradients(width_of(dim), dim, matrix_of(gradient, dim), *arguments, matrix_of(out))


@jit
def _sum_gradients(width, dim, gradient, index, row_splits, weights, is_weighted, combiner, out):
    step = columns_of(width)
    last = index.shape[0] - 1
    for bag in range(row_splits.shape[0] - 1):
        start, stop = row_splits[bag], row_splits[bag + 1]
        divisor = denominator(start, stop, weights, is_weighted, combiner)
        if divisor == 0:
            continue
        for column in range(0, dim, step):
            each = load(width, gradient, bag, column)
            if combiner != SUM:
                each = each / splat(width, divisor)
            if is_weighted:
                for j in range(start, stop):
                    prefetch_to_write(width, out, index[min(j + _AHEAD, last)], column)
                    row = index[j]
                    store(out, row, column, load(width, out, row, column) + each * splat(width, weights[j]))
            else:
                for j in range(start, stop):
                    prefetch_to_write(width, out, index[min(j + _AHEAD, last)], column)
                    row = index[j]
                    store(out, row, column, load(width, out, row, column) + each)
