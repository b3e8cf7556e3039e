"""An embedding in float64 numpy, written from the specification alone: combiners, gradients, row optimizers, and the
order of a pipeline.

Loops over samples and ids, no code of the package besides the declarations. Batches are lists of (ids, weights) per
sample and feature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    Lion,
    Momentum,
    Optimizer,
    RowWiseAdagrad,
)

Bag = list[tuple[int, float]]


@dataclass
class OracleTable:
    rows: np.ndarray
    slots: list[np.ndarray]
    optimizer: Optimizer

    @staticmethod
    def of(rows: np.ndarray, optimizer: Optimizer) -> OracleTable:
        shape = rows.shape
        slots = [np.full((shape[0], s.columns(shape[1])), s.initial_value, np.float64) for s in optimizer.slots]
        return OracleTable(rows.astype(np.float64), slots, optimizer)


@dataclass(frozen=True)
class OracleFeature:
    table: str
    combiner: str


class Oracle:
    """Tables by name, features by name. Without accumulation gradients come feature by feature, sample by sample, on
    any number of hosts.
    """

    def __init__(self, tables: dict[str, OracleTable], features: dict[str, OracleFeature]) -> None:
        self.tables = tables
        self.features = features

    def forward(self, batch: dict[str, list[Bag]]) -> dict[str, np.ndarray]:
        """Per feature `[num_bags, dim]`."""
        return {name: self._pooled(name, bags) for name, bags in batch.items()}

    def _pooled(self, name: str, bags: list[Bag]) -> np.ndarray:
        feature = self.features[name]
        rows = self.tables[feature.table].rows
        out = np.zeros((len(bags), rows.shape[1]))
        for at, bag in enumerate(bags):
            divisor = denominator(bag, feature.combiner)
            if divisor:
                out[at] = sum(w * rows[i] for i, w in bag) / divisor
        return out

    def backward(self, batch: dict[str, list[Bag]], gradients: dict[str, np.ndarray], rates: dict[str, float]) -> None:
        for name, table in self.tables.items():
            occurrences = []
            for feature_name, feature in self.features.items():
                if feature.table == name:
                    bags, upstream = batch[feature_name], gradients[feature_name]
                    occurrences += self._occurrences(bags, upstream, feature.combiner)
            update(table, occurrences, rates[name])

    @staticmethod
    def _occurrences(bags: list[Bag], gradient: np.ndarray, combiner: str) -> list[tuple[int, np.ndarray]]:
        found = []
        for bag, upstream in zip(bags, gradient, strict=True):
            divisor = denominator(bag, combiner)
            for i, w in bag:
                found.append((i, upstream * w / divisor if divisor else np.zeros_like(upstream)))
        return found


def denominator(bag: Bag, combiner: str) -> float:
    if combiner == "sum":
        return 1.0
    if combiner == "mean":
        return sum(w for _, w in bag)
    return math.sqrt(sum(w * w for _, w in bag))


def update(table: OracleTable, occurrences: Sequence[tuple[int, np.ndarray]], rate: float) -> None:
    """One step of one table."""
    optimizer = table.optimizer
    if not optimizer.use_gradient_accumulation:
        for row, gradient in occurrences:
            _update_row(table, row, gradient, rate)
        return
    sums: dict[int, np.ndarray] = {}
    for row, gradient in occurrences:
        sums[row] = sums.get(row, 0.0) + gradient
    if isinstance(optimizer, Adam) and not optimizer.lazy_adam:
        sums = {row: sums.get(row, np.zeros(table.rows.shape[1])) for row in range(len(table.rows))}
    for row, gradient in sums.items():
        _update_row(table, row, gradient, rate)


def _update_row(table: OracleTable, row: int, gradient: np.ndarray, rate: float) -> None:
    optimizer = table.optimizer
    low, high = optimizer.clipvalue if isinstance(optimizer.clipvalue, tuple) else (None, None)
    g = np.clip(gradient, -math.inf if low is None else low, math.inf if high is None else high)
    w = table.rows[row]
    if optimizer.weight_decay_factor:
        scale = rate if optimizer.multiply_weight_decay_factor_by_learning_rate else 1.0
        w = w - optimizer.weight_decay_factor * scale * w
    slots = [slot[row] for slot in table.slots]
    w, slots = _rule(optimizer, w, slots, g, rate)
    lowest, highest = optimizer.clip_weight_min, optimizer.clip_weight_max
    table.rows[row] = np.clip(w, -math.inf if lowest is None else lowest, math.inf if highest is None else highest)
    for slot, value in zip(table.slots, slots, strict=True):
        slot[row] = value


def _rule(o: Optimizer, w: np.ndarray, slots: list[np.ndarray], g: np.ndarray, lr: float):
    if isinstance(o, SGD):
        return w - lr * g, []
    if isinstance(o, Adagrad):
        a = slots[0] + g * g
        return w - lr * g / (np.sqrt(a) + o.epsilon), [a]
    if isinstance(o, RowWiseAdagrad):
        a = slots[0] + np.mean(g * g)
        return w - lr * g / (np.sqrt(a) + o.epsilon), [a]
    if isinstance(o, AdagradMomentum):
        a = slots[0] + g * g if o.beta2 == 1 else o.beta2 * slots[0] + (1 - o.beta2) * g * g
        s = g * (a + o.epsilon) ** (-1 / o.exponent)
        m = o.momentum * slots[1] + s
        return w - lr * (o.momentum * m + s if o.use_nesterov else m), [a, m]
    if isinstance(o, Momentum):
        m = o.momentum * slots[0] + g
        return w - lr * (o.momentum * m + g if o.use_nesterov else m), [m]
    if isinstance(o, Lion):
        direction = np.sign(o.beta_1 * slots[0] + (1 - o.beta_1) * g)
        return w - lr * direction, [o.beta_2 * slots[0] + (1 - o.beta_2) * g]
    if isinstance(o, Adam):
        m = o.beta_1 * slots[0] + (1 - o.beta_1) * g
        v = o.beta_2 * slots[1] + (1 - o.beta_2) * g * g
        divisor = np.sqrt(v + o.epsilon**2) if o.sum_inside_sqrt else np.sqrt(v) + o.epsilon
        return w - lr * m / divisor, [m, v]
    assert isinstance(o, FTRL)
    return _ftrl(o, w, slots, g, lr)


def _ftrl(o: FTRL, w: np.ndarray, slots: list[np.ndarray], g: np.ndarray, lr: float):
    a, z = slots
    p, l1, l2 = -o.learning_rate_power, o.l1_regularization_strength, o.l2_regularization_strength
    new_a = a + g * g
    if o.multiply_linear_by_learning_rate:
        new_z = z + lr * g - (new_a**p - a**p) * w
        return (np.clip(new_z, -lr * l1, lr * l1) - new_z) / (new_a**p + o.beta + 2 * lr * l2), [new_a, new_z]
    new_z = z + g - (new_a**p - a**p) * w / lr
    return (np.clip(new_z, -l1, l1) - new_z) / ((new_a**p + o.beta) / lr + 2 * l2), [new_a, new_z]
