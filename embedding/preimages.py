"""`Preimages`: the values that the rows of a table had at one moment, while the table goes on changing.

Before the first change of a block of 64 rows after the moment, the block is copied into a buffer of fixed size; rows of other blocks are
read where they lie. This serves two purposes: writing a checkpoint while training goes on, and going back to the moment. Pure arrays:
who calls from which thread, and what happens while the buffer is full, is the caller's business (`workers.background_save`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedding.kernels_preimages import (
    BLOCK_ROWS,
    claim_blocks,
    keep_blocks,
    put_back,
    read_frozen,
    release_blocks,
)

__all__ = ["BLOCK_ROWS", "Preimages", "share_out"]


class Preimages:
    """The frozen view of some arrays whose rows change together.

    Mutated: the buffer and its book-keeping; the arrays themselves by `undo` alone.

    Args:
      arrays: float32 `[num_rows, width]` each, C-contiguous: a table's rows and its slots. They are not copied and must stay.
      max_blocks: of the buffer; see `share_out`.
    """

    def __init__(self, arrays: Sequence[np.ndarray], *, max_blocks: int) -> None:
        self._arrays = tuple(arrays)
        self._num_rows = len(self._arrays[0])
        num_blocks = -(-self._num_rows // BLOCK_ROWS)
        self._buffers = tuple(np.empty((max_blocks, BLOCK_ROWS, array.shape[1]), np.float32) for array in self._arrays)
        # A number per block instead of a flag, so that `freeze` clears nothing.
        self._epochs = np.zeros(num_blocks, np.int32)
        self._seats = np.full(num_blocks, -1, np.int32)
        self._free = np.arange(max_blocks, dtype=np.int32)
        self._claimed = np.empty(max_blocks, np.int64)
        self._num_free = 0
        self._released = 0
        self._epoch = 0

    @property
    def size_bytes(self) -> int:
        """Memory of the buffer and its book-keeping."""
        books = (self._epochs, self._seats, self._free, self._claimed)
        return sum(array.nbytes for array in (*self._buffers, *books))

    @property
    def num_kept(self) -> int:
        """Blocks in the buffer."""
        return len(self._free) - self._num_free

    def freeze(self) -> None:
        """Takes the present values for the frozen ones, and forgets those of an earlier moment."""
        self._epoch += 1
        self._free[:] = np.arange(len(self._free))
        self._num_free = len(self._free)
        self._released = 0

    def preserve(self, rows: np.ndarray) -> int:
        """To be called before rows change. Copies the blocks of theirs that have not changed since the freeze.

        Args:
          rows: int64 `[n]`, any order, may repeat.

        Returns:
          How many rows, from the first, may be changed now: fewer than n when the buffer is full. Call again with the rest after `release`.
        """
        done, count = claim_blocks(
            rows, self._epochs, self._epoch, self._seats, self._free, self._num_free, self._claimed
        )
        self._num_free -= count
        for array, buffer in zip(self._arrays, self._buffers, strict=True):
            keep_blocks(array, self._claimed[:count], self._seats, buffer)
        return int(done)

    def read(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """Copies the frozen values of rows `start` to `stop - 1`, which must not have been released.

        Args:
          out: one float32 `[stop - start, width]` an array, C-contiguous.
        """
        if start < self._released:
            raise ValueError(
                f"Found row {start} asked for after rows up to {self._released} were released. Expected to read rows in rising order."
            )
        for array, buffer, values in zip(self._arrays, self._buffers, out, strict=True):
            read_frozen(array, self._epochs, self._epoch, self._seats, buffer, start, stop, values)

    def release(self, stop: int) -> None:
        """Says that the frozen values of rows below `stop` are not needed any more; makes room for others."""
        is_end = stop >= self._num_rows
        first, last = self._released // BLOCK_ROWS, len(self._epochs) if is_end else stop // BLOCK_ROWS
        self._num_free = release_blocks(first, last, self._epochs, self._epoch, self._seats, self._free, self._num_free)
        # A block that reaches beyond `stop` stays whole.
        self._released = self._num_rows if is_end else max(self._released, last * BLOCK_ROWS)

    def undo(self) -> int:
        """Gives all rows their frozen values again. The moment stays frozen, and the buffer is empty afterwards.

        Returns:
          How many blocks had changed.

        Raises:
          ValueError: rows have been released since the freeze, so not all frozen values are known.
        """
        if self._released:
            raise ValueError(
                f"Found rows up to {self._released} released since the freeze. Expected none, to go back to it. Restore from a commit."
            )
        num_blocks = 0
        for array, buffer in zip(self._arrays, self._buffers, strict=True):
            num_blocks = put_back(array, self._epochs, self._epoch, self._seats, buffer)
        self.freeze()
        return int(num_blocks)


def share_out(*, num_blocks: Sequence[int], block_bytes: Sequence[int], budget_bytes: int) -> list[int]:
    """Blocks of the buffer of each table: equal bytes for all, but no more than the table has, and at least one block.

    A step touches about as many rows of a small table as of a large one; a share by size would leave small tables without room.

    Args:
      num_blocks: of each table.
      block_bytes: bytes of one block of each, rows and slots.
      budget_bytes: for all buffers together.
    """
    shares = [0] * len(num_blocks)
    left = budget_bytes
    by_size = sorted(range(len(num_blocks)), key=lambda at: num_blocks[at] * block_bytes[at])
    for position, at in enumerate(by_size):
        fair_bytes = left // (len(by_size) - position)
        shares[at] = min(num_blocks[at], max(1, fair_bytes // block_bytes[at]))
        left = max(0, left - shares[at] * block_bytes[at])
    return shares
