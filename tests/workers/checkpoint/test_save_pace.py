"""A save keeps to its share of the processors while training goes on, and to nothing when nobody trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from podembed.workers.checkpoint.save_pace import (
    FILE_AS_BYTES,
    LEAST_SHARE,
    LONGEST_GRACE_S,
    LONGEST_LAG_S,
    SHARE_OF_PROCESSORS,
    WANTED_S,
    SavePace,
)
from podembed.workers.liveness.progress import Phase, Tracker


@dataclass
class Clock:
    """Time passes by sleeping alone. `at_sleep` is called at each nap."""

    now: float = 100.0
    at_sleep: Callable[[], None] = field(default=lambda: None)

    def now_s(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.at_sleep()


BUCKET_BYTES = 8 << 20


class Save:
    """Buckets that take a tenth of a second of processor time each. With `at_once` each ends when the next but so many
    begins.
    """

    def __init__(self, clock: Clock, *, processors: float, tracker: Tracker) -> None:
        self.clock = clock
        self.begun_s: list[float] = []
        self.tracker = tracker
        self.pace = SavePace(tracker, processors=processors, now_s=clock.now_s, sleep=clock.sleep)
        self.begin()

    def begin(self) -> None:
        """A save, and a step after it."""
        self.pace.begin()
        self.tracker.finish_step()

    def write(
        self,
        buckets: int,
        *,
        at_once: int = 1,
        is_urgent: Callable[[], bool] = lambda: False,
        taken: Callable[[], float] = lambda: 0.0,
    ) -> float:
        """Seconds that it took, by the clock."""
        began_s = self.clock.now
        for number in range(buckets):
            self.pace.keep_to(
                BUCKET_BYTES,
                busy_s=lambda number=number: 0.1 * max(0, number + 1 - at_once),
                open_bytes=lambda number=number: BUCKET_BYTES * min(number, at_once - 1),
                is_urgent=is_urgent,
                taken=taken,
            )
            self.begun_s.append(self.clock.now - began_s)
            self.clock.now += 0.1 / at_once
        return self.clock.now - began_s


@pytest.mark.parametrize(("processors", "expected_s"), [(0.25, 4.1), (0.5, 2.1), (1.0, 1.1), (4.0, 1.0)])
def test_beside_training_it_takes_its_share_of_the_time(processors: float, expected_s: float) -> None:
    tracker = Tracker()
    with tracker.phase(Phase.DEVICE):
        assert Save(Clock(), processors=processors, tracker=tracker).write(10) == pytest.approx(expected_s, abs=0.02)


def test_pieces_do_not_begin_together_although_several_threads_are_free() -> None:
    """What a piece costs is charged when it begins; that of the first one by a guess, that of the next save's first by
    what is known then.
    """
    tracker = Tracker()
    save = Save(Clock(), processors=0.25, tracker=tracker)
    with tracker.phase(Phase.DEVICE):
        assert save.write(20, at_once=4) == pytest.approx(8.0, abs=0.1)
        assert save.begun_s[0] > 0.1
        gaps = [late - early for early, late in pairwise(save.begun_s)]
        assert min(gaps) > 0.1
        assert min(gaps[5:]) == pytest.approx(0.4, abs=0.02)
        save.begin()
        save.begun_s.clear()
        save.write(1)
        assert save.begun_s == [pytest.approx(0.4, abs=0.02)]


@pytest.mark.parametrize("step_s", [0.0, 0.15, 0.3])
def test_the_step_after_its_beginning_is_let_pass(step_s: float) -> None:
    """And the time until then buys nothing: buckets that have waited do not begin together behind it."""
    tracker, clock = Tracker(), Clock()
    save = Save(clock, processors=0.25, tracker=tracker)
    with tracker.phase(Phase.DEVICE):
        save.write(3)
        save.pace.begin()
        began_s = clock.now
        clock.at_sleep = lambda: tracker.finish_step() if clock.now >= began_s + step_s else None
        save.begun_s.clear()
        save.write(3)
    assert save.begun_s == pytest.approx([step_s + 0.4, step_s + 0.8, step_s + 1.2], abs=0.03)


def test_a_long_step_holds_a_save_up_for_a_moment_only() -> None:
    tracker, clock = Tracker(), Clock()
    save = Save(clock, processors=1.0, tracker=tracker)
    with tracker.phase(Phase.DEVICE):
        save.write(3)
        save.pace.begin()
        assert save.write(1) == pytest.approx(LONGEST_GRACE_S + 0.2, abs=0.02)
        save.pace.begin()
        assert save.write(1, is_urgent=lambda: True) == pytest.approx(0.1, abs=0.02)


def test_the_share_is_of_the_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)))
    tracker, clock = Tracker(), Clock()
    pace = SavePace(tracker, now_s=clock.now_s, sleep=clock.sleep)
    pace.begin()
    tracker.finish_step()
    with tracker.phase(Phase.UPDATE):
        for number in range(10):
            pace.keep_to(BUCKET_BYTES, busy_s=lambda number=number: 0.1 * number, is_urgent=lambda: False)
    # By the guess for the first one, a little earlier than by what it turns out to cost.
    assert clock.now - 100.0 == pytest.approx(1.0 / 0.4, rel=0.1)


def test_a_piece_waits_while_as_many_as_may_be_are_under_way() -> None:
    """But for no longer than a save may fall behind: pieces that wait for a network need company."""
    tracker, clock = Tracker(), Clock()
    pace = SavePace(tracker, processors=4.0, now_s=clock.now_s, sleep=clock.sleep)

    def began_after_s(*, crowded_until_s: float, is_urgent: bool = False) -> float:
        pace.begin()
        tracker.finish_step()
        began_s = clock.now
        is_crowded = lambda: clock.now < began_s + crowded_until_s  # noqa: E731
        pace.keep_to(1 << 20, is_urgent=lambda: is_urgent, is_crowded=is_crowded)
        return clock.now - began_s

    with tracker.phase(Phase.UPDATE):
        assert began_after_s(crowded_until_s=0.0) == pytest.approx(0.0, abs=0.01)
        assert began_after_s(crowded_until_s=0.07) == pytest.approx(0.07, abs=0.01)
        assert pace.paused_s == pytest.approx(0.0, abs=0.01)
        assert began_after_s(crowded_until_s=0.3) == pytest.approx(LONGEST_LAG_S, abs=0.01)
        assert began_after_s(crowded_until_s=0.3, is_urgent=True) == 0


def test_each_save_begins_anew() -> None:
    tracker, clock = Tracker(), Clock()
    save = Save(clock, processors=0.25, tracker=tracker)
    with tracker.phase(Phase.UPDATE):
        save.write(5)
        clock.now += 1000.0
        save.begin()
        assert save.write(10) == pytest.approx(4.1, abs=0.02)


def test_nobody_waits_for_a_save_that_pauses() -> None:
    """At the end of the run, or while the driver waits for the commit before, the working thread rests."""
    tracker = Tracker()
    tracker._phase = (Phase.BETWEEN, time.perf_counter() + 1000.0)
    assert Save(Clock(), processors=0.25, tracker=tracker).write(10) > 3.0, "a rest between two windows is no end"
    tracker._phase = (Phase.BETWEEN, -1000.0)
    assert Save(Clock(), processors=0.25, tracker=tracker).write(10) == pytest.approx(1.0)
    tracker._phase = (Phase.WAIT_FOR_SAVE, -1000.0)
    assert Save(Clock(), processors=0.25, tracker=tracker).write(10) == pytest.approx(1.0)


def test_a_pause_ends_when_the_save_becomes_urgent() -> None:
    tracker, naps = Tracker(), []
    clock = Clock(at_sleep=lambda: naps.append(0))
    save = Save(clock, processors=0.01, tracker=tracker)
    with tracker.phase(Phase.DEVICE):
        assert save.write(5, is_urgent=lambda: len(naps) >= 3) == pytest.approx(0.53)
    assert save.pace.paused_s == pytest.approx(0.03)


def test_a_pause_ends_with_the_save() -> None:
    tracker, naps = Tracker(), []
    save = Save(Clock(at_sleep=lambda: naps.append(0)), processors=0.01, tracker=tracker)

    def abort() -> bool:
        if len(naps) == 3:
            raise RuntimeError("aborted")
        return False

    with tracker.phase(Phase.DEVICE), pytest.raises(RuntimeError, match="aborted"):
        save.write(5, is_urgent=abort)


def test_what_pausing_costs_does_not_prolong_the_pause() -> None:
    """A look takes a tenth of a millisecond. Charged to the few bytes written so far, and by them to a large one, it
    cost more than a nap gives.
    """
    tracker, looks = Tracker(), []
    clock = Clock(at_sleep=lambda: looks.append(0))
    pace = SavePace(tracker, processors=0.125, now_s=clock.now_s, sleep=clock.sleep)
    pace.begin()
    tracker.finish_step()
    with tracker.phase(Phase.DEVICE):
        pace.keep_to(4 << 20, is_urgent=lambda: len(looks) > 10_000)
        pace.keep_to(128 << 20, busy_s=lambda: 0.02 + 1e-4 * len(looks), is_urgent=lambda: len(looks) > 10_000)
    # 33 times the work of the first bytes, an eighth of a processor.
    assert clock.now - 100.0 == pytest.approx(33 * 0.02 / 0.125, rel=0.15)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.1, LEAST_SHARE),
        (0.5 * (LEAST_SHARE + SHARE_OF_PROCESSORS) * WANTED_S, 0.5 * (LEAST_SHARE + SHARE_OF_PROCESSORS)),
        (100.0, SHARE_OF_PROCESSORS),
        (None, SHARE_OF_PROCESSORS),
    ],
)
def test_a_small_shard_gets_a_smaller_share(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, expected: float
) -> None:
    """What a byte costs is learned from the first pieces, and then how many processors the rest may have."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    tracker, clock = Tracker(), Clock()
    pace = SavePace(tracker, now_s=clock.now_s, sleep=clock.sleep)
    pace.begin(None if seconds is None else int(seconds / 0.1 * BUCKET_BYTES))
    tracker.finish_step()
    with tracker.phase(Phase.DEVICE):
        for number in range(4):
            pace.keep_to(BUCKET_BYTES, busy_s=lambda number=number: 0.1 * number, is_urgent=lambda: False)
    assert pace.processors == pytest.approx(expected)


def test_making_files_takes_time_too() -> None:
    tracker, clock = Tracker(), Clock()
    pace = SavePace(tracker, processors=0.25, now_s=clock.now_s, sleep=clock.sleep)
    took_s = []
    with tracker.phase(Phase.DEVICE):
        for num_bytes, num_files in [(8 * FILE_AS_BYTES, 0), (0, 8), (4 * FILE_AS_BYTES, 4)]:
            pace.begin()
            tracker.finish_step()
            began_s = clock.now
            pace.keep_to(num_bytes, num_files=num_files, is_urgent=lambda: False)
            took_s.append(clock.now - began_s)
    assert took_s[0] > 0.05
    assert took_s == pytest.approx([took_s[0]] * 3, abs=1e-6)


def test_the_fuller_the_buffer_the_sooner_comes_the_next_piece() -> None:
    """And never all at once."""
    gaps_s = []
    for taken in (0.2, 0.4, 0.5, 0.7):
        tracker = Tracker()
        save = Save(Clock(), processors=0.02, tracker=tracker)
        with tracker.phase(Phase.DEVICE):
            save.write(6, taken=lambda taken=taken: taken)
        gaps = [late - early for early, late in pairwise(save.begun_s)]
        gaps_s.append(min(gaps[2:]))
    assert gaps_s == pytest.approx([5.0, 2.5, 1.25, 0.3125], rel=0.1)


def test_where_training_had_to_wait_the_next_save_hurries_up_to_there() -> None:
    """Each save after it stops to hurry earlier, in case that is enough. Saves of another kind are not meant."""
    tracker = Tracker()
    save = Save(Clock(), processors=0.1, tracker=tracker)

    def gaps_s(pieces: int) -> list[float]:
        save.begun_s.clear()
        save.write(pieces)
        return [late - early for early, late in pairwise(save.begun_s)]

    def begin(kind: str) -> None:
        save.pace.begin(kind=kind)
        tracker.finish_step()

    with tracker.phase(Phase.DEVICE):
        begin("whole")
        gaps_s(5)
        save.pace.was_waited_for()
        for hurried in (5, 4, 3, 2):
            begin("delta")
            assert gaps_s(3) == pytest.approx([1.0, 1.0], abs=0.05)
            begin("whole")
            # All is paid for: only then comes the next one.
            paid_s = hurried + 1 - 0.1 * (hurried - 1)
            expected = [*[0.1] * (hurried - 1), paid_s, *[1.0] * (6 - hurried)]
            assert gaps_s(7) == pytest.approx(expected, abs=0.05)


def test_a_save_that_hurries_has_no_more_files_under_way_than_ever() -> None:
    """Its buffer is empty yet, so training needs the processors more."""
    tracker, clock = Tracker(), Clock()
    pace = SavePace(tracker, processors=0.1, now_s=clock.now_s, sleep=clock.sleep)
    with tracker.phase(Phase.DEVICE):
        pace.begin()
        tracker.finish_step()
        pace.keep_to(BUCKET_BYTES, is_urgent=lambda: True)
        pace.was_waited_for()
        pace.begin()
        tracker.finish_step()
        for is_urgent, expected_s in [(False, 0.1), (True, 0.0)]:
            began_s = clock.now
            crowded_until_s = began_s + 0.1
            pace.keep_to(
                1,
                is_urgent=lambda is_urgent=is_urgent: is_urgent,
                is_crowded=lambda until_s=crowded_until_s: clock.now < until_s,
            )
            assert clock.now - began_s == pytest.approx(expected_s, abs=0.01)


def test_within_a_file_there_are_rests_while_somebody_trains() -> None:
    tracker, clock = Tracker(), Clock()
    save = Save(clock, processors=0.5, tracker=tracker)
    with tracker.phase(Phase.DEVICE):
        save.write(3)
        began_s = clock.now
        save.pace.rest(256 << 10)
        rest_s = clock.now - began_s
        # A part of what its bytes take, over the share of the processors.
        assert 0.3 * 0.1 / 32 / 0.5 < rest_s < 0.1 / 32 / 0.5
        save.pace.rest(256 << 10, taken=0.4)
        assert clock.now - began_s == pytest.approx(1.5 * rest_s), "half of it where the buffer fills"
        save.pace.rest(256 << 10, taken=0.9)
        assert clock.now - began_s == pytest.approx(1.5 * rest_s), "a sleep takes longer than that"
        rest_s = clock.now - began_s
    tracker._phase = (Phase.BETWEEN, -1000.0)
    save.pace.rest(256 << 10)
    assert clock.now == began_s + rest_s
