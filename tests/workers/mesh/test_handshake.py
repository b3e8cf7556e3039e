"""The two dialogues against each other, and against everything that is not one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.workers.mesh.handshake import Dialogue, MeshIdentity, answer, dial
from podembed.workers.mesh.mesh_errors import HandshakeRefused
from tests.long_tests import examples
from tests.workers.mesh.mesh_testing import TOKEN, identity

_DIALER_NONCE = b"d" * 32
_ACCEPTOR_NONCE = b"a" * 32
Tamper = Callable[[int, bytes], bytes]


class _End:
    """One side: its dialogue, what it waits for and how it ended."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self.num_wanted = 0
        self.result: Any = None

    def take(self, message: bytes | None) -> bytes:
        """Everything the side says until it wants to read or ends."""
        said = b""
        try:
            while True:
                turn = self.dialogue.send(message)  # type: ignore[arg-type]
                said += turn.message
                self.num_wanted = turn.num_bytes
                if turn.num_bytes:
                    return said
                message = b""
        except (StopIteration, HandshakeRefused) as end:
            self.num_wanted = 0
            self.result = end.value if isinstance(end, StopIteration) else end
            return said


def _talk(dialer: MeshIdentity, acceptor: MeshIdentity, *, taken: set[int] | None = None, tamper: Tamper | None = None):
    """Carries messages until neither side can go on; returns both results and all messages."""
    ends = (
        _End(dial(dialer, expected_rank=acceptor.rank, nonce=_DIALER_NONCE)),
        _End(answer(acceptor, nonce=_ACCEPTOR_NONCE, is_connected=(taken or set()).__contains__)),
    )
    inboxes = [b"", ends[0].take(None)]
    ends[1].take(None)
    messages: list[bytes] = []
    speaker = 0
    while inboxes[1 - speaker]:
        listener = 1 - speaker
        message = inboxes[listener]
        message = tamper(len(messages), message) if tamper else message
        messages.append(message)
        inboxes[listener] = b""
        if ends[listener].num_wanted == 0:
            break
        assert len(message) == ends[listener].num_wanted, "both sides must agree on every length"
        inboxes[speaker] = ends[listener].take(message)
        speaker = listener
    return ends[0].result, ends[1].result, messages


def test_two_of_a_kind_learn_each_others_rank() -> None:
    assert _talk(identity(3, 5), identity(1, 5))[:2] == (1, 3)


def test_the_token_never_travels() -> None:
    messages = b"".join(_talk(identity(1, 2), identity(0, 2))[2])
    assert TOKEN not in messages
    assert TOKEN[:8] not in messages


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "views"}, "run"),
        ({"generation": 6}, "older generation 6"),
        ({"generation": 8}, "newer generation 8"),
        ({"plan_hash": b"q" * 32}, "plan"),
        ({"plan_hash": b""}, "plan"),
    ],
)
def test_a_difference_is_found_by_both_ends(change: dict[str, Any], reason: str) -> None:
    dialer, acceptor, _ = _talk(identity(2, 3, **change), identity(0, 3))
    assert isinstance(dialer, HandshakeRefused)
    assert isinstance(acceptor, HandshakeRefused)
    assert reason in acceptor.reason
    assert (dialer.rank, acceptor.rank) == (0, 2)
    assert not dialer.is_transient


def test_hosts_of_another_number_of_ranks_are_refused() -> None:
    dialer, acceptor, _ = _talk(identity(2, 4), identity(0, 3))
    assert "mesh of 3 ranks" in dialer.reason
    assert "mesh of 4 ranks" in acceptor.reason


def test_a_wrong_token_is_refused_on_both_ends() -> None:
    dialer, acceptor, _ = _talk(identity(1, 2, token=b"x" * 32), identity(0, 2))
    assert "token" in dialer.reason
    assert "token" in acceptor.reason


@pytest.mark.parametrize(("dialer_rank", "acceptor_rank"), [(0, 1), (1, 1)])
def test_only_higher_ranks_may_dial(dialer_rank: int, acceptor_rank: int) -> None:
    dialer, acceptor, _ = _talk(identity(dialer_rank, 3), identity(acceptor_rank, 3))
    assert "expected 2 to 2" in acceptor.reason
    assert dialer is None or isinstance(dialer, HandshakeRefused)


def test_a_rank_beyond_the_mesh_is_refused() -> None:
    forged = identity(5, 6)
    object.__setattr__(forged, "num_ranks", 3)
    assert "rank 5" in _talk(forged, identity(0, 3))[1].reason


def test_a_second_connection_is_refused_for_now() -> None:
    dialer, acceptor, _ = _talk(identity(1, 2), identity(0, 2), taken={1})
    assert dialer.is_transient
    assert "second connection" in acceptor.reason


def test_the_wrong_host_at_an_address_is_found() -> None:
    side = _End(dial(identity(4, 5), expected_rank=2, nonce=_DIALER_NONCE))
    other = _End(answer(identity(3, 5), nonce=_ACCEPTOR_NONCE, is_connected=set[int]().__contains__))
    other.take(None)
    side.take(other.take(side.take(None)))
    assert "found rank 3 at the address of rank 2" in side.result.reason


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_no_changed_byte_gets_through(data: st.DataObject) -> None:
    at_message = data.draw(st.integers(0, 3))
    position = data.draw(st.integers(0, 10_000))
    flip = data.draw(st.integers(1, 255))

    def tamper(index: int, message: bytes) -> bytes:
        if index != at_message:
            return message
        changed = bytearray(message)
        changed[position % len(message)] ^= flip
        return bytes(changed)

    dialer, acceptor, _ = _talk(identity(1, 2), identity(0, 2), tamper=tamper)
    # The last message cannot be confirmed to its sender; the dialer then drops the connection, which the acceptor sees.
    assert isinstance(dialer, HandshakeRefused) or (dialer is None and isinstance(acceptor, HandshakeRefused))
    assert at_message == 3 or isinstance(acceptor, HandshakeRefused) or acceptor is None


@given(st.binary(min_size=216, max_size=216))
def test_random_bytes_are_no_hello(noise: bytes) -> None:
    side = _End(answer(identity(0, 2), nonce=_ACCEPTOR_NONCE, is_connected=set[int]().__contains__))
    side.take(None)
    assert side.take(noise[: side.num_wanted].ljust(side.num_wanted, b"\0")) == b""
    assert "first bytes" in side.result.reason


def test_another_protocol_version_is_named() -> None:
    def tamper(index: int, message: bytes) -> bytes:
        return message[:8] + (3).to_bytes(4, "little") + message[12:] if index == 0 else message

    assert "protocol version 3" in _talk(identity(1, 2), identity(0, 2), tamper=tamper)[1].reason


def test_a_host_that_talks_to_itself_is_refused() -> None:
    side = _End(dial(identity(1, 2), expected_rank=0, nonce=_DIALER_NONCE))
    side.take(side.take(None))
    assert "found rank 1 at the address of rank 0" in side.result.reason


def test_the_token_is_not_printed() -> None:
    assert "token" not in repr(identity(0, 1))
