"""Raw sockets against a host that forms its mesh: bytes that drip, a handshake that is played back, and what the user
is told of them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from podembed.workers.mesh.handshake import MeshIdentity, dial
from podembed.workers.mesh.listening import Refusals
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import MeshAborted, MeshConnectTimeout
from podembed.workers.mesh.setup import HANDSHAKE_TIMEOUT_S, MeshSetup
from tests.clock import FakeClock
from tests.processes import wait_for
from tests.workers.mesh.mesh_testing import LOCAL, PATIENCE_S, identity, in_threads, succeed


@contextlib.contextmanager
def connecting_host(num_ranks: int = 2, *, clock: FakeClock) -> Iterator[Mesh]:
    """Rank 0 while it waits for the others, on a clock of its own; at the end they come."""
    with contextlib.ExitStack() as stack:
        host = Mesh.listen(identity(0, num_ranks), bind_address=LOCAL, clock=clock.monotonic_s)
        others = [Mesh.listen(identity(rank, num_ranks), bind_address=LOCAL) for rank in range(1, num_ranks)]
        ranks = [stack.enter_context(mesh) for mesh in (host, *others)]
        addresses = [mesh.address for mesh in ranks]
        connecting = threading.Thread(target=ranks[0].connect, args=[addresses], kwargs={"timeout_s": PATIENCE_S})
        connecting.start()
        try:
            yield ranks[0]
        finally:
            succeed(in_threads([lambda mesh=mesh: mesh.connect(addresses, timeout_s=PATIENCE_S) for mesh in ranks[1:]]))
            connecting.join(PATIENCE_S)
        assert not connecting.is_alive()


def wait_for_refusal(mesh: Mesh, count: int = 1) -> str:
    wait_for("refusal of the intruder", lambda: len(mesh.refusals) >= count, seconds=PATIENCE_S)
    return mesh.refusals[-1].reason


def hello_of(intruder: MeshIdentity) -> bytes:
    return next(dial(intruder, expected_rank=0, nonce=b"n" * 32)).message


def test_a_hello_that_drips_ends_at_the_deadline_of_the_whole_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, is_accepted = MeshSetup._accept, threading.Event()
    monkeypatch.setattr(MeshSetup, "_accept", lambda self: (accept(self), is_accepted.set()))
    hello, clock = hello_of(identity(1, 2)), FakeClock()
    with connecting_host(clock=clock) as mesh, socket.create_connection(mesh.address) as intruder:
        # Each byte is in time for any deadline that would begin anew with it.
        assert is_accepted.wait(PATIENCE_S)
        for at in range(30):
            assert at >= 20 or len(mesh.refusals) == 0
            with contextlib.suppress(OSError):
                intruder.sendall(hello[at : at + 1])
            clock.sleep(HANDSHAKE_TIMEOUT_S / 20)
        assert "handshake was not done in 5.0 s" in wait_for_refusal(mesh)


def test_a_handshake_that_is_played_back_proves_nothing() -> None:
    """An intruder heard rank 1 join, and says the same once more: the host's nonce is another one now."""
    sent: list[bytes] = []
    with connecting_host(num_ranks=3, clock=FakeClock()) as mesh:
        with (
            socket.create_server((LOCAL, 0)) as server,
            Mesh.listen(identity(1, 3), bind_address=LOCAL) as high,
        ):

            def forward() -> None:
                inbound, _ = server.accept()
                with inbound, socket.create_connection(mesh.address) as outbound:
                    for source, target in ((inbound, outbound), (outbound, inbound)) * 2:
                        data = source.recv(4096)
                        if source is inbound:
                            sent.append(data)
                        target.sendall(data)

                high.abort("what it says was heard")

            listening = threading.Thread(target=forward)
            listening.start()
            with pytest.raises(MeshAborted):
                high.connect([server.getsockname(), high.address, (LOCAL, 1)], timeout_s=PATIENCE_S)
            listening.join(PATIENCE_S)
        assert len(sent) == 2
        with socket.create_connection(mesh.address) as intruder:
            intruder.sendall(sent[0])
            assert len(intruder.recv(4096)) == len(sent[0])
            intruder.sendall(sent[1])
            # The end of the connection that was passed on is a refusal as well, and may come at any time.
            wait_for(
                "refusal of the proof",
                lambda: any("its proof does not fit our token" in refusal.reason for refusal in mesh.refusals),
                seconds=PATIENCE_S,
            )


def test_an_intruder_that_resets_its_connection_is_only_counted() -> None:
    with connecting_host(clock=FakeClock()) as mesh:
        intruder = socket.create_connection(mesh.address)
        intruder.sendall(b"PODEMBED")
        # Sends a reset instead of an end, as a machine that was switched off and on again does.
        intruder.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        intruder.close()
        assert "handshake" in wait_for_refusal(mesh)


def test_who_was_refused_is_said_with_address_and_reason_and_a_flood_in_one_line() -> None:
    refusals = Refusals()
    assert refusals.describe() == ()
    for port in range(500):
        refusals.add(f"10.0.0.9:{port}", "found run 'views', expected 'clicks'")
    told = refusals.describe()
    assert told[-2:] == (
        "a connection from 10.0.0.9:499: found run 'views', expected 'clicks'",
        "497 more connections",
    )
    assert len(told) == 4


def test_a_mesh_that_does_not_form_names_whom_it_refused() -> None:
    clock = FakeClock()
    with Mesh.listen(identity(0, 2), bind_address=LOCAL, clock=clock.monotonic_s) as mesh:
        results: list[MeshConnectTimeout] = []

        def connect() -> None:
            try:
                mesh.connect([mesh.address, (LOCAL, 1)], timeout_s=1.0)
            except MeshConnectTimeout as error:
                results.append(error)

        connecting = threading.Thread(target=connect)
        connecting.start()
        with socket.create_connection(mesh.address) as intruder:
            intruder.sendall(hello_of(identity(1, 2, run_id="views")))
            wait_for_refusal(mesh)
            clock.sleep(1.0)
            connecting.join(PATIENCE_S)
    (error,) = results
    assert "Refused a connection from 127.0.0.1:" in str(error)
    assert "found run 'views', expected 'clicks'" in str(error)
    # Ray rebuilds an exception from its arguments on the way to the driver.
    assert str(MeshConnectTimeout(*error.args)) == str(error)
