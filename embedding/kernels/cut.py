"""A kernel that cuts an array into pieces of its columns, each number times a factor.

Thus the gradients that a model computed side by side get into the blocks of their features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.kernels.arrays import CACHE_LINE_BYTES, STREAMING_FLOATS, matrix_of
from podembed.embedding.kernels.row_vectors import jit, load, publish, splat, store, store_streaming, width_of

_LINE = CACHE_LINE_BYTES // 4
_HALF = _LINE // 2
# While each piece of so many rows is copied, rows of 11,000 floats stay in the second cache. With 16 and 32 rows the
# kernel took 1.2 and 1.4 times as long.
_ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Memory of several pieces, as the kernel takes it. Made once by `of`.

    Attributes:
      blocks: float32 `[n, width]` each, without gaps.
      num_rows, num_columns: `n`, and the sum of the widths.
      widths: int64, of each.
      starts: int64, the address of each.
      streams: whether they are too much to be found in the caches later.
    """

    blocks: tuple[np.ndarray, ...]
    num_rows: int
    num_columns: int
    widths: np.ndarray
    starts: np.ndarray
    streams: bool

    @staticmethod
    def of(blocks: Sequence[np.ndarray]) -> Pieces:
        """Pieces in this memory, which stays where it is.

        Raises:
          ValueError: a block has gaps, other rows than the first, cannot be written, or is no matrix of float32.
        """
        if any(len(block) != len(blocks[0]) or not block.flags.carray for block in blocks):
            raise ValueError(
                f"Found blocks of shapes {[block.shape for block in blocks]}. Expected equal rows, without gaps, that "
                "can be written. Pass memory that was allocated with these shapes."
            )
        starts, widths = [matrix_of(block)[0] for block in blocks], [block.shape[1] for block in blocks]
        return Pieces(
            blocks=tuple(blocks),
            num_rows=len(blocks[0]),
            num_columns=sum(widths),
            widths=np.array(widths, np.int64),
            starts=np.array(starts, np.int64),
            streams=len(blocks[0]) * sum(widths) >= STREAMING_FLOATS,
        )


def cut_columns(joined: np.ndarray, pieces: Pieces, factor: np.float32, *, first: int = 0) -> None:
    """Copies the columns of an array, times `factor`, to the pieces, which lie side by side in it.

    Args:
      joined: float32 `[m, sum of the widths]`, columns side by side.
      first: the row of the pieces that the first row of `joined` goes to.

    Raises:
      ValueError: another number of columns, or rows that the pieces do not have.
    """
    source = matrix_of(joined, pieces.num_columns)
    if first < 0 or first + len(joined) > pieces.num_rows:
        raise ValueError(
            f"Found rows {first} to {first + len(joined)} for pieces of {pieces.num_rows} rows. Expected rows within "
            "them. Pass pieces of the whole batch."
        )
    widths = width_of(_LINE), width_of(_HALF), width_of(1)
    _cut(*widths, source, len(joined), pieces.widths, pieces.starts, first, pieces.streams, factor)


@jit
def _cut(line, half, single, joined, num_rows, widths, starts, offset, streams, factor):
    for begin in range(0, num_rows, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, num_rows)
        column = 0
        for piece in range(widths.shape[0]):
            width = widths[piece]
            target = (starts[piece] + offset * 4 * width, 4 * width)
            # A loop for each kind of store: within one, LLVM makes ordinary stores of both.
            if streams and width % _LINE == 0 and starts[piece] % CACHE_LINE_BYTES == 0:
                for row in range(begin, end):
                    for at in range(0, width, _LINE):
                        values = load(line, joined, row, column + at) * splat(line, factor)
                        store_streaming(target, row, at, values)
            else:
                for row in range(begin, end):
                    at = 0
                    while at + _HALF <= width:
                        store(target, row, at, load(half, joined, row, column + at) * splat(half, factor))
                        at += _HALF
                    while at < width:
                        store(target, row, at, load(single, joined, row, column + at) * splat(single, factor))
                        at += 1
            column += width
    publish()
