"""A TCP proxy between two hosts of a mesh that understands frames and can spoil them.

Rank 1 dials it in place of rank 0. The handshake passes untouched; after it, frames from rank 1 to rank 0 go through
`rewrite`, the other direction is copied as it comes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from podembed.workers.mesh.frames import HEADER_BYTES, TRAILER_BYTES, FrameHeader
from podembed.workers.mesh.mesh import Mesh
from tests.workers.mesh.mesh_testing import LOCAL, PATIENCE_S, identity, in_threads, succeed

Rewrite = Callable[[int, bytes, bytes], bytes | None]
"""`rewrite(index, header, payload with trailer)` gives the bytes to pass on; None closes both connections."""


class FrameProxy:
    """Serves one connection. `hold` stops both directions without closing anything, like a cut cable."""

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self._server = socket.create_server((LOCAL, 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self._target: tuple[str, int] | None = None
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._may_pass = threading.Event()
        self._may_pass.set()

    def start(self, target: tuple[str, int]) -> None:
        self._target = target
        self._run(self._serve)

    def hold(self) -> None:
        self._may_pass.clear()

    def close(self) -> None:
        self._may_pass.set()
        for connection in (*self._sockets, self._server):
            # A thread blocked in recv holds the descriptor open; only shutdown wakes it.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        assert self._target is not None
        dialer, _ = self._server.accept()
        acceptor = socket.create_connection(self._target)
        self._sockets += [dialer, acceptor]
        for source, target in ((dialer, acceptor), (acceptor, dialer)) * 2:
            target.sendall(source.recv(4096))
        self._run(lambda: self._copy(acceptor, dialer))
        with contextlib.suppress(OSError, EOFError):
            self._pass_frames(dialer, acceptor)
        for connection in (dialer, acceptor):
            connection.close()

    def _pass_frames(self, source: socket.socket, target: socket.socket) -> None:
        index = 0
        while True:
            header = _read_exactly(source, HEADER_BYTES)
            num_bytes = FrameHeader.unpack(header, rank=1).payload_bytes
            payload = _read_exactly(source, num_bytes + TRAILER_BYTES) if num_bytes else b""
            self._may_pass.wait(PATIENCE_S)
            passed = self._rewrite(index, header, payload)
            if passed is None:
                target.shutdown(socket.SHUT_RDWR)
                return
            target.sendall(passed)
            index += 1

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._may_pass.wait(PATIENCE_S)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def _read_exactly(source: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = source.recv(min(num_bytes - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


@contextlib.contextmanager
def proxied_pair(rewrite: Rewrite) -> Iterator[tuple[Mesh, Mesh, FrameProxy]]:
    """Two connected hosts whose traffic passes a proxy."""
    with contextlib.ExitStack() as stack:
        low, high = (stack.enter_context(Mesh.listen(identity(rank, 2), bind_address=LOCAL)) for rank in range(2))
        proxy = FrameProxy(rewrite)
        stack.callback(proxy.close)
        proxy.start(low.address)
        addresses = [proxy.address, high.address]
        succeed(in_threads([lambda mesh=mesh: mesh.connect(addresses, timeout_s=PATIENCE_S) for mesh in (low, high)]))
        yield low, high, proxy
