"""Faults of tables, by chosen figures in the windows of a driver. `test_real_runs.py` has real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.orchestrator.events.commits import Committed
from podembed.tools.health.check import replayed
from podembed.tools.metrics.reading import without_lost
from podembed.workers.host.row_norms import TableNorms
from tests.tools.health.points import Driver
from tests.tools.metrics.windows import recovery

SOUND = TableNorms(
    table="clicks",
    num_rows=1000,
    num_trained=950,
    norms=(0.2, 0.3, 0.5),
    growth=(0.3, 0.6, 1.8),
)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def looks(driver: Driver, *tables: TableNorms, count: int = 4, generation: int = 1) -> None:
    """Looks at the last of some windows each, as hosts do it."""
    for _ in range(count):
        driver.windows(5, generation=generation)
        driver.windows(1, tables=tables, rates={table.table: 0.05 for table in tables}, generation=generation)


GROWN = replace(SOUND, growth=(0.9, 4.0, 11.0))
ALARM = "table_rate_too_high", "table clicks"


def test_a_fault_begins_and_ends_an_alarm(driver: Driver) -> None:
    other = replace(SOUND, table="other")
    looks(driver, SOUND, other, count=8)
    assert driver.begun == []
    looks(driver, GROWN, other, count=2)
    assert driver.begun == [], "two looks may be chance"
    looks(driver, GROWN, other, count=1)
    assert driver.begun == [ALARM]
    assert str(driver.step) in driver.watch.standing[ALARM].text
    looks(driver, SOUND, other)
    assert driver.ended == [ALARM]
    assert driver.standing == []


@pytest.mark.parametrize(
    "figures",
    [
        # Nothing tells which rows were trained.
        {"num_trained": None},
        {"growth": (2.0, 4.0, 7.0)},
        # First values cannot be had, or rows are narrow.
        {"growth": ()},
        {"norms": (), "growth": (), "num_trained": 0},
    ],
)
def test_what_is_no_fault(driver: Driver, figures: dict[str, object]) -> None:
    looks(driver, replace(SOUND, **figures), count=12)  # type: ignore[arg-type]
    assert [one for one in driver.begun if one[0] != "rows_never_train"] == []


def test_tables_are_not_judged_by_their_first_steps(driver: Driver) -> None:
    looks(driver, GROWN, count=5)
    assert driver.step > 200
    assert driver.begun == []
    looks(driver, GROWN, count=1)
    assert driver.begun == [ALARM]


def test_rows_that_no_sample_names_are_a_note(driver: Driver) -> None:
    looks(driver, replace(SOUND, num_trained=80), count=16)
    assert driver.begun == []
    looks(driver, replace(SOUND, num_trained=80), count=2)
    assert driver.begun == [("rows_never_train", "table clicks")]
    assert "8% of the rows" in driver.watch.standing["rows_never_train", "table clicks"].text
    for at in range(6):
        looks(driver, replace(SOUND, num_trained=100 + 200 * at), count=1)
    assert driver.standing == []


def test_rows_that_still_come_are_no_note(driver: Driver) -> None:
    for at in range(30):
        looks(driver, replace(SOUND, num_trained=80 + 10 * at), count=1)
    assert driver.begun == []


def test_many_tables_with_one_fault_are_few_lines(driver: Driver) -> None:
    tables = [replace(GROWN, table=f"t{at:02}") for at in range(26)]
    looks(driver, *tables, count=8)
    assert [subject for _, subject in driver.begun] == [f"table t{at:02}" for at in range(8)]
    assert "25 other tables have the same alarm" in driver.watch.standing["table_rate_too_high", "table t00"].text


def test_looks_of_lost_steps_do_not_count(driver: Driver) -> None:
    looks(driver, SOUND, count=6)
    driver.event(Committed(name="c", step=driver.step, size_bytes=1 << 20, seconds=0.5))
    at = driver.step
    looks(driver, GROWN, count=2)
    driver.event(recovery(base_step=at, generation=2, discarded_steps=driver.step - at))
    driver.step = at
    looks(driver, GROWN, count=2, generation=2)
    assert driver.begun == []
    looks(driver, GROWN, count=1, generation=2)
    assert driver.begun == [ALARM]
    counted, _ = without_lost(driver.points)
    assert replayed(counted)[0].standing == driver.watch.standing
