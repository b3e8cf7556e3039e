"""A request to stop that another thread can make.

The step thread waits in a selector; `AbortSignal` is the one file descriptor in that selector which other threads may
touch. They write the reason and one byte; the step thread alone closes the signal. A lock makes the two orders of
`request` and `close` equally harmless.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from podembed.workers.mesh.mesh_errors import MeshAborted


class AbortSignal:
    """Set at most once, from any thread; readable in a selector from then on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._is_closed = False
        self._reason: str | None = None

    def fileno(self) -> int:
        return self._reader.fileno()

    def request(self, reason: str) -> None:
        """Wakes whoever waits; the first reason stands, later ones and those after `close` change nothing."""
        with self._lock:
            if self._reason is not None or self._is_closed:
                return
            self._reason = reason
            # A byte that is never read keeps the descriptor readable for every later wait.
            with contextlib.suppress(OSError):
                self._writer.send(b"!")

    def raise_if_requested(self) -> None:
        """Does nothing until `request` is called.

        Raises:
          MeshAborted: it was, with the reason given there.
        """
        if self._reason is not None:
            raise MeshAborted(self._reason)

    def close(self) -> None:
        """Frees both descriptors; harmless when repeated."""
        with self._lock:
            self._is_closed = True
            self._reader.close()
            self._writer.close()
