"""One link over a socket pair, with the test playing the peer byte by byte."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from podembed.workers.mesh.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    TRAILER_BYTES,
    Farewell,
    FrameHeader,
    Tag,
    byte_views,
    trailer_of,
)
from podembed.workers.mesh.link import READ, STAGE_BYTES, WRITE, Link, LinkRules, new_stage
from podembed.workers.mesh.mesh_errors import FrameError, PeerLost
from tests.workers.mesh.mesh_testing import Inbox


@contextlib.contextmanager
def _link(*, stage: memoryview | None = None) -> Iterator[tuple[Link, socket.socket]]:
    """A link of rank 0 to rank 1, and the socket at which rank 1 sits."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(5)
    rules = LinkRules(own_rank=0, generation=7)
    link = Link(rank=1, connection=near, rules=rules, stage=stage or new_stage())
    with far:
        yield link, far
    link.close()


def _frame(payload: bytes = b"", *, sequence: int = 0, step: int = 5, tag: int = Tag.IDS) -> bytes:
    header = FrameHeader(tag, step, 1, 7, sequence, len(payload))
    packed = header.pack()
    return packed + payload + (trailer_of(packed) if payload else b"")


def _begin(link: Link, *payload: bytes | np.ndarray, step: int = 5) -> Inbox:
    inbox = Inbox()
    link.begin(tag=Tag.IDS, step=step, views=byte_views(payload), receive=inbox)
    return inbox


def test_a_frame_may_arrive_byte_by_byte() -> None:
    with _link() as (link, far):
        inbox = _begin(link)
        for byte in _frame(b"abc"):
            assert not link.is_received
            far.send(bytes([byte]))
            link.read()
        assert link.is_finished
        assert inbox.bytes_by_rank() == {1: b"abc"}


def test_more_buffers_than_one_call_takes_leave_in_order() -> None:
    with _link() as (link, far):
        pieces = [b"%05d" % index for index in range(5000)]
        _begin(link, *pieces)
        expected = b"".join(pieces)
        received = b""
        while len(received) < HEADER_BYTES + len(expected) + TRAILER_BYTES:
            received += far.recv(1 << 16)
            link.write()
        assert received[HEADER_BYTES:-TRAILER_BYTES] == expected
        assert FrameHeader.unpack(received[:HEADER_BYTES], rank=0).payload_bytes == len(expected)
        assert link.is_sent


def test_what_the_kernel_does_not_take_waits_for_writability() -> None:
    with _link() as (link, far):
        payload = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)
        _begin(link, payload[:1_000_000], payload[1_000_000:])
        assert link.interest == READ | WRITE
        received = bytearray()
        while len(received) < HEADER_BYTES + payload.nbytes + TRAILER_BYTES:
            received += far.recv(100_000)
            link.write()
        assert bytes(received[HEADER_BYTES:-TRAILER_BYTES]) == payload.tobytes()
        assert link.interest == READ


def test_later_frames_wait_for_their_exchanges() -> None:
    with _link() as (link, far):
        inbox = _begin(link)
        far.sendall(_frame(b"now") + _frame(b"later", sequence=1, step=6) + _frame(b"last", sequence=2, step=7))
        for _ in range(4):
            link.read()
        assert inbox.bytes_by_rank() == {1: b"now"}
        assert link.interest == 0
        assert _begin(link, step=6).bytes_by_rank() == {1: b"later"}
        # The header of the last one is here, too.
        assert link.interest == 0
        assert _begin(link, step=7).bytes_by_rank() == {1: b"last"}
        assert link.interest == READ


def test_a_header_that_came_in_part_is_completed_before_its_exchange() -> None:
    with _link() as (link, far):
        _begin(link)
        later = _frame(b"later", sequence=1, step=6)
        far.sendall(_frame(b"now") + later[:20])
        link.read()
        assert (link.is_finished, link.interest) == (True, READ)
        far.sendall(later[20:])
        link.read()
        assert link.interest == 0
        inbox = _begin(link, step=6)
        link.read()
        assert inbox.bytes_by_rank() == {1: b"later"}


def test_no_more_of_a_later_frame_than_the_stage_is_taken_from_the_kernel() -> None:
    with _link() as (link, far):
        payload = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()
        inbox = _begin(link)
        far.sendall(_frame(b"now") + _frame(payload, sequence=1, step=6))
        for _ in range(3):
            link.read()
        assert inbox.bytes_by_rank() == {1: b"now"}
        left = len(link.connection.recv(1 << 20, socket.MSG_PEEK))
        assert len(payload) - STAGE_BYTES < left < len(payload)
        inbox = _begin(link, step=6)
        while not link.is_received:
            link.read()
        assert inbox.bytes_by_rank() == {1: payload}


def test_links_of_one_stage_do_not_mix_what_they_read_ahead() -> None:
    stage = new_stage()
    with _link(stage=stage) as (one, far_one), _link(stage=stage) as (other, far_other):
        for link, far, said in ((one, far_one, b"one"), (other, far_other, b"other")):
            _begin(link)
            far.sendall(_frame(b"now") + _frame(said, sequence=1, step=6))
            link.read()
        assert _begin(one, step=6).bytes_by_rank() == {1: b"one"}
        assert _begin(other, step=6).bytes_by_rank() == {1: b"other"}


def test_an_early_empty_frame_is_whole_at_once() -> None:
    with _link() as (link, far):
        far.sendall(_frame(b"") + _frame(b"", sequence=1, step=6))
        _begin(link)
        link.read()
        link.read()
        inbox = _begin(link, step=6)
        assert link.is_finished
        assert inbox.bytes_by_rank() == {1: b""}


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (_frame(b"x", sequence=1), "sequence"),
        (_frame(b"x", step=4), "tag and step"),
        (_frame(b"x", tag=Tag.ROWS), "tag and step"),
        (FrameHeader(1, 5, 1, 7, 0, MAX_FRAME_BYTES + 1).pack(), "payload bytes"),
        (b"\0" + _frame(b"x")[1:], "magic"),
        (_frame(b"x")[:20] + b"\xff" + _frame(b"x")[21:], "header crc32c"),
        (FrameHeader(tag=1, step=5, sender=2, generation=7, sequence=0, payload_bytes=0).pack(), "sender"),
        (FrameHeader(tag=1, step=5, sender=1, generation=6, sequence=0, payload_bytes=0).pack(), "generation"),
    ],
)
def test_any_other_frame_is_refused_before_its_payload_is_taken(frame: bytes, field: str) -> None:
    with _link() as (link, far):
        inbox = _begin(link)
        far.sendall(frame)
        with pytest.raises(FrameError) as caught:
            link.read()
        assert (caught.value.rank, caught.value.field) == (1, field)
        assert not inbox.payloads


def test_a_peer_that_ends_in_the_middle_is_lost() -> None:
    for size, part in ((10, "38 bytes of a header"), (HEADER_BYTES + 2, "11 bytes of a payload")):
        with _link() as (link, far):
            _begin(link)
            far.sendall(_frame(b"12345")[:size])
            link.read()
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(PeerLost, match=part):
                link.read()


@pytest.mark.parametrize(
    ("step", "blamed", "reason"), [(Farewell.ORDERLY, 1, "middle"), (Farewell.FAILED, 1, "failure"), (4, 4, "rank 4")]
)
def test_a_goodbye_in_the_middle_names_who_is_to_blame(step: int, blamed: int, reason: str) -> None:
    with _link() as (link, far):
        _begin(link)
        far.sendall(_frame(step=step, tag=Tag.GOODBYE))
        with pytest.raises(PeerLost, match=reason) as caught:
            link.read()
        assert (caught.value.rank, caught.value.blamed_rank) == (1, blamed)


def test_an_orderly_goodbye_after_the_exchange_matters_only_to_the_next() -> None:
    with _link() as (link, far):
        _begin(link)
        far.sendall(_frame(b"x") + _frame(step=Farewell.ORDERLY, tag=Tag.GOODBYE, sequence=1))
        far.close()
        link.read()
        assert link.is_finished
        assert link.interest == 0
        with pytest.raises(PeerLost, match="closed its mesh before"):
            _begin(link, step=6)


def test_our_goodbye_is_the_next_frame() -> None:
    with _link() as (link, far):
        _begin(link, b"x")
        link.say_goodbye(3)
        received = far.recv(4096)
        header = FrameHeader.unpack(received[HEADER_BYTES + 1 + TRAILER_BYTES :], rank=0)
        assert (header.tag, header.step, header.sequence) == (Tag.GOODBYE, 3, 1)


def test_no_goodbye_is_written_into_the_middle_of_a_frame() -> None:
    with _link() as (link, far):
        _begin(link, bytes(3_000_000))
        link.say_goodbye(3)
        link.close()
        received = b""
        while piece := far.recv(1 << 20):
            received += piece
        assert received[HEADER_BYTES:].strip(b"\0") == b""
