"""Steps beside which nothing is saved have timers of their own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from podembed.workers.liveness.progress import Phase, StepTimes, Tracker, UndisturbedTimer
from tests.clock import FakeClock


class Host:
    """A host whose parts of a step take as long as a test says. Mutated: the clock, and whether a save is under way.

    A window is run as a host does it: a lookup, then for each step the lookup of the next one and the update. The last
    step has no lookup.
    """

    def __init__(self, *, is_saving: bool = False) -> None:
        self.is_saving = is_saving
        self._clock = FakeClock()
        self._cpu_s = 0.0
        self.tracker = Tracker(self._clock.monotonic_s, cpu_s=lambda: self._cpu_s)

    def look_up(self, *, factor: float = 1.0) -> None:
        with self.tracker.phase(Phase.DEDUP):
            self._clock.sleep(4.0 * factor)
            self._cpu_s += 2.0 * factor
        self._cpu_s += 0.5 * factor

    def window(self, steps: int, *, save_ends_in: int = -1, looks_ahead: bool = False) -> StepTimes:
        """Steps beside a save take three times as long.

        Args:
          save_ends_in: a step, from 0, whose device waits for the end of the save; -2 is the lookup before the first.
        """
        timer = UndisturbedTimer(self.tracker, is_saving=lambda: self.is_saving)
        if not looks_ahead:
            self.look_up(factor=self._factor)
        self.is_saving = self.is_saving and save_ends_in != -2
        for number in range(steps):
            looks_up_next = looks_ahead or number + 1 < steps
            factor = self._factor
            timer.begin_step(looks_up_next=looks_up_next)
            if looks_up_next:
                self.look_up(factor=factor)
            with self.tracker.phase(Phase.UPDATE):
                self._clock.sleep(6.0 * factor)
            self.is_saving = self.is_saving and number != save_ends_in
        return timer.take()

    @property
    def _factor(self) -> float:
        return 3.0 if self.is_saving else 1.0


STEP = {"dedup": 4.0, "update": 6.0}
STEP_CPU = {"dedup": 2.0, "update": 0.0, "between phases": 0.5}


def each(sums: Mapping[Phase, float], count: int) -> dict[str, float]:
    return {phase.value: spent / count for phase, spent in sums.items()}


def test_without_a_save_all_of_a_window_counts() -> None:
    host = Host()
    found = host.window(3)
    assert (found.num_steps, found.saving_steps, found.saving_s) == (3, 0, 0.0)
    assert found.seconds == pytest.approx(30.0)
    assert each(found.phase_s, 3) == pytest.approx(STEP)
    assert each(found.phase_cpu_s, 3) == pytest.approx(STEP_CPU)
    assert found.phase_cpu_s == pytest.approx(host.tracker.take_phase_cpu_s())


@pytest.mark.parametrize("save_ends_in", [0, 1, 3, 7])
def test_each_step_counts_with_one_lookup_wherever_the_save_ends(save_ends_in: int) -> None:
    host = Host(is_saving=True)
    found = host.window(10, save_ends_in=save_ends_in)
    assert (found.saving_steps, found.num_steps) == (save_ends_in + 1, 8 - save_ends_in)
    assert found.saving_s == pytest.approx(30.0 * found.saving_steps)
    assert found.seconds == pytest.approx(10.0 * found.num_steps)
    assert each(found.phase_s, found.num_steps) == pytest.approx(STEP)
    assert each(found.phase_cpu_s, found.num_steps) == pytest.approx(STEP_CPU)


def test_with_staleness_the_last_step_counts_too() -> None:
    host = Host(is_saving=True)
    found = host.window(10, save_ends_in=5, looks_ahead=True)
    assert (found.saving_steps, found.num_steps) == (6, 4)
    assert found.saving_s == pytest.approx(180.0)
    assert each(found.phase_s, 4) == pytest.approx(STEP)


def test_where_the_save_ends_in_the_first_lookup_one_step_is_beside_it() -> None:
    host = Host(is_saving=True)
    found = host.window(5, save_ends_in=-2)
    assert (found.saving_steps, found.num_steps) == (1, 3)
    assert each(found.phase_s, 3) == pytest.approx(STEP)


def test_of_one_step_beside_a_save_nothing_counts() -> None:
    host = Host(is_saving=True)
    assert host.window(1) == StepTimes()


def test_a_window_beside_a_save_has_no_other_steps() -> None:
    host = Host(is_saving=True)
    found = host.window(5)
    assert (found.num_steps, found.seconds, found.phase_s) == (0, 0.0, {})
    assert found.saving_s == pytest.approx(30.0 * 4)
    assert found.saving_steps == 4
    # The timers of the whole window go on.
    assert host.tracker.take_phase_s() == pytest.approx({"dedup": 60.0, "update": 90.0})
