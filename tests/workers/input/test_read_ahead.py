from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from podembed.workers.data.batch import Batch
from podembed.workers.input.read_ahead import ReadAhead, ReadAheadError
from tests.processes import wait_for
from tests.workers.data.test_batch import batch_of
from tests.workers.mesh.mesh_testing import PATIENCE_S


class NumberedSteps:
    """A reader whose batch of step t carries sample id t; `before` runs in the reading thread before each read."""

    def __init__(self, before: Callable[[int], object] = lambda step: None) -> None:
        self.steps: list[int] = []
        self.threads: set[int] = set()
        self.is_closed = False
        self._before = before

    def read(self, step: int) -> Batch:
        self.threads.add(threading.get_ident())
        self.steps.append(step)
        self._before(step)
        return batch_of([[step]], first_id=step)

    def close(self) -> None:
        self.is_closed = True


def step_of(batch: Batch) -> int:
    return int(batch.sample_ids[0])


def test_steps_come_in_order_from_another_thread() -> None:
    reader = NumberedSteps()
    with ReadAhead(reader, first_step=3, depth=2) as ahead:
        assert [step_of(ahead.get(step)) for step in range(3, 20)] == list(range(3, 20))
    assert reader.steps[:17] == list(range(3, 20))
    assert reader.threads.isdisjoint({threading.get_ident()})
    assert len(reader.threads) == 1
    assert reader.is_closed


def test_no_more_than_depth_steps_are_read_ahead() -> None:
    third, fourth = threading.Event(), threading.Event()

    def mark(step: int) -> None:
        (third if step == 2 else fourth if step == 3 else threading.Event()).set()

    reader = NumberedSteps(mark)
    with ReadAhead(reader, first_step=0, depth=3) as ahead:
        assert third.wait(PATIENCE_S)
        assert not fourth.wait(0.1)
        ahead.get(0)
        assert fourth.wait(PATIENCE_S)
    assert reader.steps == [0, 1, 2, 3]


def test_seek_drops_what_was_read_ahead_and_reads_there() -> None:
    entered, release = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 1:
            entered.set()
            assert release.wait(PATIENCE_S)
        if step == 40:
            wait_for("wait for step 40", lambda: ahead.num_waits > 0, seconds=PATIENCE_S)

    with ReadAhead(NumberedSteps(hold), first_step=0, depth=4) as ahead:
        assert entered.wait(PATIENCE_S)
        ahead.seek(40)
        release.set()
        assert [step_of(ahead.get(step)) for step in (40, 41)] == [40, 41]
        ahead.seek(7)
        assert step_of(ahead.get(7)) == 7
        assert 1 <= ahead.num_waits <= 3


def test_an_error_is_raised_at_its_step_and_again_until_a_seek() -> None:
    def refuse(step: int) -> None:
        if step == 2:
            raise ValueError("bad row in step 2")

    reader = NumberedSteps(refuse)
    with ReadAhead(reader, first_step=0, depth=8) as ahead:
        assert [step_of(ahead.get(step)) for step in (0, 1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="bad row in step 2"):
                ahead.get(2)
        ahead.seek(3)
        assert step_of(ahead.get(3)) == 3
    assert reader.steps[:4] == [0, 1, 2, 3]


def test_steps_out_of_turn_are_refused() -> None:
    with ReadAhead(NumberedSteps(), first_step=5) as ahead:
        with pytest.raises(ReadAheadError, match=r"request for step 6. Expected step 5. Call seek\(6\)"):
            ahead.get(6)
        assert step_of(ahead.get(5)) == 5


def test_a_step_that_does_not_come_is_an_error_in_time() -> None:
    release = threading.Event()
    ahead = ReadAhead(NumberedSteps(lambda step: release.wait(PATIENCE_S)), first_step=0).start()
    with pytest.raises(ReadAheadError, match=r"no batch for step 0 after 0\.05 s; the input thread is running"):
        ahead.get(0, timeout_s=0.05)
    with pytest.raises(ReadAheadError, match=r"still reading step 0 after 0\.05 s"):
        ahead.close(deadline_s=0.05)
    release.set()
    ahead.close()


def test_closing_ends_the_thread_and_whoever_waits() -> None:
    release = threading.Event()
    ahead = ReadAhead(NumberedSteps(lambda step: release.wait(PATIENCE_S)), first_step=0).start()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            ahead.get(0, timeout_s=PATIENCE_S)
        except ReadAheadError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for("wait for step 0", lambda: ahead.num_waits > 0, seconds=PATIENCE_S)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    waiting.join(PATIENCE_S)
    release.set()
    closing.join(PATIENCE_S)
    assert "closed while step 0" in str(raised[0])
    ahead.close()
    with pytest.raises(ReadAheadError, match="closed"):
        ahead.get(0)


def test_never_started_is_said_and_closes() -> None:
    reader = NumberedSteps()
    ahead = ReadAhead(reader, first_step=0)
    with pytest.raises(ReadAheadError, match="not started"):
        ahead.get(0, timeout_s=0.01)
    ahead.close()
    assert reader.is_closed
    with pytest.raises(ReadAheadError, match="depth 0"):
        ReadAhead(reader, first_step=0, depth=0)
