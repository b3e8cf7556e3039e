"""The curated list of schedules: every fault of docs/faults.md that can be injected, by its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from podembed.jobs.chaos.process_faults import (
    driver_killed,
    frozen_or_slow,
    killed_in_a_step,
    killed_together,
    killed_while_restoring,
    killed_while_saving,
    signals_and_sizes,
)
from podembed.jobs.chaos.schedule import RunShape, Schedule
from podembed.jobs.chaos.storage_faults import storage_that_fails, storage_that_lies
from podembed.jobs.chaos.value_faults import frames, memory_and_values


def curated(shape: RunShape) -> list[Schedule]:
    """Every schedule of the curated list, in the order of the faults' numbers, with its label."""
    parts: tuple[Callable[[RunShape], list[Schedule]], ...] = (
        killed_in_a_step,
        killed_together,
        frozen_or_slow,
        killed_while_saving,
        killed_while_restoring,
        driver_killed,
        frames,
        storage_that_fails,
        storage_that_lies,
        memory_and_values,
        signals_and_sizes,
    )
    found: list[Schedule] = []
    for schedule in (schedule for part in parts for schedule in part(shape)):
        place = 1 + sum(before.number == schedule.number for before in found)
        found.append(replace(schedule, label=f"{schedule.number}.{place}"))
    return found
