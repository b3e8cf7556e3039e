"""`Split`: which vectors of the next step may travel before the update of the step under way, and which must wait for
it.

A row that the step under way does not touch is the same before and after its update; so is a bag of such rows. These
are *early*: their owner sends them while the device still works. The others are *late*. Between two hosts lie some
blocks of vectors, matrices `[n, width]` that both know the shapes of; only their owner knows what the step under way
touches, so early vectors travel with a mask.

A sender keeps both parts of a block packed: the early vectors first, then the late ones, each in their order in the
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

MIN_EARLY_SHARE = 1 / 8
"""Below this share of floats, nothing goes early: all vectors then travel and arrive in place, which saves a copy of
each.
"""


class Part(Enum):
    """Which vectors to gather, pool or send. Without a split, all are late."""

    EARLY = "early"
    LATE = "late"


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The two parts of some blocks.

    Attributes:
      early, late: per block int64, the positions of its vectors, rising.
    """

    early: tuple[np.ndarray, ...]
    late: tuple[np.ndarray, ...]

    @staticmethod
    def of(is_late: Sequence[np.ndarray]) -> Split:
        """From one bool array `[n]` a block."""
        return Split(tuple(np.flatnonzero(~flags) for flags in is_late), tuple(np.flatnonzero(f) for f in is_late))

    @staticmethod
    def worthwhile(is_late: Sequence[np.ndarray], widths: Sequence[int]) -> Split | None:
        """The same, or None where too little would go early to be worth packing."""
        early = sum(
            (len(flags) - np.count_nonzero(flags)) * width for flags, width in zip(is_late, widths, strict=True)
        )
        everything = sum(len(flags) * width for flags, width in zip(is_late, widths, strict=True))
        return Split.of(is_late) if early and early >= MIN_EARLY_SHARE * everything else None

    def positions(self, part: Part) -> tuple[np.ndarray, ...]:
        """Per block those of the early or of the late vectors."""
        return self.early if part is Part.EARLY else self.late

    def packed(self, part: Part, blocks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Where a sender keeps a part: views of its blocks."""
        return [
            block[: len(early)] if part is Part.EARLY else block[len(early) :]
            for block, early in zip(blocks, self.early, strict=True)
        ]

    def mask(self) -> np.ndarray:
        """uint8 bits, block after block, 1 for late; filled up to whole 32-bit words."""
        lengths = [len(early) + len(late) for early, late in zip(self.early, self.late, strict=True)]
        flags = np.zeros(8 * mask_bytes(lengths), bool)
        first = 0
        for length, late in zip(lengths, self.late, strict=True):
            flags[first + late] = True
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
