"""Schedules mean places that a run of their shape reaches, and are the same for the same seed."""

from __future__ import annotations

import pytest

from podembed.jobs.chaos.schedule import RunShape
from podembed.jobs.chaos.selection import curated, drawn

NUMBERS = {"F1", "F2", "F3", "F4", "F5", "F6", "F7", "F8", "F9", "F11", "F15", "F16", "F17", "F18", "F19", "F23"}
NUMBERS |= {"F24", "F25", "F26", "F28", "F37", "F38", "F39", "F44"}
PHASES = ("P0", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10")


def test_the_list_goes_through_the_faults_it_promises() -> None:
    schedules = curated(RunShape())
    assert {schedule.number for schedule in schedules} >= NUMBERS
    first = " ".join(schedule.title for schedule in schedules if schedule.number == "F1")
    assert [phase for phase in PHASES if phase not in first] == []


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_faults_name_hosts_and_steps_of_the_run(hosts: int) -> None:
    shape = RunShape(num_hosts=hosts, num_steps=40, commit_every=10)
    for schedule in [*curated(shape), *(drawn(seed, shape) for seed in range(200))]:
        for fault in schedule.faults:
            kind, _, number = (fault.rank or "driver").partition(" ")
            assert kind == "driver" or not number or int(number) < hosts, schedule.title
            # A window may end with the run.
            last = shape.num_steps if fault.point == "driver.window" else shape.num_steps - 1
            assert fault.step is None or 0 <= fault.step <= last, schedule.title


def test_titles_are_distinct() -> None:
    titles = [(schedule.number, schedule.title) for schedule in curated(RunShape())]
    assert len(set(titles)) == len(titles)


def test_a_seed_is_a_schedule() -> None:
    shape = RunShape()
    assert [drawn(seed, shape) for seed in range(50)] == [drawn(seed, shape) for seed in range(50)]
    assert len({drawn(seed, shape).title for seed in range(50)}) > 40


def test_labels_count_the_schedules_of_a_fault_and_name_the_seeds() -> None:
    labels = [schedule.label for schedule in curated(RunShape())]
    assert labels[:2] == ["F1.1", "F1.2"]
    assert len({*labels}) == len(labels)
    assert all(schedule.label.startswith(f"{schedule.number}.") for schedule in curated(RunShape()))
    assert drawn(17, RunShape()).label == "seed 17"
