"""The line between the two processes of a host: calls arrive in order, errors as they were raised, and each notices
the end of the other.
"""

import threading
import time
from dataclasses import replace

import pytest

from podembed.workers.device.doorway import ChannelLost, ChannelTimeout
from podembed.workers.stepwise.line import Answered, Line, LineEnd, Turns
from tests.workers.stepwise.packing import PICKLED


def echo(text):
    """A method of the host in these tests."""


def fail(text):
    """Another one."""


class TwoParts(Exception):
    """Pickle cannot make it again from its `args`."""

    def __init__(self, code, why):
        super().__init__(f"{code}: {why}")
        self.code = code


def answer(after, method, arguments):
    if method == "fail":
        raise TwoParts(3, arguments[0])
    return Answered((after, method, *arguments), has_room=True)


@pytest.fixture
def line():
    line = Line(answer, PICKLED)
    yield line
    line.close()


def end_of(line, *, timeout_s=20.0):
    return LineEnd(line.key, PICKLED, timeout_s=timeout_s)


@pytest.mark.parametrize("text", ["", "short", "x" * 5_000_000], ids=["empty", "short", "long"])
def test_calls_are_answered_by_the_thread_of_the_host(line, text):
    end = end_of(line)
    for after in (0, 7):
        assert end.begin(after, echo, text)() == Answered((after, "echo", text), has_room=True)
    end.close()


def test_an_error_arrives_as_it_was_raised_and_says_where(line):
    end = end_of(line)
    with pytest.raises(TwoParts, match="3: mine") as raised:
        end.begin(0, fail, "mine")()
    assert raised.value.code == 3
    assert "in answer" in str(raised.value.__cause__)
    assert end.begin(0, echo, "on")().value == (0, "echo", "on")


def test_a_device_process_may_go_and_another_one_come(line):
    for _ in range(2):
        end = end_of(line)
        assert end.begin(0, echo, "here")().has_room
        end.close()


def test_strangers_are_turned_away(line):
    stranger = LineEnd(replace(line.key, secret=bytes(32)), PICKLED, timeout_s=20.0)
    with pytest.raises(ChannelLost):
        stranger.begin(0, echo, "let me in")()
    assert end_of(line).begin(0, echo, "me")().value == (0, "echo", "me")


def test_a_host_that_hangs_up_is_noticed_at_once(line):
    end = end_of(line, timeout_s=600.0)
    end.begin(0, echo, "once")()
    line.close()
    line.close()
    with pytest.raises(ChannelLost, match=r"See its log|Its log says why"):
        end.begin(0, echo, "twice")()
    with pytest.raises(ChannelLost):
        end_of(line)


def test_a_host_that_does_not_answer_is_given_up_at_the_deadline():
    go_on = threading.Event()

    def late(after, method, arguments):
        go_on.wait(60.0)
        return Answered("late", has_room=True)

    line = Line(late, PICKLED)
    end = end_of(line, timeout_s=0.2)
    with pytest.raises(ChannelTimeout, match="did not answer"):
        end.begin(0, echo, "first")()
    go_on.set()
    # The late answer is not taken for that of the next call.
    with pytest.raises(ChannelLost):
        end.begin(0, echo, "second")()
    line.close()


def test_the_thread_of_a_line_ends_with_it(line):
    before = threading.active_count()
    other = Line(answer, PICKLED)
    end = end_of(other)
    end.begin(0, echo, "x")()
    assert threading.active_count() == before + 1
    other.close()
    deadline = time.monotonic() + 20.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_call_waits_for_the_call_of_the_driver_before_it():
    turns, said = Turns(), []

    def of_device():
        turns.wait_for(2, timeout_s=20.0)
        said.append("device")

    waiting = threading.Thread(target=of_device)
    waiting.start()
    turns.end(1)
    said.append("driver")
    turns.end(2)
    waiting.join()
    assert said == ["driver", "device"]
    turns.wait_for(1, timeout_s=0.0)
    with pytest.raises(ChannelTimeout, match="driver enqueued"):
        turns.wait_for(3, timeout_s=0.05)
    turns.begin_anew()
    with pytest.raises(ChannelTimeout):
        turns.wait_for(1, timeout_s=0.05)
