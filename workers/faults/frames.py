"""What a plan does to the frames of a mesh: lose, repeat, shorten or change one, or break its connection.

Frames are spoilt as they leave, header, payload and trailer in one piece, so the other end meets what a broken network
would bring.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from podembed.workers.faults.inject import FaultPoints, flipped

Spoil = Callable[[socket.socket, int, str, int, list[memoryview]], list[memoryview]]
"""`spoil(connection, rank, carries, step, views)` gives what is sent in place of the views of one frame, which carries
what a tag says, such as `ROWS`.
"""


def frame_spoiler(faults: FaultPoints | None) -> Spoil | None:
    """What a mesh does to its frames; None where no fault may strike one."""
    if faults is None or not faults.knows("mesh."):
        return None

    def spoil(
        connection: socket.socket, rank: int, carries: str, step: int, views: list[memoryview]
    ) -> list[memoryview]:
        fault = faults.hit("mesh.send", step=step, detail=f"{carries} to {rank}")
        if fault is None:
            return views
        if fault.action == "cut":
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return views
        frame = b"".join(views)
        match fault.action:
            case "drop":
                frame = b""
            case "duplicate":
                frame += frame
            case "truncate":
                frame = frame[:-1]
            case _:
                frame = flipped(frame, fault.arguments)
        return [memoryview(frame)] if frame else []

    return spoil
