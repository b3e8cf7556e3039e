"""`ActivationLayout`: where the activations of each feature lie in one piece of memory, and their gradients in another.

A feature is a block of vectors `[num_samples * positions, width]`, sample after sample. Features whose table lies whole
on one host are pooled there; the blocks of one owner follow each other, so that what this owner sends, and the
gradients that go back to it, are one contiguous region that the network reads and writes in place. All other features
come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

BLOCK_ALIGNMENT_BYTES = 64  # a cache line; what XLA asks of memory that it uses in place
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationLayout:
    """Blocks of float32 in one memory.

    Attributes:
      num_samples: rows of every block: the host's share of a batch with its padding.
      widths: columns of each feature's block, in the features' order.
      owners: per feature, the host that pools it, or -1 where the rows come here and are pooled on the spot.
      inner: per feature, the axes between samples and width: `(length,)` of a sequence; empty for one vector a sample.
        Left out, no feature has any.
      order: the features as they lie in memory: by owner, those without one last, otherwise in their own order.
      block_floats: length of each block with its padding up to a cache line, in the features' order.
      starts: where each feature's block begins, in floats, in the features' order.
    """

    num_samples: int
    widths: tuple[int, ...]
    owners: tuple[int, ...]
    inner: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = field(init=False)
    block_floats: tuple[int, ...] = field(init=False)
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        line = BLOCK_ALIGNMENT_BYTES // _FLOAT_BYTES
        if not self.inner:
            object.__setattr__(self, "inner", ((),) * len(self.widths))
        lengths = tuple(-(-self.num_vectors(at) * width // line) * line for at, width in enumerate(self.widths))
        order = sorted(range(len(self.widths)), key=lambda at: (self.owners[at] < 0, self.owners[at], at))
        starts, first = [0] * len(order), 0
        for at in order:
            starts[at] = first
            first += lengths[at]
        # Derived once: every step asks for them.
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "block_floats", lengths)
        object.__setattr__(self, "starts", tuple(starts))

    @property
    def num_floats(self) -> int:
        return sum(self.block_floats)

    def num_vectors(self, feature: int) -> int:
        """Rows of a feature's block."""
        return self.num_samples * math.prod(self.inner[feature])

    def region(self, owner: int) -> slice:
        """The floats of all features that a host pools."""
        mine = [at for at in self.order if self.owners[at] == owner]
        if not mine:
            return slice(0, 0)
        return slice(self.starts[mine[0]], self.starts[mine[-1]] + self.block_floats[mine[-1]])

    def blocks(self, memory: np.ndarray) -> tuple[np.ndarray, ...]:
        """Views `[num_samples * positions, width]` of a flat float32 array of `num_floats`, in the features' order."""
        return tuple(self._block(at, memory[self.starts[at] :]) for at in range(len(self.widths)))

    def tensors(self, memory: np.ndarray) -> tuple[np.ndarray, ...]:
        """The same as `[num_samples, *inner, width]`, as a model sees them."""
        return tuple(
            block.reshape(self.num_samples, *inner, block.shape[1])
            for block, inner in zip(self.blocks(memory), self.inner, strict=True)
        )

    def blocks_of(self, owner: int, memory: np.ndarray) -> dict[int, np.ndarray]:
        """Views of the blocks that `owner` pools, by feature, in a flat array that is laid out as this memory's
        `region(owner)`.
        """
        first = self.region(owner).start
        return {at: self._block(at, memory[self.starts[at] - first :]) for at in self.order if self.owners[at] == owner}

    def _block(self, feature: int, memory: np.ndarray) -> np.ndarray:
        """The block at the beginning of a piece of memory."""
        count, width = self.num_vectors(feature), self.widths[feature]
        return memory[: count * width].reshape(count, width)


def pooling_owners(placements: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Per table, the one host that holds all of its buckets, or -1."""
    return tuple(int(owners[0]) if (owners == owners[0]).all() else -1 for owners in placements)
