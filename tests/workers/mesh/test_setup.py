"""Mesh setup among intruders, late comers, impostors and the dead."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import (
    HandshakeRefused,
    MeshAborted,
    MeshBroken,
    MeshConnectTimeout,
    MeshUsageError,
)
from podembed.workers.mesh.setup import MeshSetup
from tests.clock import FakeClock
from tests.processes import wait_for
from tests.workers.mesh.mesh_testing import LOCAL, PATIENCE_S, identity, in_threads, meshes, succeed, trade


@contextlib.contextmanager
def _listening(rank: int, num_ranks: int, **changes: Any) -> Iterator[Mesh]:
    with Mesh.listen(identity(rank, num_ranks, **changes), bind_address=LOCAL) as mesh:
        yield mesh


def _connect(mesh: Mesh, addresses: list[tuple[str, int]], timeout_s: float = PATIENCE_S) -> Any:
    return lambda: mesh.connect(addresses, timeout_s=timeout_s)


@contextlib.contextmanager
def _refusing_address() -> Iterator[tuple[str, int]]:
    """Where nobody listens; held, so that no other process gets it meanwhile."""
    with socket.socket() as held:
        held.bind((LOCAL, 0))
        yield held.getsockname()


def _time_passes_with_a_problem(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    """For the host on this clock, a second goes by when something went wrong with a peer, and no time does before."""
    note = MeshSetup._note_problem

    def noted(self: MeshSetup, rank: int, reason: str) -> None:
        note(self, rank, reason)
        if self._clock == clock.monotonic_s:
            clock.sleep(1.0)

    monkeypatch.setattr(MeshSetup, "_note_problem", noted)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_all_hosts_find_each_other(num_ranks: int) -> None:
    with meshes(num_ranks) as ranks:
        results = succeed(
            in_threads(
                [
                    lambda mesh=mesh: trade(mesh, [b"%d>%d" % (mesh.identity.rank, peer) for peer in range(num_ranks)])
                    for mesh in ranks
                ]
            )
        )
    for rank, received in enumerate(results):
        assert received == {peer: b"%d>%d" % (peer, rank) for peer in range(num_ranks) if peer != rank}


def test_strangers_do_not_keep_hosts_apart() -> None:
    """Garbage, silence, a half-sent hello and an early hang-up, all before the true peer dials."""
    clock = FakeClock()
    with (
        Mesh.listen(identity(0, 2), bind_address=LOCAL, clock=clock.monotonic_s) as low,
        _listening(1, 2) as high,
        contextlib.ExitStack() as stack,
    ):
        intruders = [stack.enter_context(socket.create_connection(low.address)) for _ in range(6)]
        intruders[0].sendall(b"GET / HTTP/1.1\r\n" + b"x" * 1000)
        intruders[1].sendall(b"PODEMBED")
        intruders[2].close()
        intruders[3].sendall(os.urandom(5000))
        addresses = [low.address, high.address]
        connecting = threading.Thread(target=_connect(low, addresses))
        connecting.start()
        wait_for("refusal of those that said something", lambda: len(low.refusals) == 3, seconds=PATIENCE_S)

        def are_all_refused() -> bool:
            # A handshake's time counts from the moment it is accepted, which may come later than the refusals above.
            clock.sleep(1.0)
            return len(low.refusals) == len(intruders)

        wait_for("refusal of the others", are_all_refused, seconds=PATIENCE_S)
        succeed(in_threads([_connect(high, addresses), connecting.join]))
        reasons = " | ".join(refusal.reason for refusal in low.refusals)
        assert "found b'GET / HT' as first bytes" in reasons
        assert "not done in 5.0 s" in reasons
        assert "closed in the middle of the handshake" in reasons
        assert len(low.refusals) == len(intruders)


@pytest.mark.parametrize("noise", [b"", b"x" * 500], ids=["silent", "noisy"])
def test_a_flood_of_clients_is_bounded_and_passed_by(noise: bytes) -> None:
    with _listening(0, 2) as low, _listening(1, 2) as high, contextlib.ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(socket.create_connection(low.address)).sendall(noise)
        addresses = [low.address, high.address]
        succeed(in_threads([_connect(low, addresses), _connect(high, addresses)]))
        # 150 clients and the dialer came, 66 may wait at a time, so the oldest others were sent away.
        assert 150 + 1 - 66 <= len(low.refusals) <= 100
        reasons = {refusal.reason for refusal in low.refusals}
        assert any(("first bytes" if noise else "unfinished handshakes") in reason for reason in reasons)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": b"wrong" * 8}, "token"),
        ({"generation": 6}, "older generation 6"),
        ({"generation": 8}, "newer generation 8"),
        ({"run_id": "views"}, "run 'views'"),
        ({"plan_hash": b"q" * 32}, "plan"),
    ],
)
def test_an_impostor_is_refused_and_the_true_peer_let_in(change: dict[str, Any], reason: str) -> None:
    with _listening(0, 2) as low, _listening(1, 2) as high, _listening(1, 2, **change) as impostor:
        addresses = [low.address, high.address]
        connecting = threading.Thread(target=_connect(low, addresses))
        connecting.start()
        with pytest.raises(HandshakeRefused) as caught:
            impostor.connect(addresses, timeout_s=PATIENCE_S)
        assert caught.value.rank == 0
        with pytest.raises(MeshBroken):
            impostor.connect(addresses, timeout_s=1)
        succeed(in_threads([_connect(high, addresses), connecting.join]))
        assert reason in low.refusals[-1].reason


def test_a_second_host_of_the_same_rank_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    with (
        _listening(0, 3) as low,
        _listening(1, 3) as first,
        Mesh.listen(identity(1, 3), bind_address=LOCAL, clock=clock.monotonic_s) as second,
        _listening(2, 3) as high,
        socket.create_server((LOCAL, 0)) as server,
    ):
        is_first_in, is_done = threading.Event(), threading.Event()

        def forward() -> None:
            inbound, _ = server.accept()
            with inbound, socket.create_connection(low.address) as outbound:
                _pump_handshake(inbound, outbound)
                is_first_in.set()
                is_done.wait(PATIENCE_S)

        addresses = [low.address, first.address, high.address]
        early = [
            threading.Thread(target=target)
            for target in (forward, _connect(low, addresses), _connect(first, [server.getsockname(), *addresses[1:]]))
        ]
        for thread in early:
            thread.start()
        assert is_first_in.wait(PATIENCE_S)
        _time_passes_with_a_problem(monkeypatch, clock)
        with pytest.raises(MeshConnectTimeout) as caught:
            second.connect(addresses, timeout_s=0.4)
        assert caught.value.missing == (0, 2)
        assert "already has a connection" in caught.value.problems[0]
        succeed(in_threads([_connect(high, addresses)]))
        is_done.set()
        for thread in early:
            thread.join(PATIENCE_S)
        assert "second connection from rank 1" in low.refusals[-1].reason


def test_a_host_that_listens_late_is_dialed_again() -> None:
    with _listening(0, 2) as low, _listening(1, 2) as high:
        server = socket.socket()
        server.bind((LOCAL, 0))  # nobody else gets this port, and nobody listens there yet
        late = server.getsockname()

        def forward_late() -> None:
            time.sleep(0.3)
            with server:
                server.listen()
                inbound, _ = server.accept()
                with inbound, socket.create_connection(low.address) as outbound:
                    _pump_handshake(inbound, outbound)
                    done.wait(PATIENCE_S)

        done = threading.Event()
        forwarding = threading.Thread(target=forward_late)
        forwarding.start()
        succeed(in_threads([_connect(low, [late, high.address]), _connect(high, [late, high.address])]))
        done.set()
        forwarding.join(PATIENCE_S)


def _pump_handshake(inbound: socket.socket, outbound: socket.socket) -> None:
    """Carries the four messages of one handshake."""
    for source, target in ((inbound, outbound), (outbound, inbound)) * 2:
        target.sendall(source.recv(4096))


def test_a_host_whose_connection_broke_after_the_handshake_connects_anew() -> None:
    with _listening(0, 3) as low, _listening(1, 3) as middle, _listening(2, 3) as high:
        cut = threading.Event()

        def forward_then_cut() -> None:
            server.settimeout(PATIENCE_S)
            inbound, _ = server.accept()
            server.settimeout(0.05)
            with inbound, socket.create_connection(low.address) as outbound:
                _pump_handshake(inbound, outbound)
            # Rank 0 may not have seen the end of the first connection when the second one comes, and then refuses that
            # one, too.
            with contextlib.ExitStack() as kept:
                while not done.is_set():
                    with contextlib.suppress(TimeoutError):
                        inbound = kept.enter_context(server.accept()[0])
                        cut.set()
                        outbound = kept.enter_context(socket.create_connection(low.address))
                        with contextlib.suppress(OSError):
                            _pump_handshake(inbound, outbound)

        done = threading.Event()
        with socket.create_server((LOCAL, 0)) as server:
            addresses = [low.address, middle.address, high.address]
            by_proxy = [server.getsockname(), middle.address, high.address]
            forwarding = threading.Thread(target=forward_then_cut)
            early = [
                threading.Thread(target=_connect(low, addresses)),
                threading.Thread(target=_connect(middle, by_proxy)),
            ]
            for thread in (forwarding, *early):
                thread.start()
            assert cut.wait(PATIENCE_S), "rank 1 did not dial a second time"
            succeed(in_threads([_connect(high, addresses), *(thread.join for thread in early)]))
            done.set()
            forwarding.join(PATIENCE_S)
        assert "closed its connection after the handshake" in " ".join(refusal.reason for refusal in low.refusals)


def test_the_missing_are_named_with_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    _time_passes_with_a_problem(monkeypatch, clock)
    with (
        _refusing_address() as nobody,
        Mesh.listen(identity(1, 4), bind_address=LOCAL, clock=clock.monotonic_s) as mesh,
    ):
        addresses = [nobody, mesh.address, nobody, nobody]
        with pytest.raises(MeshConnectTimeout) as caught:
            mesh.connect(addresses, timeout_s=0.3)
        assert caught.value.missing == (0, 2, 3)
        assert "Connection refused" in caught.value.problems[0]
        assert "[0, 2, 3]" in str(caught.value)


def test_abort_ends_the_setup() -> None:
    with _listening(0, 2) as mesh, _refusing_address() as nobody:
        threading.Timer(0.1, mesh.abort, args=["generation 8 begins"]).start()
        with pytest.raises(MeshAborted, match="generation 8 begins"):
            mesh.connect([mesh.address, nobody], timeout_s=PATIENCE_S)


def test_no_connection_is_let_in_after_the_setup() -> None:
    with meshes(2) as ranks, pytest.raises(ConnectionRefusedError):
        socket.create_connection(ranks[0].address)


@pytest.mark.parametrize("bind_address", ["", "0.0.0.0", "::"])
def test_every_interface_is_refused(bind_address: str) -> None:
    with pytest.raises(MeshUsageError, match="every interface"):
        Mesh.listen(identity(0, 1), bind_address=bind_address)


def test_a_foreign_address_is_an_operating_system_error() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        Mesh.listen(identity(0, 1), bind_address="203.0.113.7")


def test_hosts_connect_over_ipv6() -> None:
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Mesh.listen(identity(rank, 2), bind_address="::1")) for rank in range(2)]
        addresses = [mesh.address for mesh in ranks]
        succeed(in_threads([_connect(mesh, addresses) for mesh in ranks]))
        assert succeed(in_threads([lambda mesh=mesh: trade(mesh, [b"a", b"b"]) for mesh in ranks]))[1] == {0: b"b"}
