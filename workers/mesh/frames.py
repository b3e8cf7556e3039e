"""Frames: what one host sends another in one exchange, as bytes.

A frame is a fixed header of `HEADER_BYTES`, and a payload of the length that the header names. If that is not 0, a
trailer follows, of `TRAILER_BYTES` that repeats the header's checksum. With it, a payload of another length is found
before the caller gets it. This module owns the layout, the checks that need no connection, and the flat byte views of
what callers send. It opens no sockets; `links` says which header must come next.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import google_crc32c
import numpy as np

from podembed.workers.mesh.mesh_errors import FrameError, MeshUsageError

Buffer = bytes | bytearray | memoryview | np.ndarray

# What nearly all frames hold.
_PLAIN = frozenset(np.dtype(kind) for kind in (np.float32, np.int64, np.uint8))

# Shorter frames are joined before they are sent: to copy them costs less than to name their parts to the kernel.
JOINED_BYTES = 1 << 12

MAX_FRAME_BYTES = 4 << 30
"""Longest payload that one host may send another in one exchange."""

_MAGIC = b"PEF2"
# magic, tag, sender, generation, step, sequence, payload bytes; then the crc32c of all of these.
_BODY = struct.Struct("<4sIIQqQQ")
_CHECKSUM = struct.Struct("<I")
_END_MAGIC = b"PEFE"
HEADER_BYTES = _BODY.size + _CHECKSUM.size
TRAILER_BYTES = _CHECKSUM.size + len(_END_MAGIC)


class Tag(enum.IntEnum):
    """The content of a frame. Both ends of an exchange must name the same tag."""

    IDS = 1
    ROWS = 2
    GRADIENTS = 3
    CONTROL = 4
    BUCKETS = 5
    GOODBYE = 0xFFFFFFFF
    """Sent by the mesh itself when it closes; callers cannot use it."""


def tag_name(tag: int) -> str:
    """The content of a frame, in a word; the number of a tag without a name."""
    return Tag(tag).name if tag in Tag.__members__.values() else str(tag)


class Farewell(enum.IntEnum):
    """Meaning of the step field of a `GOODBYE` frame; zero and above is the rank that the sender blames."""

    ORDERLY = -1
    FAILED = -2


class FrameHeader(NamedTuple):
    """The fixed part of a frame. A tuple, since one is made for every frame, and a dataclass takes five times as long.

    Attributes:
      tag, step: the exchange the frame belongs to.
      sender: rank of the host that sent it.
      generation: the worker group it was sent in.
      sequence: how many frames came before it on this connection in this direction.
      payload_bytes: length of what follows the header.
    """

    tag: int
    step: int
    sender: int
    generation: int
    sequence: int
    payload_bytes: int

    def pack(self) -> bytes:
        """`HEADER_BYTES` little-endian bytes, the last four being the checksum of the others."""
        body = _BODY.pack(_MAGIC, self.tag, self.sender, self.generation, self.step, self.sequence, self.payload_bytes)
        return body + _CHECKSUM.pack(google_crc32c.value(body))

    @staticmethod
    def unpack(data: bytes, *, rank: int) -> FrameHeader:
        """The header in `HEADER_BYTES` bytes that came from `rank`.

        Raises:
          FrameError: the bytes do not begin with the magic, or the header's checksum does not fit.
        """
        magic, tag, sender, generation, step, sequence, payload_bytes = _BODY.unpack_from(data)
        if magic != _MAGIC:
            raise FrameError(rank, "magic", repr(magic), repr(_MAGIC))
        (found,) = _CHECKSUM.unpack_from(data, _BODY.size)
        expected = google_crc32c.value(data[: _BODY.size])
        if found != expected:
            raise FrameError(rank, "header crc32c", f"{found:#010x}", f"{expected:#010x}")
        return FrameHeader(tag, step, sender, generation, sequence, payload_bytes)


def trailer_of(header: bytes) -> bytes:
    """The `TRAILER_BYTES` that must follow the payload of a packed header."""
    return header[_BODY.size :] + _END_MAGIC


def byte_view(buffer: Buffer) -> memoryview:
    """A flat view of a buffer's bytes, sharing its memory; writable when the buffer is.

    Raises:
      MeshUsageError: it is no buffer, is not C-contiguous, or holds Python objects.
    """
    plain: Any = buffer
    if type(buffer) is np.ndarray and buffer.size and buffer.dtype in _PLAIN and buffer.flags.c_contiguous:
        return memoryview(plain).cast("B")
    if type(buffer) is bytes:
        return memoryview(buffer)
    if isinstance(buffer, memoryview) and buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
        return buffer
    try:
        array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
        if not array.flags.c_contiguous:
            raise ValueError(f"strides {array.strides} over shape {array.shape}")
        # Through numpy, since memoryview cannot cast empty arrays, big-endian ones or extension types such as bfloat16.
        return memoryview(cast(Any, array.reshape(-1).view(np.uint8)))
    except (TypeError, ValueError, BufferError) as error:
        raise MeshUsageError(
            f"Found a {type(buffer).__name__} that is not a run of plain bytes ({error}). Expected a C-contiguous "
            "array or bytes-like object without Python objects. Pass numpy.ascontiguousarray(it)."
        ) from error


def byte_views(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Flat views of all buffers that hold any bytes, in order."""
    views = [byte_view(buffer) for buffer in buffers]
    return [view for view in views if view.nbytes]


def frame_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Flat views that make up a frame. Buffers of a few bytes are copied into one.

    Raises:
      MeshUsageError: as `byte_view`.
    """
    num_bytes = 0
    for buffer in buffers:
        if type(buffer) is not np.ndarray or buffer.dtype not in _PLAIN:
            return byte_views(buffers)
        num_bytes += buffer.nbytes
    if num_bytes > JOINED_BYTES:
        return byte_views(buffers)
    plain: Any = buffers
    try:
        # Views would take longer to make, and the kernel would take longer to read them.
        return [memoryview(b"".join(plain))] if num_bytes else []
    except (ValueError, BufferError):
        return byte_views(buffers)


def size_of(views: Sequence[memoryview] | None) -> int:
    """Bytes of a frame's payload, 0 for no frame."""
    # A loop, since this runs several times a frame and a generator takes three times as long.
    num_bytes = 0
    for view in views or ():
        num_bytes += view.nbytes
    return num_bytes


def without_first(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The rest of the views after their first `num_bytes`."""
    left = []
    for view in views:
        skipped = min(num_bytes, view.nbytes)
        num_bytes -= skipped
        if skipped < view.nbytes:
            left.append(view[skipped:])
    return left


def writable_views(buffers: Buffer | Sequence[Buffer] | None, num_bytes: int, rank: int) -> list[memoryview]:
    """Views of the first `num_bytes` of what `receive` gave."""
    if type(buffers) is np.ndarray and buffers.nbytes == num_bytes and not (whole := byte_view(buffers)).readonly:
        return [whole]
    given = [] if buffers is None else buffers if isinstance(buffers, list | tuple) else [cast(Buffer, buffers)]
    views = [byte_view(buffer) for buffer in given]
    size, is_readonly = 0, False
    for view in views:
        size += view.nbytes
        is_readonly = is_readonly or view.readonly
    if is_readonly or size < num_bytes:
        kind = "read-only" if is_readonly else "writable"
        raise MeshUsageError(
            f"Found a {kind} buffer of {size} bytes for {num_bytes} bytes from rank {rank}. Expected a writable one of "
            "at least that size. Allocate it in `receive` from the size given there."
        )
    found = []
    for view in views:
        if num_bytes and view.nbytes:
            found.append(view[:num_bytes])
            num_bytes -= found[-1].nbytes
    return found
