"""What the kernels compute, in plain numpy: the oracle of the tests and the other contender in `benchmarks/kernels.py`.

The functions carry the names of the kernels, return fresh arrays instead of filling given ones, and keep the order of
every sum; in float32 they give the kernels' bits (powers aside, where libraries differ in the last one), in float64 the
exact values to compare with.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

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


def unique_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids in the order of first appearance, and the position in them of each id."""
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[inverse]


def route(
    unique: np.ndarray, bucket_owner: np.ndarray, bucket_local: np.ndarray, *, rows_per_bucket: int, num_hosts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids per owner, rows at the owners in owner order, place of each id among them)."""
    bucket, row_in_bucket = unique % len(bucket_owner), unique // len(bucket_owner)
    owner = bucket_owner[bucket]
    order = np.argsort(owner, kind="stable")
    local_rows = (bucket_local[bucket].astype(np.int64) * rows_per_bucket + row_in_bucket)[order]
    position = np.empty(len(unique), np.int32)
    position[order] = np.arange(len(unique))
    return np.bincount(owner, minlength=num_hosts), local_rows, position


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
    new_w, new = _rule(optimizer, w, old, g, lr)
    if optimizer.clip_weight_min is not None or optimizer.clip_weight_max is not None:
        new_w = np.clip(new_w, optimizer.clip_weight_min, optimizer.clip_weight_max)
    rows[touched] = new_w
    for slot, values in zip(optimizer.slots, new, strict=True):
        slots[slot.name][touched] = values


def _rule(
    optimizer: Optimizer, w: np.ndarray, slots: list[np.ndarray], g: np.ndarray, lr: float
) -> tuple[np.ndarray, list[np.ndarray]]:
    match optimizer:
        case SGD():
            return w - lr * g, []
        case Adagrad(epsilon=epsilon):
            a = slots[0] + g * g
            return w - lr * g / (np.sqrt(a) + epsilon), [a]
        case RowWiseAdagrad(epsilon=epsilon):
            a = slots[0] + _sum_over_columns(g * g) / w.dtype.type(w.shape[1])
            return w - w.dtype.type(lr) / (np.sqrt(a) + epsilon) * g, [a]
        case AdagradMomentum():
            return _adagrad_momentum(optimizer, w, slots, g, lr)
        case FTRL():
            return _ftrl(optimizer, w, slots, g, lr)
        case Adam(beta_1=b1, beta_2=b2, epsilon=epsilon):
            m = b1 * slots[0] + (1.0 - b1) * g
            v = b2 * slots[1] + (1.0 - b2) * (g * g)
            divisor = np.sqrt(v + epsilon * epsilon) if optimizer.sum_inside_sqrt else np.sqrt(v) + epsilon
            return w - lr * m / divisor, [m, v]
        case CustomRowOptimizer():
            raise ValueError(
                f"Found {optimizer!r}. Expected a built-in rule: a custom one is its own reference. Call its update."
            )
    raise ValueError(f"Found {optimizer!r}. Expected one of embedding.optimizers. Add its rule here.")


def _sum_over_columns(values: np.ndarray) -> np.ndarray:
    """`[n, dim]` to `[n, 1]` in the order of `row_values.total`: parts of a row by halves, then part after part."""
    columns = width_of(values.shape[1]).columns
    parts = []
    for start in range(0, values.shape[1], columns):
        part = values[:, start : start + columns]
        padded = 1 << (columns - 1).bit_length()
        part = np.concatenate([part, np.zeros((len(part), padded - columns), part.dtype)], axis=1)
        while part.shape[1] > 1:
            half = part.shape[1] // 2
            part = part[:, :half] + part[:, half:]
        parts.append(part)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _adagrad_momentum(
    optimizer: AdagradMomentum, w: np.ndarray, slots: list[np.ndarray], g: np.ndarray, lr: float
) -> tuple[np.ndarray, list[np.ndarray]]:
    a, m = slots
    beta2, exponent = float(optimizer.beta2), float(optimizer.exponent)
    a = a + g * g if beta2 == 1 else beta2 * a + (1.0 - beta2) * (g * g)
    scaled = g / np.sqrt(a + optimizer.epsilon) if exponent == 2 else g * (a + optimizer.epsilon) ** (-1.0 / exponent)
    m = optimizer.momentum * m + scaled
    return w - lr * (optimizer.momentum * m + scaled if optimizer.use_nesterov else m), [a, m]


def _ftrl(
    optimizer: FTRL, w: np.ndarray, slots: list[np.ndarray], g: np.ndarray, lr: float
) -> tuple[np.ndarray, list[np.ndarray]]:
    a, z = slots
    l1, l2 = float(optimizer.l1_regularization_strength), float(optimizer.l2_regularization_strength)
    exponent = -float(optimizer.learning_rate_power)
    a_new = a + g * g
    p, p_new = (np.sqrt(a), np.sqrt(a_new)) if exponent == 0.5 else (a**exponent, a_new**exponent)
    if optimizer.multiply_linear_by_learning_rate:
        l1 = l1 * lr
        z = z + lr * g - (p_new - p) * w
        divisor = p_new + optimizer.beta + 2.0 * l2 * lr
    else:
        z = z + g - (p_new - p) / lr * w
        divisor = (p_new + optimizer.beta) / lr + 2.0 * l2
    return (np.clip(z, -l1, l1) - z) / divisor, [a_new, z]
