"""The line between the two processes of a host: calls arrive in order, errors as they were raised, and each notices
the end of the other.
"""

import pickle
import threading
import time
from dataclasses import replace

import pytest

from podembed.workers.device.doorway import ChannelLost, ChannelTimeout
from podembed.workers.stepwise.line import Answered, LineEnd, Turns, line_for_device
from tests.workers.stepwise.packing import PICKLED


def echo(text):
    """A method of the host in these tests."""


def fail(text):
    """Another one."""


def lambda_of(text):
    """One whose answer cannot be packed."""


class TwoParts(Exception):
    """Pickle cannot make it again from its `args`."""

    def __init__(self, code, why):
        super().__init__(f"{code}: {why}")
        self.code = code


def answer(after, method, arguments):
    if method == "lambda_of":
        return lambda: None
    if method == "fail":
        raise TwoParts(3, arguments[0])
    return Answered((after, method, *arguments), has_room=True)


def line_of(answer):
    """A line, and the key to its door."""
    return line_for_device(answer, PICKLED)


@pytest.fixture
def opened():
    line, key = line_of(answer)
    yield line, key
    line.close()


@pytest.fixture
def line(opened):
    return opened[0]


@pytest.fixture
def key(opened):
    return opened[1]


def end_of(key, *, timeout_s=20.0):
    return LineEnd(key, PICKLED, timeout_s=timeout_s)


@pytest.mark.parametrize("text", ["", "short", "x" * 5_000_000], ids=["empty", "short", "long"])
def test_calls_are_answered_by_the_thread_of_the_host(key, text):
    end = end_of(key)
    for after in (0, 7):
        assert end.begin(after, echo, text)() == Answered((after, "echo", text), has_room=True)
    end.close()


def test_an_error_arrives_as_it_was_raised_and_says_where(key):
    end = end_of(key)
    with pytest.raises(TwoParts, match="3: mine") as raised:
        end.begin(0, fail, "mine")()
    assert raised.value.code == 3
    assert "in answer" in str(raised.value.__cause__)
    assert end.begin(0, echo, "on")().value == (0, "echo", "on")


def test_a_device_process_may_go_and_another_one_come(key):
    for _ in range(2):
        end = end_of(key)
        assert end.begin(0, echo, "here")().has_room
        end.close()


def test_an_answer_that_cannot_travel_is_an_error_of_the_call(key):
    end = end_of(key)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        end.begin(0, lambda_of, "x")()
    assert end.begin(0, echo, "on")().value == (0, "echo", "on")


def test_strangers_are_turned_away(key):
    stranger = LineEnd(replace(key, secret=bytes(32)), PICKLED, timeout_s=20.0)
    with pytest.raises(ChannelLost):
        stranger.begin(0, echo, "let me in")()
    assert end_of(key).begin(0, echo, "me")().value == (0, "echo", "me")


def test_a_host_that_hangs_up_is_noticed_at_once(line, key):
    end = end_of(key, timeout_s=600.0)
    end.begin(0, echo, "once")()
    line.close()
    line.close()
    with pytest.raises(ChannelLost, match=r"See its log|Its log says why"):
        end.begin(0, echo, "twice")()
    with pytest.raises(ChannelLost):
        end_of(key)


def test_a_host_that_does_not_answer_is_given_up_at_the_deadline():
    go_on = threading.Event()

    def late(after, method, arguments):
        go_on.wait(60.0)
        return Answered("late", has_room=True)

    line, key = line_of(late)
    end = end_of(key, timeout_s=0.2)
    with pytest.raises(ChannelTimeout, match="did not answer"):
        end.begin(0, echo, "first")()
    go_on.set()
    # The late answer is not taken for that of the next call.
    with pytest.raises(ChannelLost):
        end.begin(0, echo, "second")()
    line.close()


def test_the_thread_of_a_line_ends_with_it(line):
    # By themselves, since threads of other tests may end meanwhile.
    before = set(threading.enumerate())
    other, key = line_of(answer)
    end = end_of(key)
    end.begin(0, echo, "x")()
    (own,) = set(threading.enumerate()) - before
    other.close()
    deadline = time.monotonic() + 20.0
    while own.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not own.is_alive()


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
