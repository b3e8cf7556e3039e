"""One connection of a mesh after its handshake: frames out, frames in, nothing twice and nothing early.

A `Link` never blocks and never waits; `read` and `write` move what the socket takes or holds now, and `mesh` decides
when to call them. Large payloads go straight between the caller's buffers and the kernel. A small frame is read in one
call, header and all, and copied. So the beginning of a later exchange's frame may be read and kept, at most
`STAGE_BYTES` of it. The rest stays in the kernel until that exchange begins. TCP therefore holds a fast peer back.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from podembed.workers.faults.frames import Spoil
from podembed.workers.mesh.frames import (
    HEADER_BYTES,
    JOINED_BYTES,
    MAX_FRAME_BYTES,
    TRAILER_BYTES,
    Buffer,
    Farewell,
    FrameHeader,
    Tag,
    size_of,
    tag_name,
    trailer_of,
    without_first,
    writable_views,
)
from podembed.workers.mesh.mesh_errors import ExchangeTimeout, FrameError, PeerLost

Receive = Callable[[int, int], Buffer | Sequence[Buffer] | None]
"""`receive(rank, num_bytes)` gives the buffer for a payload that is about to arrive, or several to fill in turn."""

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
STAGE_BYTES = 1 << 14
_MAX_VIEWS_PER_CALL = min(os.sysconf("SC_IOV_MAX"), 1024)


def new_stage() -> memoryview:
    """Room for the links of one mesh, into which frames are read; nothing stays there between two calls."""
    return memoryview(bytearray(STAGE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRules:
    """Rules that both ends of every link of a mesh share.

    Attributes:
      own_rank, generation: written into every header.
      spoil: injects faults into frames.
    """

    own_rank: int
    generation: int
    spoil: Spoil | None = None


class Link:
    """The connection to one host. Mutable; owned by the step thread.

    Args:
      stage: receive buffer of the mesh, see `new_stage`.

    Attributes:
      rank: the host at the other end.
      watched: the selector events it is registered for, kept by the mesh.
      bytes_sent, bytes_received: lengths of the payloads of the current exchange; the latter once its header is here.
    """

    def __init__(self, *, rank: int, connection: socket.socket, rules: LinkRules, stage: memoryview) -> None:
        self._stage = stage
        # What was read and belongs to what comes next.
        self._ahead = memoryview(b"")
        self.rank = rank
        self.connection = connection
        self.watched = 0
        self.bytes_sent = self.bytes_received = 0
        self._rules = rules
        self._out: list[memoryview] = []
        self._out_at = 0
        self._sent_frames = 0
        self._header_bytes = memoryview(bytearray(HEADER_BYTES))
        self._header_filled = 0
        self._header: FrameHeader | None = None
        self._trailer_bytes = memoryview(bytearray(TRAILER_BYTES))
        self._payload: list[memoryview] = []
        self._missing: list[memoryview] | None = None
        self._received_frames = 0
        self._has_left = False
        self._expected: tuple[int, int] | None = None
        self._receive: Receive | None = None

    @property
    def is_sent(self) -> bool:
        return self._out_at == len(self._out)

    @property
    def is_received(self) -> bool:
        return self._expected is None

    @property
    def is_finished(self) -> bool:
        return self._expected is None and not self._out

    @property
    def interest(self) -> int:
        """Selector events that would let this link move on, or show that the peer is gone."""
        # With the next exchange's header at hand there is nothing to read, and its payload would wake the selector for
        # ever.
        is_readable = not self._has_left and (self._expected is not None or self._header is None)
        return (READ if is_readable else 0) | (WRITE if self._out_at < len(self._out) else 0)

    def begin(self, *, tag: int, step: int, views: list[memoryview] | None, receive: Receive | None) -> None:
        """Sets up both directions of one exchange and sends what the kernel takes at once.

        Args:
          views: parts of the frame; None sends none.
          receive: for the frame of the peer; None expects none.

        Raises:
          PeerLost: the peer has left.
          FrameError: the frame that came early belongs to another exchange.
        """
        self.bytes_sent = self.bytes_received = 0
        if views is None and receive is None:
            return
        if self._has_left:
            raise self._lost("it closed its mesh before this exchange")
        if views is not None:
            self._send(tag, step, views)
        if receive is not None:
            self._expected, self._receive = (tag, step), receive
            if self._header is not None:
                self.read()

    def _send(self, tag: int, step: int, views: list[memoryview]) -> None:
        rules, num_bytes = self._rules, size_of(views)
        header = FrameHeader(tag, step, rules.own_rank, rules.generation, self._sent_frames, num_bytes).pack()
        self._sent_frames += 1
        self.bytes_sent = num_bytes
        parts = [header, *views, trailer_of(header)] if views else [header]
        if num_bytes <= JOINED_BYTES:
            parts = [b"".join(parts)]
        self._out, self._out_at = [memoryview(part) for part in parts], 0
        if rules.spoil is not None:
            self._out = rules.spoil(self.connection, self.rank, tag_name(tag), step, self._out)
        self.write()

    def write(self) -> None:
        """Sends what the kernel takes now.

        Raises:
          PeerLost: the connection is broken.
        """
        while self._out_at < len(self._out):
            batch = self._out[self._out_at : self._out_at + _MAX_VIEWS_PER_CALL]
            try:
                count = self.connection.send(batch[0]) if len(batch) == 1 else self.connection.sendmsg(batch)
            except BlockingIOError:
                return
            except OSError as error:
                if self._header is None:
                    # A peer that left said why before its connection broke under our sending; that is the better
                    # report.
                    self._read_header()
                raise self._lost(f"sending failed, {error.strerror}") from error
            if not self._drop_sent(count, len(batch)):
                return
        self._out, self._out_at = [], 0

    def _drop_sent(self, count: int, batch_len: int) -> bool:
        """Steps over `count` sent bytes; returns whether the whole batch was taken."""
        end = self._out_at + batch_len
        while self._out_at < end:
            view = self._out[self._out_at]
            if count < view.nbytes:
                self._out[self._out_at] = view[count:]
                return False
            count -= view.nbytes
            self._out_at += 1
        return True

    def read(self) -> None:
        """Takes what has arrived for the current exchange, and at most the header of the next.

        Raises:
          PeerLost: the connection ended, or the peer said that it leaves.
          FrameError: what arrived is not the frame that must come next.
          MeshUsageError: the caller's `receive` gave no fitting buffer.
        """
        if self._header is None and not self._read_header():
            return
        if self._expected is not None:
            if self._missing is None:
                self._missing = self._open_payload()
                self._take_ahead(self._missing)
            # One call per readiness: looping here while the peer sends would starve our own sending.
            if self._missing:
                count = self._receive_into(self._missing, "payload")
                self._missing = without_first(self._missing, count)
            if not self._missing:
                self._close_payload()
                if self._ahead:
                    # The kernel does not report what was already read.
                    self._read_header()
        if self._ahead and self._ahead.obj is self._stage.obj:
            # The next read of any link writes over the stage.
            self._ahead = memoryview(bytes(self._ahead))

    def _read_header(self) -> bool:
        room = self._header_bytes[self._header_filled :]
        if not self._ahead:
            # Of an exchange that has not begun, the rest is left in the kernel.
            views = [room] if self._expected is None else [room, self._stage]
            count = self._receive_into(views, "header", len(room))
            self._ahead = self._stage[: max(0, count - len(room))]
        else:
            count = min(len(room), len(self._ahead))
            room[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
        self._header_filled += min(count, len(room))
        if self._header_filled < HEADER_BYTES:
            return False
        self._header_filled = 0
        header = FrameHeader.unpack(bytes(self._header_bytes), rank=self.rank)
        self._check(header)
        if header.tag == Tag.GOODBYE:
            self._take_goodbye(header.step)
            return False
        self._header = header
        self._received_frames += 1
        return True

    def _take_ahead(self, missing: list[memoryview]) -> None:
        """Fills what is missing with what was already read. Mutated: `missing`, which loses what is filled."""
        while missing and self._ahead:
            view, ahead = missing[0], self._ahead
            count = min(view.nbytes, ahead.nbytes)
            view[:count] = ahead[:count]
            self._ahead = ahead[count:]
            if count == view.nbytes:
                del missing[0]
            else:
                missing[0] = view[count:]

    def _check(self, header: FrameHeader) -> None:
        """Refuses every header but the next one of this connection."""
        rules = self._rules
        due = (self.rank, rules.generation, self._received_frames)
        if header[2:5] == due and header.payload_bytes <= MAX_FRAME_BYTES:
            return
        for field, found, expected in (
            ("sender", header.sender, self.rank),
            ("generation", header.generation, rules.generation),
            ("sequence", header.sequence, self._received_frames),
        ):
            if found != expected:
                raise FrameError(self.rank, field, str(found), str(expected))
        if header.payload_bytes > MAX_FRAME_BYTES:
            raise FrameError(self.rank, "payload bytes", str(header.payload_bytes), f"at most {MAX_FRAME_BYTES}")

    def _take_goodbye(self, step: int) -> None:
        self._has_left = True
        if step == Farewell.ORDERLY and self.is_finished:
            # It has all it wants from us and we have all it sent: fine, unless another exchange begins.
            return
        if step == Farewell.ORDERLY:
            raise self._lost("it closed its mesh in the middle of an exchange")
        if step == Farewell.FAILED:
            raise self._lost("it left after a failure of its own")
        raise PeerLost(self.rank, f"it left because of rank {step}", step)

    def _open_payload(self) -> list[memoryview]:
        """Asks the caller for the buffer. Returns the parts to fill; none for an empty frame."""
        header, receive = self._header, self._receive
        assert header is not None
        assert receive is not None
        if (header.tag, header.step) != self._expected:
            expected_tag, expected_step = self._expected or (None, None)
            raise FrameError(
                self.rank,
                "tag and step",
                f"{header.tag} and {header.step}",
                f"{expected_tag} and {expected_step}, the exchange in progress",
            )
        self.bytes_received = header.payload_bytes
        buffer = receive(self.rank, header.payload_bytes)
        if header.payload_bytes == 0:
            return []
        self._payload = writable_views(buffer, header.payload_bytes, self.rank)
        return [*self._payload, self._trailer_bytes]

    def _close_payload(self) -> None:
        header = self._header
        assert header is not None
        if header.payload_bytes:
            trailer, expected = bytes(self._trailer_bytes), trailer_of(bytes(self._header_bytes))
            if trailer != expected:
                raise FrameError(self.rank, "trailer", repr(trailer), f"{expected!r} after the payload")
        self._header = self._missing = self._expected = self._receive = None
        self._payload = []

    def _receive_into(self, views: list[memoryview], part: str, num_missing: int | None = None) -> int:
        """Bytes taken from the socket, 0 when it holds none now.

        Args:
          num_missing: bytes of the part that have not come, if not all of the views.
        """
        try:
            count = self.connection.recvmsg_into(views[:_MAX_VIEWS_PER_CALL])[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(f"receiving failed, {error.strerror}") from error
        if count == 0:
            num_missing = sum(map(len, views)) if num_missing is None else num_missing
            raise self._lost(f"the connection closed with {num_missing} bytes of a {part} missing")
        return count

    def _lost(self, reason: str) -> PeerLost:
        return PeerLost(self.rank, reason)

    def say_goodbye(self, step: int) -> None:
        """Sends the peer the reason for leaving, if no frame is half sent and the kernel takes it. Never raises."""
        if not self.is_sent or self._has_left:
            return
        header = FrameHeader(
            tag=Tag.GOODBYE,
            step=step,
            sender=self._rules.own_rank,
            generation=self._rules.generation,
            sequence=self._sent_frames,
            payload_bytes=0,
        )
        try:
            self.connection.send(header.pack())
        except OSError:
            # The peer is gone or takes nothing; the closing connection tells it all the same.
            return
        self._sent_frames += 1

    def close(self) -> None:
        """Closes the connection and lets go of the caller's buffers."""
        self.connection.close()
        self._out, self._out_at = [], 0
        self._missing = self._receive = None
        self._payload = []
        self._ahead = memoryview(b"")


def farewell_for(error: BaseException) -> int:
    """What the others hear about the cause: the rank at fault if it is one rank."""
    match error:
        case PeerLost():
            return error.blamed_rank
        case FrameError():
            return error.rank
        case ExchangeTimeout():
            late = {*error.waiting_for, *error.unsent}
            return late.pop() if len(late) == 1 else Farewell.FAILED
        case _:
            return Farewell.FAILED


class LinkPoll:
    """Waits for links that can move, and for a request to stop. Mutated: `watched` of the links.

    It stands on `select.epoll` itself. The `selectors` of Python make an object for every event, which costs as much as
    the event.

    Args:
      abort_fileno: descriptor of an `AbortSignal`, which wakes every wait once it is set.
    """

    def __init__(self, abort_fileno: int) -> None:
        self._epoll = select.epoll()
        self._links: dict[int, Link] = {}
        self._epoll.register(abort_fileno, select.EPOLLIN)

    def watch(self, link: Link) -> None:
        """Registers the link for what it can do next."""
        interest = link.interest
        if interest == link.watched:
            return
        descriptor = link.connection.fileno()
        # A connection of which nothing is wanted is left out, since the end of one is reported all the time.
        if not interest:
            self._epoll.unregister(descriptor)
            del self._links[descriptor]
        elif not link.watched:
            self._epoll.register(descriptor, interest)
            self._links[descriptor] = link
        else:
            self._epoll.modify(descriptor, interest)
        link.watched = interest

    def ready(self, wait_s: float) -> list[tuple[Link | None, bool, bool]]:
        """Links that can move, at the latest after so long: each with whether it can read, and write. None is the
        request to stop.
        """
        found = self._epoll.poll(wait_s, len(self._links) + 1)
        # A broken connection shows as neither; both ways then find out what is wrong.
        return [
            (self._links.get(descriptor), bool(events & ~WRITE), bool(events & ~READ)) for descriptor, events in found
        ]

    def close(self) -> None:
        """Frees the descriptor."""
        self._epoll.close()
