"""What the kernels compute, in plain numpy: the oracle of the tests and the other contender in `benchmarks/kernels.py`.

The functions carry the names of the kernels, return fresh arrays instead of filling given ones, and keep the order of
every sum; in float32 they give the kernels' bits (powers aside, where libraries differ in the last one), in float64 the
exact values to compare with.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from podembed.embedding.optimizers import Optimizer


def unique_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids in the order of first appearance, and the position in them of each id."""
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[inverse]


def pool(
    rows: np.ndarray, index: np.ndarray, row_splits: np.ndarray, weights: np.ndarray | None, combiner: str
) -> np.ndarray:
    """One combined vector a bag, `[B, dim]`."""
    out = np.zeros((len(row_splits) - 1, rows.shape[1]), rows.dtype)
    for bag, (start, stop) in enumerate(pairwise(row_splits)):
        total = np.zeros_like(out[bag])
        for j in range(start, stop):
            total = total + (rows[index[j]] if weights is None else rows[index[j]] * weights[j])
        divisor = denominator(stop - start, None if weights is None else weights[start:stop], combiner, rows.dtype)
        if divisor != 0:
            out[bag] = total / divisor
    return out


def sum_gradients(
    gradient: np.ndarray,
    index: np.ndarray,
    row_splits: np.ndarray,
    weights: np.ndarray | None,
    combiner: str,
    out: np.ndarray,
) -> np.ndarray:
    """`out` plus the gradient of every id at the row it stands for."""
    out = out.copy()
    for bag, (start, stop) in enumerate(pairwise(row_splits)):
        divisor = denominator(stop - start, None if weights is None else weights[start:stop], combiner, out.dtype)
        if divisor == 0:
            continue
        each = gradient[bag] / divisor
        for j in range(start, stop):
            out[index[j]] = out[index[j]] + (each if weights is None else each * weights[j])
    return out


def denominator(count: int, weights: np.ndarray | None, combiner: str, dtype: np.dtype) -> np.floating:
    """What a bag's sum is divided by; 0 for an empty bag."""
    if combiner == "sum":
        return dtype.type(count > 0)
    if weights is None:
        amount = dtype.type(count)
    else:
        amount = dtype.type(0)
        for weight in weights.astype(dtype):
            amount = amount + (weight if combiner == "mean" else weight * weight)
    return np.sqrt(amount) if combiner == "sqrtn" else amount


def update(
    optimizer: Optimizer,
    rows: np.ndarray,
    slots: dict[str, np.ndarray],
    local_rows: np.ndarray,
    gradients: np.ndarray,
    learning_rate: float,
) -> None:
    """One step of `Table.update`, in place, in the dtype of `rows`."""
    if not optimizer.use_gradient_accumulation:
        for row, gradient in zip(local_rows, gradients, strict=True):
            _update_rows(optimizer, rows, slots, np.array([row]), gradient[None].astype(rows.dtype), learning_rate)
        return
    touched, position = unique_ids(local_rows)
    if optimizer.touches_all_rows:
        touched, position = np.arange(len(rows)), local_rows
    summed = np.zeros((len(touched), rows.shape[1]), rows.dtype)
    for number, gradient in zip(position, gradients, strict=True):
        summed[number] = summed[number] + gradient
    _update_rows(optimizer, rows, slots, touched, summed, learning_rate)


def _update_rows(
    optimizer: Optimizer, rows: np.ndarray, slots: dict[str, np.ndarray], touched: np.ndarray, g: np.ndarray, lr: float
) -> None:
    if optimizer.clip_gradient_min is not None or optimizer.clip_gradient_max is not None:
        g = np.clip(g, optimizer.clip_gradient_min, optimizer.clip_gradient_max)
    decay = float(optimizer.weight_decay_factor or 0.0)
    if optimizer.multiply_weight_decay_factor_by_learning_rate:
        decay *= lr
    w = rows[touched]
    w = w - decay * w
    old = [slots[slot.name][touched] for slot in optimizer.slots]
    new_w, new = optimizer.oracle(w, old, g, lr)
    if optimizer.clip_weight_min is not None or optimizer.clip_weight_max is not None:
        new_w = np.clip(new_w, optimizer.clip_weight_min, optimizer.clip_weight_max)
    rows[touched] = new_w
    for slot, values in zip(optimizer.slots, new, strict=True):
        slots[slot.name][touched] = values
