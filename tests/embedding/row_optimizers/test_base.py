"""A row optimizer is one file: arguments, slots, compiled rule, constants and oracle; the table of them is complete."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podembed.embedding
from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import Uniform
from podembed.embedding.kernels.row_vectors import columns_of, jit, load, splat, store
from podembed.embedding.kernels.updates import decayed, gradient_of, limit_weight
from podembed.embedding.optimizers import ROW_OPTIMIZERS
from podembed.embedding.row_optimizers.base import LearningRate, Optimizer, SlotSpec
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from tests.embedding import reference


@dataclass(frozen=True)
class _HeavyBall(Optimizer):
    """`m = keep * m + g; w -= lr * m`."""

    keep: float = 0.5
    learning_rate: LearningRate = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_max: float | None = None

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="momentum", width="element"),)

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _update, (float(self.keep),)

    def oracle(
        self, weight: np.ndarray, slots: Sequence[np.ndarray], gradient: np.ndarray, rate: float
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        m = self.keep * slots[0] + gradient
        return weight - rate * m, [m]


@jit
def _update(width, dim, table, momentum, rows, head, following, gradients, learning_rate, limits, keep):
    rate, kept = splat(width, np.float32(learning_rate)), splat(width, np.float32(keep))
    for u in range(rows.shape[0]):
        row = rows[u]
        for column in range(0, dim, columns_of(width)):
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            m = kept * load(width, momentum, row, column) + g
            store(momentum, row, column, m)
            store(table, row, column, limit_weight(width, w - rate * m, limits))


@pytest.mark.parametrize("clip_weight_max", [None, 0.2])
def test_a_new_optimizer_needs_nothing_outside_its_file(clip_weight_max: float | None) -> None:
    optimizer = _HeavyBall(clip_weight_max=clip_weight_max)
    table = Table(TableSpec.of(TableConfig(12, 8, Uniform(-0.5, 0.5), optimizer, name="t"), seed=0), np.array([0]))
    table.initialize()
    rows, slots = table.rows.copy(), {name: slot.copy() for name, slot in table.slots.items()}
    rng = np.random.default_rng(0)
    for _ in range(3):
        touched, gradients = rng.integers(0, 12, 9), rng.standard_normal((9, 8)).astype(np.float32)
        table.update(touched, gradients, 0.1)
        reference.update(optimizer, rows, slots, touched, gradients, 0.1)
    assert np.array_equal(table.rows, rows)
    assert np.array_equal(table.slots["momentum"], slots["momentum"])


def test_the_table_has_every_optimizer_and_users_can_import_it() -> None:
    folder = Path(podembed.embedding.__file__).parent / "row_optimizers"
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    written = {one.name for one in classes if any(getattr(base, "id", "") == "Optimizer" for base in one.bases)}
    assert {cls.__name__ for cls in ROW_OPTIMIZERS} == written
    assert written <= set(podembed.embedding.__all__)
