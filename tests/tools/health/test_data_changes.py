"""Planted faults in later files, and clean data of many kinds: files that are read, sampled, measured and judged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from podembed.orchestrator.events.health import AlarmBegan
from podembed.tools.health.check import replayed
from tests.long_tests import is_long
from tests.tools.health.changed_data import changed, click_columns, data_job, feed, write_part
from tests.tools.health.points import Driver

Change = Callable[[dict[str, Any], np.random.Generator], None]
GOOD_ROWS, BAD_ROWS = 12 * 4096, 4 * 4096


def size(columns: dict[str, Any]) -> int:
    return len(columns["label"])


def emptied(columns: dict[str, Any], rng: np.random.Generator) -> None:
    columns["tags"] = pa.array([[]] * size(columns), pa.list_(pa.int64()))


def constant(columns: dict[str, Any], rng: np.random.Generator) -> None:
    columns["item"] = np.full(size(columns), 7)


def constant_number(columns: dict[str, Any], rng: np.random.Generator) -> None:
    columns["price"] = np.full(size(columns), -1.0, np.float32)


def constant_label(columns: dict[str, Any], rng: np.random.Generator) -> None:
    columns["label"] = np.zeros(size(columns), np.float32)


def swapped(columns: dict[str, Any], rng: np.random.Generator) -> None:
    columns["item"], columns["shop"] = columns["shop"], columns["item"]


def taken_over(columns: dict[str, Any], rng: np.random.Generator) -> None:
    columns["user"] = np.where(rng.random(size(columns)) < 0.6, 1234, columns["user"])


def other_unit(columns: dict[str, Any], rng: np.random.Generator) -> None:
    columns["price"] = columns["price"] * 100


def drifted(columns: dict[str, Any], rng: np.random.Generator) -> None:
    columns["item"] = np.where(rng.random(size(columns)) < 0.4, columns["item"] + 1, columns["item"])


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """A driver that has trained on good files, on two hosts."""
    folder = tmp_path_factory.mktemp("good")
    write_part(folder, 0, click_columns(GOOD_ROWS, seed=1))
    driver = Driver()
    feed(driver, data_job(folder=str(folder)), num_hosts=2)
    assert driver.standing == []
    return driver


@pytest.mark.parametrize(
    ("change", "expected", "words"),
    [
        (emptied, [("feature_empty", "tags")], "tags has no id in 100.0% of the samples; before, 2"),
        (constant, [("feature_constant", "item")], "item has the same id in 100.0% of the samples"),
        (constant_number, [("feature_constant", "price")], "price has the same number in 100.0% of the samples"),
        (constant_label, [("feature_constant", "label")], "label has the same number in 100.0%"),
        (swapped, [("columns_swapped", "item"), ("columns_swapped", "shop")], "item looks as shop did before: "),
        (taken_over, [("id_takes_over", "user")], "one id of user has 6"),
        (other_unit, [("column_shifted", "price")], "price changed at once: "),
        (drifted, [("data_drifts", "")], "item differs from the first part of the run in "),
    ],
)
def test_a_fault_in_later_files_is_said_once(
    beginning: Driver, tmp_path: Path, change: Change, expected: list[tuple[str, str]], words: str
) -> None:
    driver = copy.deepcopy(beginning)
    write_part(tmp_path, 1, changed(click_columns(BAD_ROWS, seed=2), change))
    feed(driver, data_job(folder=str(tmp_path)), num_hosts=2)
    assert sorted(driver.standing) == expected
    assert sorted(driver.begun) == expected
    began = next(one for one in driver.said if isinstance(one, AlarmBegan) and words in one.finding)
    assert began.remedy
    # A reader of the run's folder comes to the same.
    assert [*replayed(driver.points)[0].standing] == driver.standing


def test_alarms_end_when_the_data_is_as_before(beginning: Driver, tmp_path: Path) -> None:
    driver = copy.deepcopy(beginning)
    write_part(tmp_path, 0, changed(click_columns(BAD_ROWS, seed=2), constant))
    write_part(tmp_path, 1, click_columns(2 * 4096, seed=3))
    feed(driver, data_job(folder=str(tmp_path)), num_hosts=2)
    assert driver.begun == driver.ended == [("feature_constant", "item")]


@pytest.mark.parametrize(
    ("change", "expected"), [(emptied, ("feature_empty", "tags")), (constant, ("feature_constant", "item"))]
)
def test_a_fault_is_said_while_the_reference_grows(tmp_path: Path, change: Change, expected: tuple[str, str]) -> None:
    driver = Driver()
    for part, is_bad in enumerate((False, True, False)):
        columns = click_columns(4 * 4096, seed=part)
        write_part(tmp_path, part, changed(columns, change) if is_bad else columns)
    feed(driver, data_job(folder=str(tmp_path)))
    assert driver.begun == driver.ended == [expected]


def test_an_id_for_each_place_is_not_idle(tmp_path: Path) -> None:
    driver = Driver()
    for part in range(6):
        write_part(tmp_path, part, click_columns(4096, seed=part) | {"shop": np.full(4096, part)})
    feed(driver, data_job(folder=str(tmp_path)))
    assert driver.begun == []


def test_an_input_without_use_is_a_note(tmp_path: Path) -> None:
    def idle(columns: dict[str, Any], rng: np.random.Generator) -> None:
        emptied(columns, rng)
        constant(columns, rng)

    driver = Driver()
    write_part(tmp_path, 0, changed(click_columns(4 * 4096, seed=2), idle))
    feed(driver, data_job(folder=str(tmp_path)))
    assert driver.begun == [("feature_idle", "item"), ("feature_idle", "tags")]
    assert all(finding.kind.is_note for finding in driver.watch.standing.values())


def test_another_driver_begins_anew(beginning: Driver, tmp_path: Path) -> None:
    # What it finds from its beginning on is usual to it.
    driver, later = copy.deepcopy(beginning), Driver()
    write_part(tmp_path, 0, changed(click_columns(GOOD_ROWS, seed=2), swapped))
    feed(later, data_job(folder=str(tmp_path)))
    watch, said = replayed([*driver.points, *later.points])
    assert [*watch.standing] == []
    assert said == []


def by_user(columns: dict[str, Any], rng: np.random.Generator) -> None:
    """In the order of users, each of whom has a favourite shop."""
    columns["user"] = np.sort(columns["user"])
    columns["shop"] = np.where(rng.random(size(columns)) < 0.7, columns["user"] % 40, columns["shop"])


def by_time(columns: dict[str, Any], rng: np.random.Generator) -> None:
    """An hour that goes round, prices that rise by a tenth, and a season in the labels."""
    times = np.arange(size(columns)) / size(columns)
    columns["shop"] = (times * 24 * 30).astype(np.int64) % 24
    columns["price"] = columns["price"] * (1 + times / 10).astype(np.float32)
    columns["label"] = (rng.random(size(columns)) < 0.2 + 0.03 * np.sin(times * 40)).astype(np.float32)


def rare(columns: dict[str, Any], rng: np.random.Generator) -> None:
    """A bag that is nearly always empty, an id that nearly all samples have, and numbers that are mostly zero."""
    full = rng.random(size(columns)) < 0.03
    columns["tags"] = pa.array([[5] if one else [] for one in full.tolist()], pa.list_(pa.int64()))
    columns["shop"] = np.where(rng.random(size(columns)) < 0.97, 1, columns["shop"])
    columns["age"] = np.where(rng.random(size(columns)) < 0.95, 0, columns["age"]).astype(np.float32)


def as_they_are(columns: dict[str, Any], rng: np.random.Generator) -> None:
    """Rows without an order."""


def check_clean(folder: Path, kind: Change, *, seed: int, order: str, num_chunks: int, num_hosts: int) -> None:
    for part in range(2):
        rows = num_chunks * 4096 // 2 + 777 * part
        columns = click_columns(rows, seed=10 * seed + part)
        write_part(folder, part, changed(columns, kind), group=4096 if seed % 2 else 16_384)
    driver = Driver()
    job = data_job(folder=str(folder), order=order, seed=seed)  # type: ignore[arg-type]
    feed(driver, job, num_hosts=num_hosts, epochs=1 + seed % 2)
    assert driver.points[-1].value("step") == driver.step
    assert [one for one in driver.said if isinstance(one, AlarmBegan)] == []


def test_clean_data_has_no_alarm(tmp_path: Path) -> None:
    check_clean(tmp_path, by_user, seed=0, order="shuffled", num_chunks=16, num_hosts=2)


@is_long
@pytest.mark.parametrize("kind", [as_they_are, by_user, by_time, rare])
@pytest.mark.parametrize("seed", range(5))
def test_clean_data_of_many_kinds_has_no_alarm(tmp_path: Path, kind: Change, seed: int) -> None:
    order = ("shuffled", "files")[seed // 2 % 2]
    check_clean(tmp_path, kind, seed=seed, order=order, num_chunks=60, num_hosts=1 + seed % 4)
