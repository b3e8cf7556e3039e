"""Kernels of `Preimages`: which blocks must be kept, and copies between a table's arrays and the buffer.

Common arguments: row r lies in block `r // BLOCK_ROWS`. `epochs[block]` is the number of the freeze for which the block has been dealt
with; then `seats[block]` is its place in the buffer, or -1 if its frozen values are not needed any more. A buffer is float32
`[seats, BLOCK_ROWS, width]`, `array` float32 `[rows, width]`.
"""

from __future__ import annotations

from embedding.row_values import jit

BLOCK_ROWS = 64


@jit
def claim_blocks(rows, epochs, epoch, seats, free, num_free, blocks):
    """Gives a seat to each block of `rows` that has not been dealt with in this epoch, from the end of `free[:num_free]`.

    Returns:
      How many of `rows`, from the first, now lie in blocks that may be changed, and how many numbers were written to `blocks`.
    """
    num_blocks = 0
    for at in range(rows.shape[0]):
        block = rows[at] // BLOCK_ROWS
        if epochs[block] != epoch:
            if num_blocks == num_free:
                return at, num_blocks
            epochs[block] = epoch
            seats[block] = free[num_free - 1 - num_blocks]
            blocks[num_blocks] = block
            num_blocks += 1
    return rows.shape[0], num_blocks


@jit
def keep_blocks(array, blocks, seats, buffer):
    """Copies blocks into their seats."""
    for at in range(blocks.shape[0]):
        first, seat = blocks[at] * BLOCK_ROWS, seats[blocks[at]]
        for row in range(min(BLOCK_ROWS, array.shape[0] - first)):
            for column in range(array.shape[1]):
                buffer[seat, row, column] = array[first + row, column]


@jit
def read_frozen(array, epochs, epoch, seats, buffer, start, stop, out):
    """Copies rows `start` to `stop - 1` as they were at the freeze into `out`: from the buffer where it has them."""
    for block in range(start // BLOCK_ROWS, (stop + BLOCK_ROWS - 1) // BLOCK_ROWS):
        first = block * BLOCK_ROWS
        is_kept = epochs[block] == epoch and seats[block] >= 0
        for row in range(max(start, first), min(stop, first + BLOCK_ROWS)):
            for column in range(array.shape[1]):
                if is_kept:
                    out[row - start, column] = buffer[seats[block], row - first, column]
                else:
                    out[row - start, column] = array[row, column]


@jit
def release_blocks(first, last, epochs, epoch, seats, free, num_free):
    """Frees the seats of blocks `first` to `last - 1` and marks them as dealt with. Returns the new number of free seats."""
    for block in range(first, last):
        if epochs[block] == epoch and seats[block] >= 0:
            free[num_free] = seats[block]
            num_free += 1
        epochs[block] = epoch
        seats[block] = -1
    return num_free


@jit
def put_back(array, epochs, epoch, seats, buffer):
    """Writes all kept blocks back to where they came from. Returns how many there were."""
    num_blocks = 0
    for block in range(epochs.shape[0]):
        if epochs[block] == epoch and seats[block] >= 0:
            num_blocks += 1
            first = block * BLOCK_ROWS
            for row in range(min(BLOCK_ROWS, array.shape[0] - first)):
                for column in range(array.shape[1]):
                    array[first + row, column] = buffer[seats[block], row, column]
    return num_blocks
