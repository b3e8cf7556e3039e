"""`Split`: which vectors of the next step may travel before the update of the step under way, and which must wait for
it.

A row that the step under way does not touch is the same before and after its update; so is a bag of such rows. These
vectors have no conflict, and are *prefetched*: their owner sends them while the device still works. The *rest* follows
after the update. Between two hosts lie some blocks of vectors, matrices `[n, width]` that both know the shapes of. Only
their owner knows what the step under way touches, so prefetched vectors travel with a mask.

A sender keeps both parts of a block packed: the prefetched vectors first, then the rest, each in their order in the
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

MIN_PREFETCH_SHARE = 1 / 8
"""Below this share of floats nothing is prefetched: all vectors then travel and arrive in place, which saves a copy of
each.
"""


class Part(Enum):
    """Which vectors to gather, pool or send. Without a split, all belong to the rest."""

    PREFETCHED = "prefetched"
    REST = "rest"


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The two parts of some blocks.

    Attributes:
      prefetched, rest: per block int64, the positions of its vectors, rising.
    """

    prefetched: tuple[np.ndarray, ...]
    rest: tuple[np.ndarray, ...]

    @staticmethod
    def of(conflicts: Sequence[np.ndarray]) -> Split:
        """From one bool array `[n]` a block: whether the step under way touches the vector."""
        return Split(tuple(np.flatnonzero(~flags) for flags in conflicts), tuple(np.flatnonzero(f) for f in conflicts))

    @staticmethod
    def worthwhile(conflicts: Sequence[np.ndarray], widths: Sequence[int]) -> Split | None:
        """The same, or None where too little could be prefetched to be worth packing."""
        free = sum(
            (len(flags) - np.count_nonzero(flags)) * width for flags, width in zip(conflicts, widths, strict=True)
        )
        everything = sum(len(flags) * width for flags, width in zip(conflicts, widths, strict=True))
        return Split.of(conflicts) if free and free >= MIN_PREFETCH_SHARE * everything else None

    def positions(self, part: Part) -> tuple[np.ndarray, ...]:
        """Per block those of one part."""
        return self.prefetched if part is Part.PREFETCHED else self.rest

    def packed(self, part: Part, blocks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Where a sender keeps a part: views of its blocks."""
        return [
            block[: len(first)] if part is Part.PREFETCHED else block[len(first) :]
            for block, first in zip(blocks, self.prefetched, strict=True)
        ]

    def mask(self) -> np.ndarray:
        """uint8 bits, block after block, 1 for the rest; padded to whole 32-bit words."""
        lengths = [len(first) + len(rest) for first, rest in zip(self.prefetched, self.rest, strict=True)]
        flags = np.zeros(8 * mask_bytes(lengths), bool)
        first = 0
        for length, rest in zip(lengths, self.rest, strict=True):
            flags[first + rest] = True
            first += length
        return np.packbits(flags)

    @staticmethod
    def of_mask(mask: np.ndarray, lengths: Sequence[int]) -> Split:
        """From what `mask` gave, for blocks of so many vectors."""
        flags = np.unpackbits(mask[: mask_bytes(lengths)]).view(bool)
        return Split.of([flags[end - length : end] for length, end in zip(lengths, np.cumsum(lengths), strict=True)])


def mask_bytes(lengths: Sequence[int]) -> int:
    """Bytes of the mask of blocks of so many vectors."""
    return 4 * -(-sum(lengths) // 32)
