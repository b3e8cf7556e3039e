"""What a host computes in a step, and what it waits for."""

from __future__ import annotations

import pytest

from podembed.workers.liveness.step_parts import (
    FOR_DEVICE,
    FOR_HOSTS,
    FOR_INPUT,
    FOR_SAVE,
    parts_of_step,
)


def test_each_wait_is_told_by_its_phase() -> None:
    wall = {"read": 3.0, "group": 5.0, "id exchange": 4.0, "device": 8.0, "update": 2.0}
    cpu = {"read": 1.0, "group": 2.0, "id exchange": 1.0, "device": 0.5, "update": 2.0, "between phases": 1.0}
    found = parts_of_step(wall, cpu, 25.0)
    assert found == {
        "read": 1.0,
        "group": 2.0,
        "id exchange": 1.0,
        "device": 0.5,
        "update": 2.0,
        "between phases": 1.0,
        FOR_HOSTS: 3.0,
        FOR_INPUT: 2.0,
        FOR_SAVE: 0.0,
        # 3 in `group`, and 2 of the 3 between phases, besides the device's own.
        FOR_DEVICE: 7.5 + 5.0,
    }
    assert sum(found.values()) == pytest.approx(25.0)


def test_a_save_is_not_taken_for_the_device() -> None:
    found = parts_of_step({"wait for save": 0.4, "update": 0.5}, {"update": 0.5, "between phases": 0.1}, 1.0)
    assert (found[FOR_SAVE], found[FOR_DEVICE]) == (pytest.approx(0.4), pytest.approx(0.0))


def test_no_part_is_negative() -> None:
    """Clocks differ a little: a phase may have more processor seconds than seconds, and all phases more than a step."""
    found = parts_of_step({"group": 1.0, "update": 1.0}, {"group": 1.1, "update": 0.9}, 1.9)
    assert min(found.values()) >= 0
    assert found["group"] == 1.0
