"""Pooling, grouping and updates of several tables by 1, 2 and 3 threads: the same bytes, on sizes that no number of
threads divides.
"""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.kernels import threads as thread_rules
from podembed.embedding.kernels.arrays import aligned_empty, matrix_of
from podembed.embedding.kernels.many_tables import BagLists
from podembed.embedding.kernels.row_vectors import jit, splat, store
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Optimizer,
    RowWiseAdagrad,
    SlotSpec,
)
from podembed.embedding.row_optimizers.row_step import RowStep
from podembed.embedding.table.stores.ram_group import GroupedTables, TableUpdates, group_together
from podembed.embedding.table.table import GroupedRows, Pooling, Table, pool_in_parallel
from podembed.embedding.table_spec import TableSpec
from podembed.workers.thread_pool import ThreadPool


def with_momentum(gradient, row, slots, learning_rate, hyperparameters):
    velocity = hyperparameters.momentum * slots[0] + gradient
    return row - learning_rate * velocity, (velocity,)


RULES: tuple[Optimizer, ...] = (
    SGD(0.1),
    Adagrad(0.1, weight_decay_factor=0.1),
    RowWiseAdagrad(0.1),
    AdagradMomentum(0.1, clipvalue=0.5),
    FTRL(0.1),
    Adam(0.1),
    CustomRowOptimizer(
        with_momentum, slots=(SlotSpec(name="velocity", width="element"),), hyperparameters={"momentum": 0.9}
    ),
)
DIM, NUM_BAGS = 8, 37


@pytest.fixture(autouse=True)
def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is to do."""
    monkeypatch.setattr(thread_rules, "_MIN_SHARED", 0)
    monkeypatch.setattr(thread_rules, "_MIN_PART", 1)


def tables() -> list[Table]:
    found = []
    for at, rule in enumerate(RULES):
        config = TableConfig(5 + 31 * at, DIM, name=f"t{at}", optimizer=rule)
        spec = TableSpec.of(config, seed=1, num_buckets=4 if at % 2 else 1)
        found.append(Table(spec, np.arange(spec.layout.num_buckets)))
        found[-1].initialize()
    return found


def draw_bags(random: np.random.Generator, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Local rows and row splits; some bags are empty, and every table has rows that occur in many bags."""
    lengths = random.integers(0, 6, NUM_BAGS)
    rows = random.integers(0, table.num_rows, int(lengths.sum())).astype(np.int32)
    return rows, np.concatenate([[0], np.cumsum(lengths)])


def trained(num_threads: int) -> list[np.ndarray]:
    """What two steps leave behind: activations, rows and slots."""
    thread_pool, held = ThreadPool(num_threads), tables()
    random = np.random.default_rng(5)
    found = []
    for _ in range(2):
        bags = [draw_bags(random, table) for table in held]
        weights = [random.random(len(rows), np.float32) if at % 3 == 0 else None for at, (rows, _) in enumerate(bags)]
        out = [aligned_empty((NUM_BAGS, DIM)) for _ in held]
        poolings = [
            Pooling(table.store.pool, rows, splits, own, ("sum", "mean", "sqrtn")[at % 3], block)
            for at, (table, (rows, splits), own, block) in enumerate(zip(held, bags, weights, out, strict=True))
        ]
        chosen = np.array([0, 3, 4, 20, 36])
        for packed in (False, True):
            block = aligned_empty((NUM_BAGS, DIM))
            block.fill(7.0)
            rows, splits = bags[1]
            poolings.append(
                Pooling(held[1].store.pool, rows, splits, None, "sum", block, bags=chosen, is_packed=packed)
            )
        pool_in_parallel(poolings, thread_pool)
        gradients = random.standard_normal((len(held), NUM_BAGS, DIM), dtype=np.float32)
        lists = [BagLists.of([rows], [splits], [matrix_of(gradients[at])]) for at, (rows, splits) in enumerate(bags)]
        grouped: dict[int, GroupedRows] = {}
        # Some tables together, which stay whole; the others alone, so that their rows are cut into parts.
        for some in ([0, 1, 2, 3], [4], [5], [6]):
            lines = np.concatenate([lists[at].lines for at in some])
            grouped |= dict(group_together(held, some, lines, np.arange(len(some) + 1), thread_pool))
        TableUpdates(held, [*grouped]).run(GroupedTables.of(grouped), [0.1] * len(held), thread_pool)
        found += [pooling.out[:5] if pooling.is_packed else pooling.out for pooling in poolings]
    thread_pool.close()
    return [*found, *(array for table in held for array in (table.rows, *table.slots.values()))]


@pytest.mark.parametrize("num_threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bytes(num_threads: int) -> None:
    expected = trained(1)
    assert any(np.any(array != 0) for array in expected)
    for one, other in zip(expected, trained(num_threads), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_row_is_announced_before_any_table_changes() -> None:
    thread_pool, held = ThreadPool(2), tables()
    before = [table.rows.copy() for table in held]
    announced: list[int] = []

    def look(rows: np.ndarray) -> None:
        assert all((table.rows == rows).all() for table, rows in zip(held, before, strict=True))
        announced.append(len(rows))

    gradient = np.ones((1, DIM), np.float32)
    for table in held:
        table.before_change = look
    one = BagLists.of([np.zeros(1, np.int32)], [np.array([0, 1])], [matrix_of(gradient)])
    grouped = {at: table.group(one) for at, table in enumerate(held)}
    TableUpdates(held, [*grouped]).run(GroupedTables.of(grouped), [0.1] * len(held), thread_pool)
    assert announced == [1] * len(held)
    assert all((table.rows != rows).any() for table, rows in zip(held, before, strict=True))
    thread_pool.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rules_in_python_meet_the_tables_in_their_order(num_threads: int) -> None:
    """They may keep something between two rows, and threads group the tables in any order."""
    seen: list[float] = []

    def note(gradient, row, slots, learning_rate, hyperparameters):
        seen.append(learning_rate)
        return row, ()

    config = TableConfig(5, DIM, name="noted", optimizer=CustomRowOptimizer(note))
    held = [Table(TableSpec.of(config, seed=1, num_buckets=1), np.zeros(1, np.int64)) for _ in range(3)]
    gradient = np.ones((1, DIM), np.float32)
    one = BagLists.of([np.zeros(1, np.int32)], [np.array([0, 1])], [matrix_of(gradient)])
    thread_pool = ThreadPool(num_threads)
    grouped = {at: held[at].group(one) for at in (2, 0, 1)}
    TableUpdates(held, [*grouped]).run(GroupedTables.of(grouped), [1.0, 2.0, 3.0], thread_pool)
    thread_pool.close()
    # Before that, the rule is tried with a rate of 0.
    assert [rate for rate in seen if rate] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("rule", [None, SGD(0.1, use_gradient_accumulation=False), Adam(0.1, lazy_adam=False)])
def test_a_table_that_cannot_be_updated_so_is_refused_before_any_changes(
    num_threads: int, rule: Optimizer | None
) -> None:
    gradient, thread_pool = np.ones((1, DIM), np.float32), ThreadPool(num_threads)
    rules = (SGD(0.1), rule, RowWiseAdagrad(0.1))
    configs = [TableConfig(5, DIM, name=f"t{at}", optimizer=own) for at, own in enumerate(rules)]
    held = [Table(TableSpec.of(config, seed=1, num_buckets=1), np.zeros(1, np.int64)) for config in configs]
    before = [table.rows.copy() for table in held]
    one = BagLists.of([np.zeros(1, np.int32)], [np.array([0, 1])], [matrix_of(gradient)])
    grouped = GroupedTables.of({at: table.group(one) for at, table in enumerate(held)})
    with pytest.raises(ValueError, match="Table 't1' has optimizer"):
        TableUpdates(held, [0, 1, 2]).run(grouped, [0.1] * 3, thread_pool)
    assert all((table.rows == rows).all() for table, rows in zip(held, before, strict=True))
    thread_pool.close()


def test_touched_rows_of_other_tables_are_refused() -> None:
    held = tables()[:2]
    gradient = np.ones((1, DIM), np.float32)
    one = BagLists.of([np.zeros(1, np.int32)], [np.array([0, 1])], [matrix_of(gradient)])
    grouped = GroupedTables.of({at: held[at].group(one) for at in (1, 0)})
    with pytest.raises(ValueError, match=r"Found touched rows of tables \[1, 0\]. Expected those of \[0, 1\]"):
        TableUpdates(held, [0, 1]).run(grouped, [0.1] * 2, ThreadPool(1))


class InPython(SGD):
    """Its rule is none of a kernel."""

    def run(self, step: RowStep) -> None:
        step.rows[step.touched.rows] = 7.0


def filling(value: float):
    @jit
    def fill(width, dim, table, rows, head, following, gradients, learning_rate, limits):
        for u in range(rows.shape[0]):
            store(table, rows[u], 0, splat(width, np.float32(value)))

    return fill


class Filling(SGD):
    """Its kernel takes a number from around it, so its name does not say which one it is."""

    def kernel(self):
        return FILLS[self.clip_weight_max], ()


FILLS = {1.0: filling(1.0), 2.0: filling(2.0)}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rules_of_users_are_their_own(num_threads: int) -> None:
    rules = (InPython(0.1), Filling(0.1, clip_weight_max=1.0), Filling(0.1, clip_weight_max=2.0), SGD(0.1))
    assert [rule.updates_together for rule in rules] == [False, False, False, True]
    configs = [TableConfig(5, DIM, name=f"t{at}", optimizer=own) for at, own in enumerate(rules)]
    held = [Table(TableSpec.of(config, seed=1, num_buckets=1), np.zeros(1, np.int64)) for config in configs]
    gradient, thread_pool = np.ones((1, DIM), np.float32), ThreadPool(num_threads)
    one = BagLists.of([np.zeros(1, np.int32)], [np.array([0, 1])], [matrix_of(gradient)])
    grouped = GroupedTables.of({at: table.group(one) for at, table in enumerate(held)})
    TableUpdates(held, range(4)).run(grouped, [0.1] * 4, thread_pool)
    thread_pool.close()
    assert [table.rows[0, 0] for table in held] == [7.0, 1.0, 2.0, np.float32(-0.1)]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_updates_that_go_alone_leave_the_tables_behind_as_they_are(num_threads: int) -> None:
    """So that a fault between two tables finds one of them updated."""
    held, thread_pool = tables(), ThreadPool(num_threads)
    gradient = np.ones((1, DIM), np.float32)
    one = BagLists.of([np.zeros(1, np.int32)], [np.array([0, 1])], [matrix_of(gradient)])
    before = [table.rows.copy() for table in held]

    def strike(rows: np.ndarray) -> None:
        raise RuntimeError("a fault")

    held[2].updates_alone, held[2].before_change = True, strike
    grouped = GroupedTables.of({at: table.group(one) for at, table in enumerate(held)})
    with pytest.raises(RuntimeError, match="a fault"):
        TableUpdates(held, range(len(held))).run(grouped, [0.1] * len(held), thread_pool)
    thread_pool.close()
    changed = [bool((table.rows != rows).any()) for table, rows in zip(held, before, strict=True)]
    assert changed == [True, True] + [False] * (len(held) - 2)
