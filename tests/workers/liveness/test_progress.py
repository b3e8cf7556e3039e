"""What a tracker says of itself, and which phases are waits."""

from __future__ import annotations

import pytest

from podembed.workers.liveness.progress import Laps, Tracker, is_waiting_phase
from tests.clock import FakeClock


def test_the_age_of_a_phase_grows_and_begins_again_with_the_next() -> None:
    clock = FakeClock()
    tracker = Tracker(clock.monotonic_s)
    with tracker.phase("read"):
        clock.sleep(1.0)
        assert (tracker.progress().phase, tracker.progress().phase_s) == ("read", 1.0)
        clock.sleep(2.0)
        assert tracker.progress().phase_s == 3.0
        with tracker.phase("wait for save"):
            clock.sleep(0.5)
            assert (tracker.progress().phase, tracker.progress().phase_s) == ("wait for save", 0.5)
        assert (tracker.progress().phase, tracker.progress().phase_s) == ("read", 0.0)
    assert tracker.take_phase_s() == {"read": 3.0, "wait for save": 0.5}
    assert tracker.progress().phase == "between phases"
    assert tracker.progress().waits_for == ()


def test_after_an_exception_the_phase_stays_and_grows_old() -> None:
    clock = FakeClock()
    tracker = Tracker(clock.monotonic_s)
    with pytest.raises(ValueError, match="bad"), tracker.phase("dedup"):
        raise ValueError("bad")
    clock.sleep(4.0)
    assert (tracker.progress().phase, tracker.progress().phase_s) == ("dedup", 4.0)


@pytest.mark.parametrize(
    ("phase", "waits"),
    [("row exchange", True), ("id exchange", True), ("device", True), ("read", False), ("pool for others", False)],
)
def test_waits_are_told_from_work(phase: str, waits: bool) -> None:
    assert is_waiting_phase(phase) is waits


def test_laps_follow_each_other_and_those_of_one_name_are_summed() -> None:
    now_s = [10.0]
    laps = Laps(lambda: now_s[0])
    for seconds, name in ((1.0, "gang"), (0.5, "trace"), (0.25, "gang")):
        now_s[0] += seconds
        laps.end(name)
    assert laps.seconds == {"gang": 1.25, "trace": 0.5}
