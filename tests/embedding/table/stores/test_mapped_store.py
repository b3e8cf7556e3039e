"""Rows in memory-mapped files, beside rows in memory: the same bytes, whatever is asked of a table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Lion,
    Momentum,
    Optimizer,
    RowWiseAdagrad,
    SlotSpec,
)
from podembed.embedding.table.table import Table, kind_of
from podembed.embedding.table_spec import TableSpec
from tests.embedding.table.stores.mapped_store import MappedStores


def with_velocity(gradient, row, slots, learning_rate, hyperparameters):
    velocity = 0.9 * slots[0] + gradient
    return row - learning_rate * velocity, (velocity,)


OPTIMIZERS: list[Optimizer] = [
    SGD(0.1, weight_decay_factor=0.01),
    Momentum(0.1),
    Adagrad(0.1),
    RowWiseAdagrad(0.1, clipvalue=0.5),
    AdagradMomentum(0.1, 0.9),
    Adam(0.1),
    Adam(0.1, lazy_adam=False),
    Lion(0.1),
    FTRL(0.1),
    Adagrad(0.1, use_gradient_accumulation=False),
    CustomRowOptimizer(with_velocity, slots=(SlotSpec(name="velocity", width="element"),)),
]


def both(optimizer: Optimizer | None = None) -> tuple[Table, Table]:
    """The same table in memory and in a file."""
    spec = TableSpec.of(TableConfig(100, 8, optimizer=optimizer, name="t"), seed=1, num_buckets=4)
    tables = Table(spec, np.array([0, 2])), Table(replace(spec, stores=MappedStores()), np.array([0, 2]))
    for table in tables:
        table.initialize()
    return tables


def assert_same(ram: Table, mapped: Table) -> None:
    assert not hasattr(mapped.store, "arrays")
    assert mapped.size_bytes == ram.size_bytes
    for bucket in ram.buckets.tolist():
        found = mapped.bucket(bucket)
        for name, values in ram.bucket(bucket).items():
            assert values.tobytes() == found[name].tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_updates_leave_the_same_bytes(optimizer: Optimizer) -> None:
    ram, mapped = both(optimizer)
    assert_same(ram, mapped)
    random = np.random.default_rng(2)
    for _ in range(3):
        rows, gradients = random.integers(0, 50, 30), random.standard_normal((30, 8), np.float32)
        for table in (ram, mapped):
            table.update(rows, gradients, 0.1)
        assert_same(ram, mapped)


def test_reads_find_the_same_bytes() -> None:
    ram, mapped = both()
    rows, splits = np.array([3, 49, 3, 0, 7]), np.array([0, 2, 2, 5])
    for table in (ram, mapped):
        table.bucket(2)["rows"][1] = 5.0
        table.store.write(np.array([7, 8]), {"rows": np.full((2, 8), 3.0, np.float32)})
    assert_same(ram, mapped)
    found = []
    for table in (ram, mapped):
        gathered, sent, pooled = (
            np.empty((5, 8), np.float32),
            np.empty((5, 8), np.float32),
            np.empty((3, 8), np.float32),
        )
        table.gather(rows, gathered)
        table.gather_to(rows, sent.ctypes.data + 32 * np.arange(5))
        table.store.pool(rows.astype(np.int32), splits, None, "mean", pooled)
        found.append((gathered.tobytes(), sent.tobytes(), pooled.tobytes(), table.store.read(rows)["rows"].tobytes()))
    assert found[0] == found[1]


def test_tables_of_a_job_lie_in_stores_of_one_kind() -> None:
    ram, mapped = both()
    assert kind_of([mapped, mapped]) == MappedStores()
    with pytest.raises(ValueError, match="stores of several kinds"):
        kind_of([ram, mapped])
