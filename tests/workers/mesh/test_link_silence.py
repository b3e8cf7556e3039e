"""What the kernel knows of the other end of a connection, and a dial that nobody answers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from podembed.workers.mesh import link_silence
from podembed.workers.mesh import setup as connecting
from podembed.workers.mesh.link_silence import ask_when_quiet, silence_s
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import MeshConnectTimeout
from tests.processes import wait_for
from tests.workers.mesh.mesh_testing import LOCAL, PATIENCE_S, identity, meshes

KERNEL_TICK_S = 0.05  # how coarsely kernels count


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
            # A kernel may acknowledge the connection late, so that the silence begins anew.
            wait_for("silence", lambda: silence_s(one) > 0.3, seconds=PATIENCE_S)
            began = time.monotonic()
            other.send(b"x")
            assert one.recv(1) == b"x"
            found = silence_s(one)
            assert found <= time.monotonic() - began + KERNEL_TICK_S
        one.close()
        assert silence_s(one) == 0.0


def test_on_a_quiet_connection_kernels_ask_each_other() -> None:
    with socket.create_server((LOCAL, 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        ask_when_quiet(one)
        wait_for("quiet", lambda: silence_s(one) > link_silence.ASK_AFTER_S / 2, seconds=PATIENCE_S)
        # Nobody sends anything, and yet something came: an answer of the other kernel.
        wait_for("answer", lambda: silence_s(one) < link_silence.ASK_AFTER_S / 4, seconds=PATIENCE_S)


def test_a_mesh_names_those_that_it_does_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    with meshes(2) as (one, _):
        assert one.unheard_s == {}
        monkeypatch.setattr("podembed.workers.mesh.mesh.NOTABLE_S", 0.05)
        seen: list[dict[int, float]] = []
        # A kernel may acknowledge the last bytes late, so that the silence begins anew.
        wait_for("silence", lambda: bool(seen.append(one.unheard_s) or seen[-1]), seconds=PATIENCE_S)
        assert list(seen[-1]) == [1]
        assert seen[-1][1] >= 0.05


def test_a_machine_that_answers_no_dial_is_given_up_long_before_the_others_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connecting, "UNREACHABLE_S", 0.5)
    with (
        without_answer() as address,
        Mesh.listen(identity(1, 2), bind_address=LOCAL) as mesh,
        pytest.raises(MeshConnectTimeout, match="its machine does not answer") as caught,
    ):
        mesh.connect([address, mesh.address], timeout_s=600.0)
    assert (caught.value.missing, caught.value.timeout_s) == ((0,), 0.5)
