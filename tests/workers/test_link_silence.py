"""What the kernel knows of the other end of a connection, and a dial that nobody answers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tests.workers.mesh_testing import LOCAL, identity, meshes
from workers import forming, link_silence
from workers.exchange import Mesh, MeshConnectTimeout
from workers.link_silence import ask_when_quiet, silence_s


@contextlib.contextmanager
def without_answer() -> Iterator[tuple[str, int]]:
    """An address whose kernel drops requests for a connection, as one that cannot be reached: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((LOCAL, 0))
        listener.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()


def test_a_connection_is_silent_since_something_came() -> None:
    with socket.create_server((LOCAL, 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            time.sleep(0.3)
            assert 0.2 < silence_s(one) < 5.0
            other.send(b"x")
            assert one.recv(1) == b"x"
            assert silence_s(one) < 0.2
        one.close()
        assert silence_s(one) == 0.0


def test_on_a_quiet_connection_kernels_ask_each_other() -> None:
    with socket.create_server((LOCAL, 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        ask_when_quiet(one)
        time.sleep(link_silence.ASK_AFTER_S + 1.0)
        assert silence_s(one) < link_silence.ASK_AFTER_S


def test_a_mesh_names_those_that_it_does_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    with meshes(2) as (one, _):
        assert one.unheard_s == {}
        monkeypatch.setattr("workers.exchange.NOTABLE_S", 0.05)
        time.sleep(0.1)
        assert list(one.unheard_s) == [1]
        assert one.unheard_s[1] >= 0.05


def test_a_machine_that_answers_no_dial_is_given_up_long_before_the_others_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forming, "UNREACHABLE_S", 0.5)
    with without_answer() as address, Mesh.listen(identity(1, 2), bind_address=LOCAL) as mesh:
        began = time.monotonic()
        with pytest.raises(MeshConnectTimeout, match="its machine does not answer") as caught:
            mesh.connect([address, mesh.address], timeout_s=60.0)
        assert time.monotonic() - began < 10.0
    assert caught.value.missing == (0,)
