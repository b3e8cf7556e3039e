"""Text files as blocks of whole lines: plain or gzip, local or remote, from their beginning or from the middle.

What a line means is the business of whoever reads the blocks (`jobs.text.criteo_lines`, `jobs.prepare.forms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from podembed.workers.data.files import open_ranges
from podembed.workers.data.input_errors import InputError
from podembed.workers.formats import unpacking

BLOCK_BYTES = 8 << 20
_LONGEST_LINE_BYTES = 1 << 20


class TextError(InputError):
    """A file is damaged, or no text of lines."""


def is_gzip(path: str) -> bool:
    """Whether a file begins like gzip, whatever its name says."""
    with open_ranges(path) as raw:
        return unpacking.is_gzip(raw)


def blocks_of_lines(path: str, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Whole lines, some MiB at a time, each block ending with a newline; a blank last line of the file is left out.

    Args:
      start, stop: bytes `start` to `stop - 1`, which must begin and end with whole lines, of a file that is not gzip;
      None is its end.

    Raises:
      TextError: the gzip stream is damaged or cut short, or a line does not end.
    """
    rest = held = b""
    num_bytes = start
    with open_ranges(path) as raw:
        for chunk in _chunks(raw, path, start, stop):
            num_bytes += len(chunk)
            cut = chunk.rfind(b"\n") + 1
            if cut == 0:
                rest += chunk
                if len(rest) > _LONGEST_LINE_BYTES:
                    raise TextError(
                        f"Found no line end within {len(rest):,} bytes before byte {num_bytes:,} of {path}. Expected "
                        "lines of a few hundred bytes. Check that the file is text with a line for each sample."
                    )
                continue
            # One block is held back until the next is there, so that the last one is known as such.
            if held:
                yield held
            held, rest = rest + chunk[:cut], chunk[cut:]
    if rest:
        if held:
            yield held
        held = rest + b"\n"
    if stop is None and (held.endswith(b"\n\n") or held == b"\n"):
        held = held[:-1]
    if held:
        yield held


def _chunks(raw: IO[bytes], path: str, start: int, stop: int | None) -> Iterator[bytes]:
    """The bytes of the text, unpacked if the file begins like gzip."""
    if unpacking.is_gzip(raw):
        try:
            yield from unpacking.unpacked(raw, path, piece_bytes=BLOCK_BYTES)
        except unpacking.DamagedGzip as error:
            raise TextError(f"{error} Nothing of it was converted.") from error
        return
    raw.seek(start)
    num_bytes = start
    while stop is None or num_bytes < stop:
        chunk = raw.read(BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - num_bytes))
        if not chunk:
            return
        num_bytes += len(chunk)
        yield chunk
