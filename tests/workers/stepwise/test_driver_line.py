"""The line between the driver and a process: calls and answers of any size without blocking, and what a broken line
looks like.
"""

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest

from podembed.workers.device.doorway import ChannelLost
from podembed.workers.stepwise.driver_line import DriverDoor, DriverEnd, DriverLineSpec
from podembed.workers.stepwise.line import LineServer, Raised
from tests.workers.stepwise.packing import PICKLED

SPEC = DriverLineSpec(name="a pod host 0", token=b"t" * 32, bind_address="127.0.0.1")


def answer(method, arguments):
    if method == "fail":
        raise KeyError(*arguments)
    if method == "exit":
        raise arguments[0]
    return method, arguments


class Process:
    """The other end, in threads of this process."""

    def __init__(self, answer=answer):
        self.door = DriverDoor(SPEC)
        self.line = LineServer(answer, PICKLED, self.door, name="calls of the driver")


@pytest.fixture
def process():
    process = Process()
    yield process
    process.line.close()


@pytest.fixture
def end(process):
    end = DriverEnd.connect(process.door.address, SPEC)
    yield end
    end.close()


def begin(end, method, *arguments):
    return end.begin(PICKLED.pack((method, arguments)))


def wait(end, tickets):
    deadline = time.monotonic() + 20.0
    while any(ticket.answer is None for ticket in tickets) and not end.is_broken and time.monotonic() < deadline:
        DriverEnd.advance_all([end], timeout_s=0.2)
    return [None if ticket.answer is None else PICKLED.unpack(ticket.answer) for ticket in tickets]


@pytest.mark.parametrize("size", [0, 10, 40_000, 30_000_000])
def test_calls_of_any_size_are_answered_in_their_order(end, size):
    """The largest one fits no socket's buffer, so it is sent while it is received."""
    texts = ["x" * size, "y"]
    tickets = [begin(end, "echo", text) for text in texts]
    assert wait(end, tickets) == [("echo", (text,)) for text in texts]


def test_a_call_leaves_with_the_next_look_at_its_line():
    arrived = threading.Event()
    process = Process(lambda method, arguments: arrived.set())
    end = DriverEnd.connect(process.door.address, SPEC)
    ticket = begin(end, "first")
    assert not arrived.wait(0.1)
    end.advance()
    assert arrived.wait(20.0)
    assert wait(end, [ticket]) == [None]
    assert ticket.answer is not None
    process.line.close()


def test_nothing_blocks_while_the_other_process_works():
    go_on = threading.Event()

    def late(method, arguments):
        go_on.wait(60.0)
        return "late"

    process = Process(late)
    end = DriverEnd.connect(process.door.address, SPEC)
    # More than the sockets hold, to a process that does not receive the second one.
    tickets = [begin(end, "first"), begin(end, "second", b"x" * 30_000_000)]
    DriverEnd.advance_all([end], timeout_s=0.01)
    assert [ticket.answer for ticket in tickets] == [None, None]
    go_on.set()
    assert wait(end, tickets) == ["late", "late"]
    process.line.close()
    end.close()


def test_an_error_arrives_as_it_was_raised_and_says_where(end):
    (found,) = wait(end, [begin(end, "fail", 3)])
    assert isinstance(found, Raised)
    error = found.as_raised()
    assert (type(error), error.args) == (KeyError, (3,))
    assert "in answer" in str(error.__cause__)


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit("x")])
def test_what_ends_a_program_does_not_end_the_thread_that_answers(end, raised):
    (found,) = wait(end, [begin(end, "exit", raised)])
    assert isinstance(found, Raised)
    with pytest.raises(RuntimeError, match=rf"raised {type(raised).__name__}\(.*Leave such calls"):
        raise found.as_raised()
    assert wait(end, [begin(end, "echo")]) == [("echo", ())]


def test_a_process_that_hangs_up_breaks_the_line(process, end):
    wait(end, [begin(end, "echo")])
    process.line.close()
    assert wait(end, [begin(end, "echo")]) == [None]
    assert end.is_broken
    # Whoever goes on is not held up, and gets no answer.
    assert wait(end, [begin(end, "echo")]) == [None]


@pytest.mark.parametrize("stranger", [replace(SPEC, token=b"u" * 32), replace(SPEC, name="a pod host 1")])
def test_strangers_are_turned_away_and_the_driver_is_still_let_in(process, stranger):
    with pytest.raises(ChannelLost, match="Found no process"):
        DriverEnd.connect(process.door.address, stranger)
    end = DriverEnd.connect(process.door.address, SPEC)
    assert wait(end, [begin(end, "echo")]) == [("echo", ())]
    end.close()


def test_a_port_at_which_nobody_answers_is_no_line():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with pytest.raises(ChannelLost, match="Found no process"):
        DriverEnd.connect(address, SPEC)


def test_the_thread_ends_with_the_line():
    earlier = set(threading.enumerate())
    process = Process()
    end = DriverEnd.connect(process.door.address, SPEC)
    wait(end, [begin(end, "echo")])
    # Threads of other tests come and go beside these.
    own = [thread for thread in threading.enumerate() if thread not in earlier and thread.name == "calls of the driver"]
    assert len(own) == 1
    process.line.close()
    process.line.close()
    own[0].join(20.0)
    assert not own[0].is_alive()
    end.close()


class Between:
    """Somebody in the network between the driver and the process. The first message of the driver is the next one after
    its handshake; `change` says what goes on in its place.
    """

    def __init__(self, address, change):
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._there = socket.create_connection(address)
        self.is_changing = threading.Event()
        threading.Thread(target=self._both, daemon=True).start()

    def _both(self):
        self._here, _ = self._listener.accept()
        threading.Thread(target=self._pass, args=(self._there, self._here, bytes), daemon=True).start()
        self._pass(self._here, self._there, lambda data: self._change(data) if self.is_changing.is_set() else data)

    @staticmethod
    def _pass(source, target, change):
        try:
            while data := source.recv(1 << 20):
                target.sendall(change(data))
        except OSError:
            pass
        finally:
            # Who hangs up on one side hangs up on the other.
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

    def close(self):
        for link in (self._listener, self._here, self._there):
            link.close()


FORGED = PICKLED.pack(("echo", ("forged",)))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:28] + bytes([data[28] ^ 1]) + data[29:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data + data,
        lambda data: len(FORGED).to_bytes(8, "little") + bytes(16) + FORGED + bytes(16),
        lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
        lambda data: b"\xff" * 8 + data[8:],
    ],
    ids=["content", "tag", "repeated", "forged", "huge", "negative"],
)
def test_a_message_that_was_touched_is_not_looked_at(change):
    seen = []
    process = Process(lambda method, arguments: seen.append(arguments))
    between = Between(process.door.address, change)
    end = DriverEnd.connect(between.address, SPEC)
    wait(end, [begin(end, "echo", "as it was written")])
    assert seen == [("as it was written",)]
    between.is_changing.set()
    wait(end, [begin(end, "echo", "second")])
    if not end.is_broken:  # the repeated message was answered once before it broke the line
        assert wait(end, [begin(end, "echo", "third")]) == [None]
    assert end.is_broken
    assert seen in ([("as it was written",)], [("as it was written",), ("second",)])
    assert (len(seen) == 2) == (change(bytes(range(40))) == bytes(range(40)) * 2)
    # The thread that answers lives on, and lets the driver in again.
    again = DriverEnd.connect(process.door.address, SPEC)
    assert wait(again, [begin(again, "echo", "third")]) == [None]
    assert not again.is_broken
    again.close()
    process.line.close()
    between.close()


@pytest.mark.parametrize("size", [len(FORGED), 1 << 62, -1])
def test_an_answer_that_was_touched_breaks_the_line(size):
    process = Process()
    between = Between(process.door.address, bytes)
    end = DriverEnd.connect(between.address, SPEC)
    link = between._here
    assert wait(end, [begin(end, "echo")]) == [("echo", ())]
    ticket = begin(end, "echo")
    link.sendall(size.to_bytes(8, "little", signed=True) + bytes(16) + FORGED + bytes(16))
    assert wait(end, [ticket]) in ([None], [("echo", ())])
    assert wait(end, [begin(end, "echo")]) == [None]
    assert end.is_broken
    process.line.close()
    between.close()
