"""Padding sizes: how much room a step has for sequences, and for bags of tables on devices.

A size follows from the batch, in levels, so that few programs are compiled. All devices of all hosts use the same
levels, those in which every host's part of the batch fits. Of sequences levels are a function of the batch alone: the
same after a restart. Level 0 is the largest size.

*Sequences* have two levels. The first is of the vectors that a device holds, by feature. From one level to the next
they become fewer by the square root of two. The second is of the longest sample, which becomes shorter by half. Level 0
has room for the declared maximum.

*Ids* of a feature whose table is on devices have one level: of one id a bag, or of so many ids of all bags of a device,
which lie one behind the other. Sizes never become smaller within a generation, and have a margin, so that few of them
do. Numbers are the same whatever the size, since the ids of a bag are summed one after another.

*Messages* between devices about sharded tables have one level for each array of them. It holds the distinct rows that a
device asks of another, as a batch now and then shows, with a margin. What does not fit goes in another round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from podembed.embedding.ragged import Ragged

# Smaller arrays are not worth a program of their own.
LEAST_VECTORS = 4096
LEAST_LENGTH = 16
# So that models can cut rows into pieces of one size.
MULTIPLE = 64
_LAST_ROOM = 60
ONE_ID = _LAST_ROOM + 1
"""The level of a feature whose bags have one id at most."""

PaddingLevels = tuple[int, ...]
"""Levels of the vectors and of the longest sample; empty for a job without sequences."""

LARGEST_LEVELS: PaddingLevels = (0, 0)
"""Room for the declared maximum."""


@dataclass(frozen=True, slots=True)
class SequencePadding:
    """The padding sizes of a job's sequences.

    Attributes:
      sequences: by feature, the most positions of a sample.
      num_samples: samples of a device, with padding.
    """

    sequences: Mapping[str, int]
    num_samples: int

    def vectors(self, feature: str, levels: PaddingLevels) -> int:
        """The vectors of a feature that a device has room for."""
        full = self.num_samples * self.sequences[feature]
        # In whole numbers, so that all machines round alike.
        wanted = math.isqrt((full * full - 1) >> levels[0]) + 1
        wanted = -(-wanted // MULTIPLE) * MULTIPLE
        return min(full, max(LEAST_VECTORS, wanted))

    def longest(self, feature: str, levels: PaddingLevels) -> int:
        """The positions that the longest sample of a feature has room for."""
        full = self.sequences[feature]
        return min(full, max(LEAST_LENGTH, -(-full >> levels[1])))

    @property
    def most_levels(self) -> PaddingLevels:
        """The last level of each kind; no program needs a higher one."""
        if not self.sequences:
            return LARGEST_LEVELS
        longest = max(self.sequences.values())
        vectors = max(0, math.ceil(2 * math.log2(self.num_samples * longest / LEAST_VECTORS)))
        return vectors, max(0, math.ceil(math.log2(longest / LEAST_LENGTH)))

    def levels_for(self, lengths: Mapping[str, np.ndarray]) -> PaddingLevels:
        """The highest levels that have room for these samples.

        Args:
          lengths: by feature, int `[num_devices * num_samples]`, those of one device after those of another.
        """
        most = {name: int(column.max()) for name, column in lengths.items()}
        sums = {name: int(column.reshape(-1, self.num_samples).sum(axis=1).max()) for name, column in lengths.items()}
        found: list[int] = []
        for room, needed, last in zip((self.vectors, self.longest), (sums, most), self.most_levels, strict=True):
            level = last
            while level and any(room(name, (level, level)) < size for name, size in needed.items()):
                level -= 1
            found.append(level)
        return tuple(found)

    def laid_out(self, feature: str, bags: Ragged, lengths: np.ndarray, levels: PaddingLevels) -> Ragged:
        """The bags of a feature as a step has them: those of each device, followed by empty ones up to its room.

        Args:
          bags: one for each position of the host's samples.
          lengths: lengths of the samples of all devices of the host.
        """
        room = self.vectors(feature, levels)
        ends = np.cumsum(lengths.reshape(-1, self.num_samples).sum(axis=1))
        parts = [bags.row_splits[:1]]
        for first, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            splits = bags.row_splits[first + 1 : stop + 1]
            parts += [splits, np.full(room - len(splits), bags.row_splits[stop], np.int64)]
        return Ragged(bags.values, np.concatenate(parts), bags.weights)


def cut_to(rows: Ragged, longest: int) -> Ragged:
    """The first ids of every sample, as one bag for each position."""
    lengths = np.diff(rows.row_splits)
    values, weights = rows.values, rows.weights
    if len(lengths) and int(lengths.max()) > longest:
        kept = np.arange(rows.num_ids) - np.repeat(rows.row_splits[:-1], lengths) < longest
        values, weights = values[kept], None if weights is None else weights[kept]
    return Ragged(values, np.arange(len(values) + 1), weights)


def most_ids(num_bags: int) -> int:
    """The most ids that a host's share of a batch may have of a feature with so many bags, if its table is on devices:
    1,024 a bag, or a million.
    """
    return max(num_bags << 10, 1 << 20)


def room_level(expected: float) -> int:
    """The highest level with room for so many rows or ids, and for more where chance decides: four times the spread is
    added to a quarter.
    """
    wanted = math.ceil(1.25 * expected + 4 * math.sqrt(expected))
    level = _LAST_ROOM
    while rows_of_room(level) < wanted:
        level -= 1
    return level


def rows_of_room(level: int) -> int:
    """The rows or ids that a level has room for: fewer by the square root of two from one level to the next."""
    return max(8, -(-math.isqrt(1 << (_LAST_ROOM - level)) // 8) * 8)


def smallest_levels(count: int) -> tuple[int, ...]:
    """The levels of so many features, with room for one id a bag."""
    return (ONE_ID,) * count
