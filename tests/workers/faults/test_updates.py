"""Faults between and within the updates of tables, and tables that are left alone where no plan asks for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.kernels.arrays import matrix_of
from podembed.embedding.kernels.many_tables import BagLists
from podembed.embedding.kernels.threads import ONE_THREAD
from podembed.embedding.optimizers import SGD
from podembed.embedding.table.stores.ram_group import GroupedTables, TableUpdates
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.faults.plan import Fault, FaultPlan
from podembed.workers.faults.updates import arm_updates


def table(name: str) -> Table:
    config = TableConfig(8, 2, Constant(0.0), combiner="sum", name=name, optimizer=SGD(1.0))
    found = Table(TableSpec.of(config, seed=0), np.zeros(1, np.int64))
    found.initialize()
    return found


def armed(folder: Path, tables: list[Table], point: str, match: str) -> None:
    fault = Fault(point=point, action="raise", rank="host 0", step=4, match=match)
    plan = FaultPlan(folder=str(folder), faults=(fault,))
    arm_updates(tables, FaultPoints.of(plan, "host 0"), lambda: 4)


def update(one: Table) -> None:
    one.update(np.arange(6), np.ones((6, 2), np.float32), 1.0)


def test_tables_are_left_alone_without_such_a_fault(tmp_path: Path) -> None:
    one = table("one")
    arm_updates([one], None, lambda: 0)
    plan = FaultPlan(folder=str(tmp_path), faults=(Fault(point="step.update", action="kill"),))
    arm_updates([one], FaultPoints.of(plan, "host 0"), lambda: 0)
    assert "update" not in vars(one)


def test_between_two_tables_the_first_is_updated_and_the_second_not(tmp_path: Path) -> None:
    one, two = table("one"), table("two")
    armed(tmp_path, [one, two], "step.update.between", "two")
    update(one)
    with pytest.raises(RuntimeError, match="injected"):
        update(two)
    assert (one.rows[:6] == -1).all()
    assert (two.rows == 0).all()
    update(two)
    assert (two.rows[:6] == -1).all()


def test_between_two_tables_that_are_updated_together(tmp_path: Path) -> None:
    held = [table(name) for name in ("one", "two", "three")]
    armed(tmp_path, held, "step.update.between", "two")
    gradient = np.ones((1, 2), np.float32)
    lists = BagLists.of([np.zeros(1, np.int32)], [np.array([0, 1])], [matrix_of(gradient)])
    grouped = GroupedTables.of({at: one.group(lists) for at, one in enumerate(held)})
    with pytest.raises(RuntimeError, match="injected"):
        TableUpdates(held, [0, 1, 2]).run(grouped, [1.0] * 3, ONE_THREAD)
    assert [one.rows[0, 0] for one in held] == [-1.0, 0.0, 0.0]


def test_in_the_middle_of_a_table_some_rows_are_changed_and_were_announced(tmp_path: Path) -> None:
    one = table("one")
    announced: list[np.ndarray] = []
    one.before_change = lambda rows: announced.append(rows.copy())
    armed(tmp_path, [one], "step.update.mid", "one")
    with pytest.raises(RuntimeError, match="injected"):
        update(one)
    changed = (one.rows != 0).any(axis=1)
    assert changed[:3].all()
    assert not changed[3:].any()
    assert sorted(announced[0]) == list(range(6))


def test_a_table_that_comes_along_into_another_generation_is_armed_once(tmp_path: Path) -> None:
    """Of the second update on, not of the second of two points within one."""
    one = table("one")
    fault = Fault(point="step.update.between", action="raise", nth=2)
    for _ in range(2):
        points = FaultPoints.of(FaultPlan(folder=str(tmp_path), faults=(fault,)), "host 0")
        arm_updates([one], points, lambda: 4)
    update(one)
    assert (one.rows[:6] == -1).all()
    with pytest.raises(RuntimeError, match="injected"):
        update(one)
