"""The line between the driver and one process of the step-by-step mode: the calls that a step is made of.

A call by Ray costs the driver and the worker half a millisecond of processor time each, and a step makes four. So each
process listens at a TCP port, the driver connects once, and short calls go that way. Both sides prove that they know
the pod's secret, as hosts of a mesh do (`workers.mesh.handshake`), and each message proves where it comes from
(`workers.stepwise.sealed`). A thread of the process answers, one call after
another (`workers.stepwise.line`). The driver's end never blocks: `advance` sends what the sockets take and receives
what they have. So one thread waits for all processes and watches over them.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from podembed.workers.device.doorway import ChannelError, ChannelLost
from podembed.workers.mesh.handshake import NONCE_BYTES, Dialogue, MeshIdentity, answer, dial
from podembed.workers.mesh.link_silence import ask_when_quiet
from podembed.workers.mesh.listening import family, open_listener
from podembed.workers.mesh.mesh_errors import HandshakeRefused
from podembed.workers.stepwise.line import SIZE, MessageConnection, exactly, framed
from podembed.workers.stepwise.sealed import SALT_BYTES, TAG_BYTES, Seals

_HANDSHAKE_S = 5.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLineSpec:
    """What both ends of a line must know.

    Attributes:
      name: name of the pod and of the process in it.
      token: secret of the pod.
      bind_address: where the process listens; an actor replaces an empty one by its machine's address.
    """

    name: str
    token: bytes
    bind_address: str = ""

    def identity(self, *, is_driver: bool) -> MeshIdentity:
        """The driver dials, so it has the higher rank."""
        return MeshIdentity(run_id=self.name, generation=1, token=self.token, rank=int(is_driver), num_ranks=2)


class DriverDoor:
    """The door by which a process lets its driver in. Mutated by `close` only."""

    def __init__(self, spec: DriverLineSpec) -> None:
        self._spec = spec
        self._listener = open_listener(spec.bind_address)
        self._listener.setblocking(True)
        host, port, *_ = self._listener.getsockname()
        self.address: tuple[str, int] = (host, port)

    def admit(self, *, timeout_s: float | None) -> MessageConnection:
        """Waits for the driver; callers without the secret are turned away."""
        self._listener.settimeout(timeout_s)
        while True:
            link, _ = self._listener.accept()
            dialogue = answer(
                self._spec.identity(is_driver=False),
                nonce=secrets.token_bytes(NONCE_BYTES),
                is_connected=lambda rank: False,
            )
            try:
                _converse(link, dialogue)
                return MessageConnection(link, _sealed(link, self._spec, is_driver=False))
            except (OSError, HandshakeRefused, ChannelError):
                link.close()

    def close(self) -> None:
        """Lets no caller in any more; a thread in `admit` wakes. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _converse(link: socket.socket, dialogue: Dialogue) -> None:
    """Goes through a handshake.

    Raises:
      HandshakeRefused, OSError, ChannelLost: the other side is not who it should be, or is gone.
    """
    link.settimeout(_HANDSHAKE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ask_when_quiet(link)
    message: bytes | None = None
    while True:
        try:
            turn = dialogue.send(message)  # type: ignore[arg-type]
        except StopIteration:
            return
        link.sendall(turn.message)
        message = bytes(exactly(link, turn.num_bytes))


def _sealed(link: socket.socket, spec: DriverLineSpec, *, is_driver: bool) -> Seals:
    """Agrees on the key of a connection whose ends have shaken hands. Raises as `_converse`."""
    own = secrets.token_bytes(SALT_BYTES)
    link.sendall(own)
    other = bytes(exactly(link, SALT_BYTES))
    driver_salt, process_salt = (own, other) if is_driver else (other, own)
    return Seals.of(spec.token, driver_salt=driver_salt, process_salt=process_salt, is_driver=is_driver)


class Ticket:
    """A call under way. Mutated: `answer`, which is None until the answer is there."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: bytearray | None = None


class DriverEnd:
    """The driver's side of a line. Answers come in the order of the calls. Mutable, for one thread.

    Attributes:
      is_broken: whether the other process is gone, as far as this line can tell, or something came that it did not
        write. Calls under way have no answer then.
      why: what broke it.
    """

    def __init__(self, link: socket.socket, seals: Seals) -> None:
        self._link, self._seals = link, seals
        self._link.setblocking(False)
        self._unsent: deque[memoryview] = deque()
        self._waiting: deque[Ticket] = deque()
        self._header = bytearray()
        self._content: bytearray | None = None
        self._num_received = 0
        self.is_broken, self.why = False, ""

    @staticmethod
    def connect(address: tuple[str, int], spec: DriverLineSpec) -> DriverEnd:
        """Calls at a process.

        Raises:
          ChannelLost: it cannot be reached from here, or is not who it should be.
        """
        link = socket.socket(family(address[0]), socket.SOCK_STREAM)
        try:
            link.settimeout(_HANDSHAKE_S)
            link.connect(address)
            nonce = secrets.token_bytes(NONCE_BYTES)
            _converse(link, dial(spec.identity(is_driver=True), expected_rank=0, nonce=nonce))
            return DriverEnd(link, _sealed(link, spec, is_driver=True))
        except (OSError, HandshakeRefused) as error:
            link.close()
            raise ChannelLost(f"Found no process at {address[0]}:{address[1]} that can be called ({error}).") from error
        except ChannelLost:
            link.close()
            raise

    def begin(self, content: bytes) -> Ticket:
        """Makes a call, which the next `advance` sends. So calls to several processes are all packed before one of
        these wakes and takes the driver's processor.
        """
        ticket = Ticket()
        self._waiting.append(ticket)
        self._unsent.extend(memoryview(part) for part in framed(content, self._seals))
        return ticket

    def advance(self) -> None:
        """Sends and receives what can be without waiting."""
        self._guarded_send()
        try:
            while self._waiting and not self.is_broken and self._receive():
                pass
        except BlockingIOError:
            return
        except (OSError, ChannelLost) as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        self.is_broken, self.why = True, str(error)

    def _guarded_send(self) -> None:
        try:
            while self._unsent and not self.is_broken:
                sent = self._link.send(self._unsent[0])
                rest = self._unsent.popleft()[sent:]
                if rest:
                    self._unsent.appendleft(rest)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error)

    def _receive(self) -> bool:
        """Receives once. Returns whether there may be more."""
        if self._content is None:
            self._header += self._taken(self._link.recv(SIZE.size + TAG_BYTES - len(self._header)))
            if len(self._header) < SIZE.size + TAG_BYTES:
                return not self.is_broken
            (size,) = SIZE.unpack(self._checked(self._header))
            self._content, self._num_received = bytearray(size + TAG_BYTES), 0
            self._header.clear()
        rest = memoryview(self._content)[self._num_received :][:_CHUNK_BYTES]
        if rest:
            count = self._link.recv_into(rest)
            self.is_broken = not count
            self._num_received += count
        del rest  # while it lives, the content cannot get shorter
        if self._num_received == len(self._content):
            self._waiting.popleft().answer, self._content = self._checked(self._content), None
        return not self.is_broken

    def _checked(self, content: bytearray) -> bytearray:
        """A size or a message without its tag. Raises ChannelLost if the process did not write it."""
        tag = content[-TAG_BYTES:]
        del content[-TAG_BYTES:]
        self._seals.incoming.check(content, tag)
        return content

    def _taken(self, found: bytes) -> bytes:
        self.is_broken = not found
        return found

    @property
    def _events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def close(self) -> None:
        """Hangs up. Safe to call twice."""
        self.is_broken = True
        self._link.close()

    @staticmethod
    def advance_all(ends: Iterable[DriverEnd], *, timeout_s: float) -> None:
        """Waits until something can be sent or received on one of the lines, and advances those."""
        open_ends = {end._link.fileno(): end for end in ends if not end.is_broken}
        watch = select.poll()
        for descriptor, end in open_ends.items():
            watch.register(descriptor, end._events)
        for descriptor, _ in watch.poll(1000 * timeout_s):
            open_ends[descriptor].advance()
