"""What a tracker says of itself, and which phases are waits."""

from __future__ import annotations

import time

import pytest

from podembed.workers.faults.plan import POINTS
from podembed.workers.liveness.progress import Phase, Stopwatch, Tracker
from tests.clock import FakeClock


def test_the_age_of_a_phase_grows_and_begins_again_with_the_next() -> None:
    clock = FakeClock()
    tracker = Tracker(clock.monotonic_s)
    with tracker.phase(Phase.READ):
        clock.sleep(1.0)
        assert (tracker.progress().phase, tracker.progress().phase_s) == ("read", 1.0)
        clock.sleep(2.0)
        assert tracker.progress().phase_s == 3.0
        with tracker.phase(Phase.WAIT_FOR_SAVE):
            clock.sleep(0.5)
            assert (tracker.progress().phase, tracker.progress().phase_s) == ("wait for save", 0.5)
        assert (tracker.progress().phase, tracker.progress().phase_s) == ("read", 0.0)
    assert tracker.take_phase_s() == {"read": 3.0, "wait for save": 0.5}
    assert tracker.progress().phase == "between phases"
    assert tracker.progress().waits_for == ()


def test_after_an_exception_the_phase_stays_and_grows_old() -> None:
    clock = FakeClock()
    tracker = Tracker(clock.monotonic_s)
    with pytest.raises(ValueError, match="bad"), tracker.phase(Phase.DEDUP):
        raise ValueError("bad")
    clock.sleep(4.0)
    assert (tracker.progress().phase, tracker.progress().phase_s) == ("dedup", 4.0)


def test_waits_are_told_from_work() -> None:
    waits = {phase for phase in Phase if phase.waits_for_others}
    assert {Phase.ACTIVATION_EXCHANGE, Phase.ID_EXCHANGE, Phase.DEVICE, Phase.WAIT_FOR_HOST} <= waits
    assert not waits & {Phase.READ, Phase.POOL_FOR_OTHERS, Phase.UPDATE, Phase.IDLE, Phase.WAIT_FOR_SAVE}


def test_what_a_phase_waits_for_does_not_depend_on_its_text() -> None:
    """A phase whose name ends otherwise is as innocent as before, and one that only sounds like a wait is none."""
    for phase in Phase:
        assert Phase(phase.value) is phase
        assert f"{phase}" == phase.value
    assert [phase for phase in Phase if phase.waits_for_hosts and phase.waits_for_device] == []


def test_every_phase_is_a_fault_point_by_its_name() -> None:
    """Plans that users wrote name them. Functions of the user run in the step-by-step mode, which has no plans."""
    not_begun = (Phase.IDLE, Phase.BETWEEN, Phase.WAIT_FOR_HOST, Phase.USER_FUNCTION)
    begun = {phase.fault_point for phase in Phase if phase not in not_begun}
    assert begun <= POINTS.keys()


def test_processor_seconds_are_those_of_the_phase_that_used_them() -> None:
    """Those of a phase within another one count there alone. The rest of a window is between phases."""
    clock, cpu = FakeClock(), FakeClock()
    tracker = Tracker(clock.monotonic_s, cpu_s=cpu.monotonic_s)
    tracker.take_phase_cpu_s()
    cpu.now_s += 0.5
    with tracker.phase(Phase.GROUP):
        clock.now_s, cpu.now_s = clock.now_s + 9.0, cpu.now_s + 1.0
        with tracker.phase(Phase.DEVICE):
            clock.now_s, cpu.now_s = clock.now_s + 7.0, cpu.now_s + 2.0
        cpu.now_s += 4.0
    assert tracker.take_phase_cpu_s() == {Phase.GROUP: 5.0, Phase.DEVICE: 2.0, Phase.BETWEEN: 0.5}
    assert tracker.take_phase_s() == {Phase.GROUP: 9.0, Phase.DEVICE: 7.0}
    assert tracker.take_phase_cpu_s() == {Phase.BETWEEN: 0.0}


def test_a_phase_that_waits_uses_no_processor() -> None:
    tracker = Tracker()
    tracker.take_phase_cpu_s()
    with tracker.phase(Phase.DEVICE):
        time.sleep(0.2)
    with tracker.phase(Phase.GROUP):
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
    found = tracker.take_phase_cpu_s()
    assert found[Phase.DEVICE] < 0.02 < 0.05 <= found[Phase.GROUP]


def test_laps_follow_each_other_and_those_of_one_name_are_summed() -> None:
    now_s = [10.0]
    stopwatch = Stopwatch(lambda: now_s[0])
    for seconds, name in ((1.0, "gang"), (0.5, "trace"), (0.25, "gang")):
        now_s[0] += seconds
        stopwatch.end(name)
    assert stopwatch.seconds == {"gang": 1.25, "trace": 0.5}
