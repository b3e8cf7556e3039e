"""Steps beside which nothing is saved have timers of their own."""

from __future__ import annotations

import pytest

from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.liveness.undisturbed import UndisturbedTimer
from tests.clock import FakeClock


class Host:
    """A host whose steps take as long as a test says. Mutated: the clock, and whether a save is under way."""

    def __init__(self, *, is_saving: bool = False) -> None:
        self.is_saving = is_saving
        self._clock = FakeClock()
        # The processor is at work in every second phase.
        self._cpu_s = 0.0
        self.tracker = Tracker(self._clock.monotonic_s, cpu_s=lambda: self._cpu_s)
        self.timer = UndisturbedTimer(self.tracker, is_saving=lambda: self.is_saving)

    def step(self, seconds: float, *, until_save_ends: bool = False) -> None:
        self.timer.begin_step()
        with self.tracker.phase(Phase.DEVICE):
            self._clock.sleep(seconds)
        if until_save_ends:
            self.is_saving = False
        with self.tracker.phase(Phase.UPDATE):
            self._clock.sleep(seconds)
            self._cpu_s += seconds
        self._cpu_s += seconds / 10


def test_without_a_save_all_steps_count_with_what_came_before_them() -> None:
    host = Host()
    with host.tracker.phase(Phase.READ):
        host._clock.sleep(0.5)
    host.step(1.0)
    host.step(2.0)
    found = host.timer.take()
    assert (found.num_steps, found.saving_steps, found.saving_s) == (2, 0, 0.0)
    assert found.seconds == pytest.approx(6.5)
    assert found.phase_s == host.tracker.phase_s == {"read": 0.5, "device": 3.0, "update": 3.0}
    assert found.phase_cpu_s == pytest.approx(host.tracker.take_phase_cpu_s())


def test_a_step_that_begins_beside_a_save_does_not_count() -> None:
    """Also where the save ends in the middle of it."""
    host = Host(is_saving=True)
    host.step(10.0)
    host.step(20.0, until_save_ends=True)
    host.step(1.0)
    host.is_saving = True
    host.step(30.0)
    found = host.timer.take()
    assert (found.num_steps, found.saving_steps) == (1, 3)
    assert found.seconds == pytest.approx(2.0)
    assert found.saving_s == pytest.approx(120.0)
    assert found.phase_s == pytest.approx({"device": 1.0, "update": 1.0})
    assert found.phase_cpu_s == pytest.approx({"device": 0.0, "update": 1.0, "between phases": 0.1})


def test_the_timers_of_the_window_go_on() -> None:
    host = Host(is_saving=True)
    host.step(1.0, until_save_ends=True)
    host.step(2.0)
    host.timer.take()
    assert host.tracker.take_phase_s() == {"device": 3.0, "update": 3.0}
    assert host.tracker.take_phase_cpu_s() == pytest.approx({"device": 0.0, "update": 3.0, "between phases": 0.3})
