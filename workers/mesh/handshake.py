"""The handshake of two hosts, as two dialogues without a socket.

Each side says who it is (run, generation, rank, plan) with a fresh nonce. Then it proves that it holds the run's token
by an HMAC-SHA256 over both hellos. The token itself never travels. Every message has a fixed length, so nothing an
intruder sends can make a host wait for or store more than that. The dialogues are generators: they yield what to send
and how many bytes to read next, and return the peer's rank. They neither encrypt nor authenticate the frames that
follow, so the mesh belongs on a private network.

    dialer                         acceptor
      hello(D)            →
                          ←          hello(A)
      proof(dialer, D, A) →
                          ←          verdict, proof(acceptor, D, A)
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from podembed.workers.mesh.mesh_errors import HandshakeRefused

PROTOCOL_VERSION = 2
NONCE_BYTES = 32
_MAGIC = b"PODEMBED"
_MAX_RUN_ID_BYTES = 128
_PLAN_HASH_BYTES = 32
# magic, protocol version, rank, number of ranks, length of the run id, generation, nonce, plan hash, run id padded with
# zeros.
_HELLO = struct.Struct(f"<8sIIIIQ{NONCE_BYTES}s{_PLAN_HASH_BYTES}s{_MAX_RUN_ID_BYTES}s")
_PROOF_BYTES = hashlib.sha256().digest_size
_VERDICT = struct.Struct(f"<I{_PROOF_BYTES}s")


class Turn(NamedTuple):
    """The next action of a dialogue: send `message`, then read exactly `num_bytes`."""

    message: bytes
    num_bytes: int


Dialogue = Generator[Turn, bytes, int]


class _Verdict(enum.IntEnum):
    ACCEPTED = 0
    WRONG_PROOF = 1
    ALREADY_CONNECTED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshIdentity:
    """The identity of a host among the hosts of one generation.

    Attributes:
      run_id: name of the run, at most 128 bytes as UTF-8.
      generation: number of the worker group.
      token: secret of the run, at least 16 bytes; never sent and never printed.
      rank, num_ranks: this host's place.
      plan_hash: 32 bytes that all hosts must share, or empty.
    """

    run_id: str
    generation: int
    token: bytes = field(repr=False)
    rank: int
    num_ranks: int
    plan_hash: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hello:
    run_id: str
    generation: int
    rank: int
    num_ranks: int
    plan_hash: bytes


def dial(own: MeshIdentity, *, expected_rank: int, nonce: bytes) -> Dialogue:
    """The side that opened the connection.

    Returns (as the generator's value):
      The peer's rank, which is `expected_rank`.

    Raises:
      HandshakeRefused: the peer differs in anything but rank, does not hold the token, or refuses us.
    """
    own_hello = _pack_hello(own, nonce)
    peer_hello = yield Turn(own_hello, _HELLO.size)
    peer = _unpack_hello(peer_hello)
    _require_agreement(own, peer)
    if peer.rank != expected_rank:
        raise HandshakeRefused(peer.rank, f"found rank {peer.rank} at the address of rank {expected_rank}")
    verdict_bytes = yield Turn(_proof(own.token, b"dialer", own_hello, peer_hello), _VERDICT.size)
    verdict, proof = _VERDICT.unpack(verdict_bytes)
    if verdict == _Verdict.ALREADY_CONNECTED:
        raise HandshakeRefused(peer.rank, f"it already has a connection from rank {own.rank}", True)
    if verdict != _Verdict.ACCEPTED:
        raise HandshakeRefused(peer.rank, "it found our token wrong, expected the token of its run")
    if not hmac.compare_digest(proof, _proof(own.token, b"acceptor", own_hello, peer_hello)):
        raise HandshakeRefused(peer.rank, "its proof does not fit our token, expected the token of this run")
    return peer.rank


def answer(own: MeshIdentity, *, nonce: bytes, is_connected: Callable[[int], bool]) -> Dialogue:
    """The side that accepted the connection; expects a dialer of higher rank.

    Args:
      is_connected: whether a rank already has its connection.

    Returns (as the generator's value):
      The dialer's rank.

    Raises:
      HandshakeRefused: the dialer differs, has no business here, does not hold the token, or is already connected.
    """
    peer_hello = yield Turn(b"", _HELLO.size)
    peer = _unpack_hello(peer_hello)
    own_hello = _pack_hello(own, nonce)
    try:
        _require_agreement(own, peer)
        if not own.rank < peer.rank < own.num_ranks:
            expected = f"{own.rank + 1} to {own.num_ranks - 1}"
            raise HandshakeRefused(peer.rank, f"found a dialer of rank {peer.rank}, expected {expected}")
    except HandshakeRefused:
        # The dialer learns what differs from our hello, so both ends report the same cause.
        yield Turn(own_hello, 0)
        raise
    proof = yield Turn(own_hello, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(own.token, b"dialer", peer_hello, own_hello)):
        yield _refusal(_Verdict.WRONG_PROOF)
        raise HandshakeRefused(peer.rank, "its proof does not fit our token, expected the token of this run")
    # Asked last, so that only holders of the token can learn or occupy who is connected.
    if is_connected(peer.rank):
        yield _refusal(_Verdict.ALREADY_CONNECTED)
        raise HandshakeRefused(peer.rank, f"found a second connection from rank {peer.rank}, expected one", True)
    yield Turn(_VERDICT.pack(_Verdict.ACCEPTED, _proof(own.token, b"acceptor", peer_hello, own_hello)), 0)
    return peer.rank


def _refusal(verdict: _Verdict) -> Turn:
    return Turn(_VERDICT.pack(verdict, bytes(_PROOF_BYTES)), 0)


def _proof(token: bytes, role: bytes, dialer_hello: bytes, acceptor_hello: bytes) -> bytes:
    # The role keeps one side's proof from being played back as the other's.
    return hmac.digest(token, role + b"\0" + dialer_hello + acceptor_hello, "sha256")


def _pack_hello(own: MeshIdentity, nonce: bytes) -> bytes:
    run_id = own.run_id.encode()
    plan_hash = own.plan_hash or bytes(_PLAN_HASH_BYTES)
    return _HELLO.pack(
        _MAGIC, PROTOCOL_VERSION, own.rank, own.num_ranks, len(run_id), own.generation, nonce, plan_hash, run_id
    )


def _unpack_hello(data: bytes) -> _Hello:
    magic, version, rank, num_ranks, run_id_bytes, generation, _, plan_hash, run_id = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise HandshakeRefused(-1, f"found {magic!r} as first bytes, expected {_MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise HandshakeRefused(-1, f"found protocol version {version}, expected {PROTOCOL_VERSION}")
    name = run_id[:run_id_bytes].decode(errors="replace")
    return _Hello(run_id=name, generation=generation, rank=rank, num_ranks=num_ranks, plan_hash=plan_hash)


def _require_agreement(own: MeshIdentity, peer: _Hello) -> None:
    own_plan_hash = own.plan_hash or bytes(_PLAN_HASH_BYTES)
    age = "older" if peer.generation < own.generation else "newer"
    for is_different, what in (
        (peer.run_id != own.run_id, f"found run {peer.run_id!r}, expected {own.run_id!r}"),
        (
            peer.generation != own.generation,
            f"found the {age} generation {peer.generation}, expected {own.generation}",
        ),
        (peer.num_ranks != own.num_ranks, f"found a mesh of {peer.num_ranks} ranks, expected {own.num_ranks}"),
        (
            peer.plan_hash != own_plan_hash,
            f"found plan {peer.plan_hash.hex()[:12]}, expected {own_plan_hash.hex()[:12]}",
        ),
    ):
        if is_different:
            raise HandshakeRefused(peer.rank, what)
