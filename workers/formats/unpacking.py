"""Text of a file that may be gzip, in pieces."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import IO

from podembed.workers.data.input_errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"


class DamagedGzip(InputError):
    """A gzip stream that breaks off or does not unpack."""


def is_gzip(raw: IO[bytes]) -> bool:
    """Whether the file begins like gzip; leaves the position at its start."""
    raw.seek(0)
    found = raw.read(2) == _GZIP_MAGIC
    raw.seek(0)
    return found


def unpacked(raw: IO[bytes], path: str, *, piece_bytes: int = 8 << 20) -> Iterator[bytes]:
    """The bytes of the text, unpacked if the file begins like gzip; of any number of members, as `cat a.gz b.gz` gives.

    Raises:
      DamagedGzip: the stream is damaged or cut short.
    """
    stream = gzip.GzipFile(fileobj=raw) if is_gzip(raw) else raw
    num_bytes = 0
    while True:
        try:
            piece = stream.read(piece_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedGzip(
                f"Found a damaged gzip stream after {num_bytes:,} unpacked bytes of {path} ({error}). Expected a "
                "complete file. Copy it from its source again."
            ) from error
        if not piece:
            return
        num_bytes += len(piece)
        yield piece
