"""Mesh setup: from a listening socket and a list of addresses to one trusted connection per host.

Rank i dials every lower rank and accepts every higher one. All dials, handshakes and intruders are served by one
selector, each with its own deadline, so that garbage or a silent client delays no host. A connection that fails is
closed and recorded; honest peers dial again with growing pauses until the deadline of the whole. A host that finds no
descriptor left waits for one, and in the end blames itself. What travels on the connections afterwards is the business
of `links`.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from errno import EHOSTUNREACH, EINPROGRESS, ENETUNREACH, ETIMEDOUT
from functools import partial

from podembed.workers.descriptors import exhausted, is_exhaustion
from podembed.workers.mesh.active_exchange import AbortSignal
from podembed.workers.mesh.handshake import NONCE_BYTES, Dialogue, MeshIdentity, answer, dial
from podembed.workers.mesh.listening import Address, Refusals, family, prepare
from podembed.workers.mesh.mesh_errors import HandshakeRefused, MeshConnectTimeout

HANDSHAKE_TIMEOUT_S = 5.0
"""The longest that one connection may take to prove itself."""
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_SPARE_CANDIDATES = 64
# All hosts listen before the first one dials, and a kernel answers at once, whatever its processes do.
UNREACHABLE_S = 8.0
_NO_ANSWER = frozenset({ETIMEDOUT, EHOSTUNREACH, ENETUNREACH})


@dataclass(slots=True, kw_only=True, eq=False)
class _Candidate:
    """A connection before the end of its handshake. Mutable; `rank` is known only where we dialed."""

    connection: socket.socket
    address: str
    dialogue: Dialogue
    deadline_s: float
    rank: int | None
    num_wanted: int = 0
    inbox: bytearray = field(default_factory=bytearray)


class MeshSetup:
    """One attempt to connect to all hosts. Owns every connection it makes until `run` hands the good ones over."""

    def __init__(
        self,
        *,
        identity: MeshIdentity,
        listener: socket.socket,
        addresses: Sequence[Address],
        abort_signal: AbortSignal,
        refusals: Refusals,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._listener = listener
        self._addresses = addresses
        self._abort_signal = abort_signal
        self._refusals = refusals
        self._clock = clock
        try:
            self._selector = selectors.DefaultSelector()
        except OSError as error:
            raise exhausted("waiting for connections", error) from error
        self._candidates: dict[_Candidate, None] = {}
        self._connected: dict[int, socket.socket] = {}
        self._dial_at_s = dict.fromkeys(range(identity.rank), clock())
        self._pause_s = dict.fromkeys(range(identity.rank), _FIRST_PAUSE_S)
        self._problems: dict[int, str] = {}
        self._unanswered_since_s: dict[int, float] = {}
        # The last refusal of a descriptor, until one was given again; and until when the listener rests because of it.
        self._exhaustion: OSError | None = None
        self._rests_until_s: float | None = None

    def run(self, timeout_s: float) -> dict[int, socket.socket]:
        """Connections by rank, non-blocking, with both handshakes done and not one byte of a frame read.

        Raises:
          MeshConnectTimeout: some hosts did not connect within `timeout_s`, or a machine has answered no dial for
            `UNREACHABLE_S`.
          DescriptorsExhausted: there was no descriptor left for them.
          HandshakeRefused: a host we dialed does not belong to us.
          MeshAborted: the abort signal was set.
        """
        deadline_s = self._clock() + timeout_s
        try:
            # Its readiness alone wakes the loop, which looks at the signal itself.
            self._watch(self._abort_signal, lambda: None)
            self._watch(self._listener, self._accept)
            while missing := self._missing():
                self._abort_signal.raise_if_requested()
                if self._clock() >= deadline_s:
                    if self._exhaustion is not None:
                        raise exhausted(f"connections with ranks {missing}", self._exhaustion)
                    problems = {rank: text for rank, text in self._problems.items() if rank in missing}
                    raise MeshConnectTimeout(missing, timeout_s, problems, self._refusals.describe())
                self._require_reachable()
                self._drop_overdue()
                self._dial_due()
                self._listen_again()
                for key, _ in self._selector.select(self._seconds_to_wait(deadline_s)):
                    key.data()
            # Taken out, so that `_close` closes only what is left over.
            connected, self._connected = self._connected, {}
            return connected
        finally:
            self._close()

    def _missing(self) -> list[int]:
        own, num_ranks = self._identity.rank, self._identity.num_ranks
        return [rank for rank in range(num_ranks) if rank != own and rank not in self._connected]

    def _seconds_to_wait(self, deadline_s: float) -> float:
        candidate_deadlines = [candidate.deadline_s for candidate in self._candidates]
        given_up_at_s = [since_s + UNREACHABLE_S for since_s in self._unanswered_since_s.values()]
        rest_s = [] if self._rests_until_s is None else [self._rests_until_s]
        return max(
            0.0,
            min([deadline_s, *candidate_deadlines, *given_up_at_s, *self._dial_at_s.values(), *rest_s]) - self._clock(),
        )

    def _require_reachable(self) -> None:
        """Gives up early on machines that do not even refuse a connection: no waiting brings back a lost machine or a
        cut link.

        Raises:
          MeshConnectTimeout: naming them.
        """
        now_s = self._clock()
        lost = [rank for rank, since_s in self._unanswered_since_s.items() if now_s - since_s >= UNREACHABLE_S]
        if lost:
            problem = "its machine does not answer; look at the network between it and this host"
            raise MeshConnectTimeout(sorted(lost), UNREACHABLE_S, dict.fromkeys(lost, problem))

    def _close(self) -> None:
        self._selector.close()
        for connection in [*(c.connection for c in self._candidates), *self._connected.values()]:
            connection.close()

    def _watch(self, source: socket.socket | AbortSignal, on_ready: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, on_ready)

    # Both directions: a connection becomes a candidate.

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            if is_exhaustion(error):
                self._rest(error)
            # Else the client left before we looked.
            return
        self._exhaustion = None
        # Strangers may connect as well, and must not use up the descriptors that hosts need.
        self._make_room()
        nonce = secrets.token_bytes(NONCE_BYTES)
        dialogue = answer(self._identity, nonce=nonce, is_connected=self._connected.__contains__)
        # Among the candidates before anything can fail, so that `_close` finds it.
        candidate = self._add(connection, f"{peer[0]}:{peer[1]}", dialogue, rank=None)
        prepare(connection)
        self._watch(connection, partial(self._read, candidate))
        self._advance(candidate, None)

    def _rest(self, error: OSError) -> None:
        """Stops accepting for a while: a client that cannot be let in would wake the selector for ever."""
        self._exhaustion = error
        self._selector.unregister(self._listener)
        self._rests_until_s = self._clock() + _LONGEST_PAUSE_S
        intruders = [candidate for candidate in self._candidates if candidate.rank is None]
        if intruders:
            self._drop(intruders[0], "found no descriptor left, of which this unfinished handshake held one")

    def _listen_again(self) -> None:
        if self._rests_until_s is not None and self._rests_until_s <= self._clock():
            self._rests_until_s = None
            self._watch(self._listener, self._accept)

    def _make_room(self) -> None:
        intruders = [candidate for candidate in self._candidates if candidate.rank is None]
        if len(intruders) >= self._identity.num_ranks + _SPARE_CANDIDATES:
            # Honest handshakes take milliseconds, so the oldest is the least likely to be one.
            self._drop(intruders[0], f"found {len(intruders)} unfinished handshakes, of which this was the oldest")

    def _dial_due(self) -> None:
        now_s = self._clock()
        for rank in [rank for rank, at_s in self._dial_at_s.items() if at_s <= now_s]:
            del self._dial_at_s[rank]
            self._dial(rank)

    def _dial(self, rank: int) -> None:
        host, port = self._addresses[rank]
        try:
            connection = socket.socket(family(host), socket.SOCK_STREAM)
        except OSError as error:
            if not is_exhaustion(error):
                raise
            self._exhaustion = error
            self._redial(rank)
            return
        # Since the first dial without an answer: repeated dials must not start the time again.
        self._unanswered_since_s.setdefault(rank, self._clock())
        dialogue = dial(self._identity, expected_rank=rank, nonce=secrets.token_bytes(NONCE_BYTES))
        candidate = self._add(connection, f"{host}:{port}", dialogue, rank=rank)
        try:
            prepare(connection)
            code = connection.connect_ex((host, port))
        except OSError as error:
            self._drop(candidate, f"dialing failed, {error.strerror}")
            return
        if code not in (0, EINPROGRESS):
            self._note_answer(rank, code)
            self._drop(candidate, f"dialing failed, {os.strerror(code)}")
            return
        self._selector.register(connection, selectors.EVENT_WRITE, partial(self._finish_dial, candidate))

    def _finish_dial(self, candidate: _Candidate) -> None:
        connection = candidate.connection
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._note_answer(candidate.rank, code)
        if code:
            self._drop(candidate, f"dialing failed, {os.strerror(code)}")
            return
        if connection.getsockname() == connection.getpeername():
            # Dialing a free local port over and over can hit the port that the dial itself was given.
            self._drop(candidate, "nobody listens there, and the dial met itself")
            return
        self._selector.modify(connection, selectors.EVENT_READ, partial(self._read, candidate))
        self._advance(candidate, None)

    def _note_answer(self, rank: int | None, code: int) -> None:
        """A dial has ended with a connection or an error, most of which show as well that the machine is there."""
        if rank is not None and code not in _NO_ANSWER:
            self._unanswered_since_s.pop(rank, None)

    def _add(self, connection: socket.socket, address: str, dialogue: Dialogue, *, rank: int | None) -> _Candidate:
        candidate = _Candidate(
            connection=connection,
            address=address,
            dialogue=dialogue,
            deadline_s=self._clock() + HANDSHAKE_TIMEOUT_S,
            rank=rank,
        )
        self._candidates[candidate] = None
        return candidate

    # A candidate goes through its dialogue.

    def _read(self, candidate: _Candidate) -> None:
        if candidate not in self._candidates:
            # Dropped to make room after the selector had already reported it.
            return
        try:
            # Never more than the dialogue wants: what follows it belongs to the frames.
            data = candidate.connection.recv(candidate.num_wanted - len(candidate.inbox))
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(candidate, f"receiving the handshake failed, {error.strerror}")
            return
        if not data:
            self._drop(candidate, "the connection closed in the middle of the handshake")
            return
        candidate.inbox += data
        if len(candidate.inbox) == candidate.num_wanted:
            message = bytes(candidate.inbox)
            candidate.inbox.clear()
            self._advance(candidate, message)

    def _advance(self, candidate: _Candidate, message: bytes | None) -> None:
        """Gives the dialogue a message (None to start it) and sends its replies until it wants to read again or
        ends.
        """
        try:
            while True:
                turn = candidate.dialogue.send(message)  # type: ignore[arg-type]
                # A handshake fits any socket buffer, so a short send means a peer that reads nothing.
                if turn.message and candidate.connection.send(turn.message) < len(turn.message):
                    self._drop(candidate, "the peer takes no data in the handshake")
                    return
                candidate.num_wanted = turn.num_bytes
                if turn.num_bytes:
                    return
                message = b""
        except StopIteration as end:
            self._welcome(candidate, end.value)
        except HandshakeRefused as refused:
            self._note_problem(refused.rank, refused.reason)
            self._drop(candidate, refused.reason)
            if candidate.rank is not None and not refused.is_transient:
                raise
        except OSError as error:
            self._drop(candidate, f"sending the handshake failed, {error.strerror}")

    def _welcome(self, candidate: _Candidate, rank: int) -> None:
        del self._candidates[candidate]
        self._connected[rank] = candidate.connection
        self._selector.modify(
            candidate.connection, selectors.EVENT_READ, partial(self._check_alive, rank, candidate.address)
        )

    def _check_alive(self, rank: int, address: str) -> None:
        """A connected host either sends its first frame early, which is fine, or has closed and must connect anew."""
        connection = self._connected[rank]
        try:
            # Peeked, not taken: the byte belongs to a frame.
            is_alive = bool(connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return
        except OSError:
            is_alive = False
        # In both cases: a connection with a byte to read would wake the loop for ever.
        self._selector.unregister(connection)
        if not is_alive:
            connection.close()
            del self._connected[rank]
            self._refusals.add(address, f"rank {rank} closed its connection after the handshake")
            self._note_problem(rank, "it closed its connection after the handshake")
            self._redial(rank)

    # A candidate fails.

    def _drop_overdue(self) -> None:
        now_s = self._clock()
        for candidate in [candidate for candidate in self._candidates if candidate.deadline_s <= now_s]:
            self._drop(candidate, f"the handshake was not done in {HANDSHAKE_TIMEOUT_S:.1f} s")

    def _drop(self, candidate: _Candidate, reason: str) -> None:
        del self._candidates[candidate]
        if candidate.connection.fileno() in self._selector.get_map():
            self._selector.unregister(candidate.connection)
        candidate.connection.close()
        if candidate.rank is None:
            self._refusals.add(candidate.address, reason)
        else:
            self._note_problem(candidate.rank, reason)
            self._redial(candidate.rank)

    def _note_problem(self, rank: int, reason: str) -> None:
        if 0 <= rank < self._identity.num_ranks:
            self._problems[rank] = reason

    def _redial(self, rank: int) -> None:
        # Of two hosts the one of higher rank dials. Pauses grow, since a host that is not there may be restarting.
        if rank < self._identity.rank:
            self._dial_at_s[rank] = self._clock() + self._pause_s[rank]
            self._pause_s[rank] = min(2 * self._pause_s[rank], _LONGEST_PAUSE_S)
