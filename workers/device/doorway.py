"""`Doorway`: the Unix socket on which a host process lets its own device process in, and no other one.

The socket is abstract, so nothing of it lies in a file system. A caller must be of the same user and generation and
know a secret that the driver passed on. What is said behind the door is the business of others: records
(`workers.device.shared_memory`) or calls (`workers.stepwise.line`).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

_HELLO = struct.Struct("<q32s")
# A caller that does not say who it is keeps others waiting for so long.
_HELLO_S = 5.0
_LOOK_S = 0.1


class ChannelError(RuntimeError):
    """The other process of this host cannot be reached any more."""


class ChannelLost(ChannelError):
    """The other process closed its end, in most cases because it died."""


class ChannelTimeout(ChannelError):
    """The other process did not answer within the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorKey:
    """Address and secret of a doorway, as the driver passes them on."""

    address: str
    secret: bytes
    generation: int

    def enter(self, *, timeout_s: float) -> socket.socket:
        """Calls at the door. Whether it lets us in shows with the first thing that it sends. `timeout_s` stays set.

        Raises:
          ChannelLost: the host is gone.
          ChannelTimeout: it did not answer within `timeout_s`.
        """
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(timeout_s)
        try:
            link.connect(self.address)
            link.sendall(_HELLO.pack(self.generation, self.secret))
        except TimeoutError as error:
            link.close()
            raise ChannelTimeout(f"The host process did not answer within {timeout_s:.0f} s. See its log.") from error
        except OSError as error:
            link.close()
            raise ChannelLost(f"The host process is gone ({error}). See its log.") from error
        return link


class Doorway:
    """The host's side. Mutated by `close` only."""

    def __init__(self, *, generation: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = f"\0podembed-{os.getpid()}-{secrets.token_hex(8)}"
        self.key = DoorKey(address=address, secret=secrets.token_bytes(32), generation=generation)
        self._listener.bind(address)
        self._listener.listen(4)

    def admit(self, *, timeout_s: float | None, keep_waiting: Callable[[], None] | None = None) -> socket.socket:
        """Waits for the device process; callers without the secret are turned away.

        Args:
          timeout_s: None waits until `close`.
          keep_waiting: called about every 100 ms where there is a deadline; raises to end the wait early.

        Raises:
          ChannelTimeout: no process with the right secret connected in time.
          OSError: the door was closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is None or time.monotonic() < deadline:
            left = None if deadline is None else max(0.001, deadline - time.monotonic())
            self._listener.settimeout(None if left is None else min(left, _LOOK_S))
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                if keep_waiting is not None:
                    keep_waiting()
                continue
            if self._is_invited(peer, _HELLO_S if left is None else min(_HELLO_S, max(0.01, left))):
                return peer
            peer.close()
        raise ChannelTimeout(f"No device process connected within {timeout_s:.0f} s. See the device actor's log.")

    def _is_invited(self, peer: socket.socket, timeout_s: float) -> bool:
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            return False
        peer.settimeout(timeout_s)
        try:
            hello = peer.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            return False
        if len(hello) != _HELLO.size:
            return False
        generation, secret = _HELLO.unpack(hello)
        return generation == self.key.generation and hmac.compare_digest(secret, self.key.secret)

    def close(self) -> None:
        """Closes the door. A thread in `admit` wakes. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
