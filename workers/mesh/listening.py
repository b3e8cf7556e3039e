"""What a host of the mesh listens on, and who was not let in.

Sockets get their options here before a connection exists: the kernel agrees on window scaling in the first packets.
`workers.mesh.setup` does the rest.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass

from podembed.workers.mesh.link_silence import ask_when_quiet
from podembed.workers.mesh.mesh_errors import MeshUsageError

Address = tuple[str, int]


_KEPT_REFUSALS = 100


_NAMED_REFUSALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A connection that was not let in.

    Attributes:
      address: address of the caller.
      reason: why, found and expected.
    """

    address: str
    reason: str


class Refusals:
    """Counts refused connections and keeps the last of them; bounded, whatever arrives."""

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[Refusal] = deque(maxlen=_KEPT_REFUSALS)

    def add(self, address: str, reason: str) -> None:
        self.count += 1
        self._last.append(Refusal(address=address, reason=reason))

    @property
    def last(self) -> tuple[Refusal, ...]:
        return tuple(self._last)

    def describe(self) -> tuple[str, ...]:
        """The last few, one line each, and how many more there were: whoever knocks often must not fill a log."""
        named = tuple(
            f"a connection from {refusal.address}: {refusal.reason}" for refusal in self.last[-_NAMED_REFUSALS:]
        )
        return (*named, f"{self.count - len(named)} more connections") if self.count > len(named) else named


def open_listener(bind_address: str) -> socket.socket:
    """A non-blocking listening socket on a free port of one local address.

    Raises:
      MeshUsageError: the address is empty or stands for all interfaces.
      OSError: the address is not of this machine.
    """
    if bind_address in ("", "0.0.0.0", "::"):
        raise MeshUsageError(
            f"Found bind address {bind_address!r}, which is every interface. Expected one address of the private "
            "network. Pass the address at which the other hosts reach this one."
        )
    listener = socket.socket(family(bind_address), socket.SOCK_STREAM)
    try:
        prepare(listener)
        listener.bind((bind_address, 0))
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def prepare(connection: socket.socket) -> None:
    """Options that must be set before the connection exists, since window scaling is agreed on in its first packets."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ask_when_quiet(connection)
