"""How text files are cut into pieces of work: each piece becomes one Parquet file, and the cut depends on the files
alone.

A large plain file is cut at line ends into spans of about equal size. A gzip file is one span, since it can only be
read from its beginning. Small files are put together, so that they do not end as many small row groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO

from podembed.jobs.text.blocks import TextError, blocks_of_lines, is_gzip
from podembed.workers.data.files import file_version, open_ranges

# How much longer click logs are than their gzip; only balances pieces.
_GZIP_RATIO = 4
_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """Bytes `start` to `stop - 1` of a file, whole lines; a `stop` of None is the end of the file.

    Attributes:
      size_bytes: on disk, for progress.
    """

    path: str
    start: int
    stop: int | None
    size_bytes: int

    def blocks(self) -> Iterator[bytes]:
        """See `blocks_of_lines`."""
        return blocks_of_lines(self.path, start=self.start, stop=self.stop)

    def lines_before(self) -> int:
        """Lines of the file in front of this span; reads them."""
        if self.start == 0:
            return 0
        return sum(block.count(b"\n") for block in blocks_of_lines(self.path, stop=self.start))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One unit of work: spans that become one Parquet file, named by the piece's number."""

    number: int
    spans: tuple[ByteSpan, ...]

    @property
    def size_bytes(self) -> int:
        return sum(span.size_bytes for span in self.spans)

    @property
    def part_name(self) -> str:
        return f"part-{self.number:05d}.parquet"


def plan_pieces(files: Sequence[str], *, piece_bytes: int) -> tuple[Piece, ...]:
    """Cuts the files, in their order, into pieces of about `piece_bytes` of text.

    Raises:
      TextError: a file has no line end where it should be cut.
    """
    pieces: list[Piece] = []
    gathered: list[ByteSpan] = []
    weight = 0
    for path in files:
        size, _ = file_version(path)
        packed = is_gzip(path)
        for span in _spans(path, size, 1 if packed else max(1, round(size / piece_bytes))):
            span_weight = span.size_bytes * (_GZIP_RATIO if packed else 1)
            if gathered and weight + span_weight > piece_bytes * 3 // 2:
                pieces.append(Piece(number=len(pieces), spans=tuple(gathered)))
                gathered, weight = [], 0
            gathered.append(span)
            weight += span_weight
    if gathered:
        pieces.append(Piece(number=len(pieces), spans=tuple(gathered)))
    return tuple(pieces)


def _spans(path: str, size: int, count: int) -> list[ByteSpan]:
    starts = {0}
    if count > 1:
        with open_ranges(path) as file:
            starts |= {_next_line(file, path, size * at // count) for at in range(1, count)}
    bounds = [*sorted(start for start in starts if start < size or start == 0), size]
    return [
        ByteSpan(path=path, start=start, stop=None if stop == size else stop, size_bytes=stop - start)
        for start, stop in pairwise(bounds)
    ]


def _next_line(file: IO[bytes], path: str, position: int) -> int:
    """Where the first line begins that begins at or behind a position."""
    file.seek(position - 1)
    passed = 0
    while chunk := file.read(_READ_BYTES):
        at = chunk.find(b"\n")
        if at >= 0:
            return position + passed + at
        passed += len(chunk)
        if passed > _LONGEST_LINE_BYTES:
            raise TextError(
                f"Found no line end within {passed:,} bytes behind byte {position:,} of {path}. Expected lines of a "
                "few hundred bytes. Check that the file is text with a line for each sample."
            )
    return position + passed
