"""How long nothing at all has come from the machine at the other end of a connection. The kernel of this one knows.

Kernels answer each other whatever their processes do: one that is stopped, or computes for minutes, is heard all the
same. On a quiet connection they are made to ask every second. If nothing comes over a connection for seconds, the other
machine is gone, or its link carries nothing in at least one direction. Linux only.
"""

from __future__ import annotations

import socket
import struct

ASK_AFTER_S = 2
ASK_EVERY_S = 1
# Ends a connection on which nothing is under way; one with data under way is ended by who waits for it.
LOST_AFTER_QUESTIONS = 10
# Shorter silences are the pauses between two questions.
NOTABLE_S = 3.5

# struct tcp_info: eight bytes, then numbers of 32 bits, of which these are ages in milliseconds.
_LAST_DATA_RECEIVED, _LAST_ANSWER_RECEIVED = 8 + 4 * 11, 8 + 4 * 12
_LENGTH = _LAST_ANSWER_RECEIVED + 4


def ask_when_quiet(connection: socket.socket) -> None:
    """Lets the kernel probe the peer of a quiet connection (TCP keepalive)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, ASK_AFTER_S),
        (socket.TCP_KEEPINTVL, ASK_EVERY_S),
        (socket.TCP_KEEPCNT, LOST_AFTER_QUESTIONS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def silence_s(connection: socket.socket) -> float:
    """Seconds since anything came; 0 for a connection that is closed. From any thread."""
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
    except OSError:
        return 0.0
    if len(found) < _LENGTH:
        return 0.0
    return min(struct.unpack_from("I", found, at)[0] for at in (_LAST_DATA_RECEIVED, _LAST_ANSWER_RECEIVED)) / 1000
