"""Whole transfers between buffers and an open file, and what makes them durable.

The kernel may take or give less than was requested, so every transfer here is a loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview
_MAX_TRANSFER_BYTES = 1 << 30
_MAX_VECTORS = 512


def sync_file(handle: int, name: str) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        # The call knows a descriptor alone, and the user needs the name.
        error.filename = name or None
        raise


def read_all(handle: int, buffers: Sequence[memoryview], start: int) -> int:
    """Fills the buffers one after the other and returns the bytes read; fewer than wanted only at the end of the
    file.
    """
    at = start
    for buffer in buffers:
        filled = 0
        while filled < len(buffer):
            count = os.preadv(handle, [buffer[filled : filled + _MAX_TRANSFER_BYTES]], at)
            # The end of the file: a writer may have been killed, or the file is shorter than its manifest says.
            if count == 0:
                return at - start
            filled += count
            at += count
    return at - start


def write_all(handle: int, buffers: Sequence[Buffer]) -> None:
    pending = [view for buffer in buffers if len(view := memoryview(buffer).cast("B"))]
    while pending:
        written = os.writev(handle, _next_vector(pending))
        # Drop what is written; a short write leaves the rest of one view at the front.
        while pending and written >= len(pending[0]):
            written -= len(pending[0])
            pending.pop(0)
        if written:
            pending[0] = pending[0][written:]


def _next_vector(pending: Sequence[memoryview]) -> list[memoryview]:
    """Leading views for one system call. Only the last may be cut: a gap would shift everything behind it."""
    vector: list[memoryview] = []
    room = _MAX_TRANSFER_BYTES
    for view in pending[:_MAX_VECTORS]:
        vector.append(view[:room])
        room -= len(vector[-1])
        if room == 0:
            break
    return vector
