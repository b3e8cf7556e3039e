"""The line between the two processes of a host in the step-by-step mode: calls of the device process to its host.

A step makes several such calls, so they have a Unix socket of their own. A thread of the host process answers them one
after another, from the making of a `LineServer` until its `close`. Calls of the driver come over a line of their own
(`workers.stepwise.driver_line`) or by Ray, so in other threads. `Turns` lets only one of them work at a time. Since the
driver does not wait for all of its calls, a device's call names the last one that must have ended before it. `Packing`
turns values into bytes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from podembed.workers.device.doorway import ChannelLost, ChannelTimeout, DoorKey, Doorway
from podembed.workers.liveness.carried_error import carried, original, words_of
from podembed.workers.stepwise.sealed import TAG_BYTES, Seals

SIZE = struct.Struct("<q")
_LONG_BYTES = 32 << 10


class Packing(Protocol):
    """How values travel between the two processes."""

    def pack(self, value: Any) -> bytes: ...

    def unpack(self, content: bytes | bytearray) -> Any: ...


@dataclass(frozen=True, slots=True)
class Answered:
    """What a call of a device returned.

    Attributes:
      has_room: whether the host would accept another batch now.
    """

    value: Any
    has_room: bool


@dataclass(frozen=True, slots=True)
class Raised:
    """What a call raised, and where."""

    error: Exception
    report: str

    def as_raised(self) -> Exception:
        """The error as it was raised over there; its cause says where."""
        error = original(self.error)
        error.__cause__ = RemoteReport(self.report)
        return error


class RemoteReport(Exception):
    """The place in another process where an error was raised."""


class MessageConnection:
    """A connection that carries messages. Mutated by its seals only.

    Args:
      seals: seals of both directions; None on a connection that no other program can write into.
    """

    def __init__(self, connection: socket.socket, seals: Seals | None = None) -> None:
        self._connection, self._seals = connection, seals

    def send(self, content: bytes) -> None:
        for part in framed(content, self._seals):
            self._connection.sendall(part)

    def receive(self) -> bytearray:
        """The next message.

        Raises:
          ChannelLost: the other process has hung up, or did not write this.
        """
        header = self._checked(exactly(self._connection, SIZE.size))
        return self._checked(exactly(self._connection, SIZE.unpack(header)[0]))

    def _checked(self, found: bytearray) -> bytearray:
        """Bytes whose tag comes next."""
        if self._seals is not None:
            self._seals.incoming.check(found, exactly(self._connection, TAG_BYTES))
        return found

    def wait_forever(self) -> None:
        """Waits without limit from now on: the other process may take its time."""
        self._connection.settimeout(None)

    def hang_up(self) -> None:
        """Wakes whoever waits for a message. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Safe to call twice."""
        self._connection.close()


class Door(Protocol):
    """Who lets callers in."""

    def admit(self, *, timeout_s: float | None) -> MessageConnection:
        """Waits for a caller; None waits until `close`. Raises OSError when the door was closed."""
        ...

    def close(self) -> None: ...


class Turns:
    """Who may work in a host. Thread-safe."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._ended = threading.Condition()
        self._number = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """No other caller works meanwhile."""
        with self._turn:
            yield

    def begin_anew(self) -> None:
        """The driver counts its calls from 1 again."""
        with self._ended:
            self._number = 0

    def end(self, number: int) -> None:
        """The driver's call of that number has ended, well or not."""
        with self._ended:
            self._number = max(self._number, number)
            self._ended.notify_all()

    def wait_for(self, number: int, *, timeout_s: float) -> None:
        """Waits until the driver's call of that number has ended.

        Raises:
          ChannelTimeout: it has not in time.
        """
        with self._ended:
            if not self._ended.wait_for(lambda: self._number >= number, timeout_s):
                raise ChannelTimeout(
                    f"The batch that the driver enqueued did not come to an end for {timeout_s:.0f} s. Expected its "
                    "lookup before it is dequeued. The driver's next call says what became of it."
                )


class LineServer:
    """The side that answers. Its thread lives until `close`, and no longer than the process.

    Args:
      answer: called with what `LineEnd` or the driver packed.
      door: lets callers in, one after another.
      name: name of the thread.
    """

    def __init__(self, answer: Callable[..., Any], packing: Packing, door: Door, *, name: str) -> None:
        self._answer = answer
        self._packing = packing
        self._door = door
        self._link: MessageConnection | None = None
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link = self._door.admit(timeout_s=None)
            except OSError:
                return  # the door was closed
            # A device process may go at any time, and another one come.
            with contextlib.closing(link), contextlib.suppress(OSError, ChannelLost):
                link.wait_forever()
                self._link = link
                while True:
                    link.send(self._answered(link.receive()))

    def _answered(self, asked: bytearray) -> bytes:
        try:
            return self._packing.pack(self._answer(*self._packing.unpack(asked)))
        except BaseException as error:
            # SystemExit of a user's function would end this thread, and the driver would not hear why.
            said = error if isinstance(error, Exception) else _out_of_place(error)
            return self._packing.pack(Raised(carried(said, self._copied), traceback.format_exc()))

    def _copied(self, value: Any) -> Any:
        return self._packing.unpack(self._packing.pack(value))

    def close(self) -> None:
        """Hangs up. Safe to call twice."""
        self._door.close()
        if self._link is not None:
            self._link.hang_up()


def _out_of_place(error: BaseException) -> RuntimeError:
    """What a call raises in place of an exception that ends programs."""
    return RuntimeError(
        f"A call raised {type(error).__name__}({words_of(error)[:200]}), which ends a program. Expected it to return, "
        "or to raise an Exception. Leave such calls as sys.exit to the driver's program."
    )


class _OwnDoor:
    """Lets in the device process of this host: over a Unix socket, which no other user can write into."""

    def __init__(self, door: Doorway) -> None:
        self._door = door

    def admit(self, *, timeout_s: float | None) -> MessageConnection:
        return MessageConnection(self._door.admit(timeout_s=timeout_s))

    def close(self) -> None:
        self._door.close()


def line_for_device(answer: Callable[..., Any], packing: Packing) -> tuple[LineServer, DoorKey]:
    """A line for the device process of this host, and what that needs to connect."""
    door = Doorway(generation=0)
    return LineServer(answer, packing, _OwnDoor(door), name="calls of the device"), door.key


class LineEnd:
    """The device's side. A call is waited for before the next one begins. Mutable.

    Args:
      timeout_s: longest wait for an answer.
    """

    def __init__(self, key: DoorKey, packing: Packing, *, timeout_s: float) -> None:
        self._packing = packing
        self._timeout_s = timeout_s
        self._link = MessageConnection(key.enter(timeout_s=timeout_s))

    def begin(self, after: int, method: Callable[..., Any], *arguments: Any) -> Callable[[], Answered]:
        """Calls a method of the host, without waiting. Returns a function that waits for the answer, and raises what
        the host raised.

        Args:
          after: the last call of the driver that must have ended before.

        Raises:
          ChannelError: the host is gone or silent. The line is of no use afterwards.
        """
        self._guarded(lambda: self._link.send(self._packing.pack((after, method.__name__, arguments))))
        return self._wait

    def _wait(self) -> Answered:
        found = self._packing.unpack(self._guarded(self._link.receive))
        if isinstance(found, Raised):
            raise found.as_raised()
        return found

    def _guarded(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except TimeoutError as error:
            # An answer that comes late must not be taken for that of another call.
            self.close()
            raise ChannelTimeout(
                f"The host process of this device did not answer for {self._timeout_s:.0f} s. See its log."
            ) from error
        except OSError as error:
            self.close()
            raise ChannelLost(f"The host process of this device is gone ({error}). See its log.") from error

    def close(self) -> None:
        """Hangs up. Safe to call twice."""
        self._link.close()


def framed(content: bytes, seals: Seals | None) -> list[bytes]:
    """The next message as it goes over a line, in parts."""
    header, tag = SIZE.pack(len(content)), b""
    if seals is not None:
        # The size has a tag of its own, since memory is taken by it before the content is there.
        header += seals.outgoing.tag(header)
        tag = seals.outgoing.tag(content)
    # A second send costs less than a copy of what is long.
    return [header + content + tag] if len(content) < _LONG_BYTES else [header, content, tag]


def exactly(link: socket.socket, size: int) -> bytearray:
    """The next bytes.

    Raises:
      ChannelLost: the other process has hung up.
    """
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        count = link.recv_into(rest)
        if not count:
            raise ChannelLost("The other process has hung up. Its log says why.")
        rest = rest[count:]
    return found
