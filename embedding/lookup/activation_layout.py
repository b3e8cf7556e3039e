"""`ActivationLayout`: where the activations of each feature lie in one piece of memory, and their gradients in another.

A feature is a block of vectors `[num_samples * positions, width]`, sample after sample. Where features differ in their
number of vectors, the layout says how many each has.

Features whose table lies whole on one host are pooled there. The blocks of one owner follow each other. So what this
owner sends is one contiguous region, and so are the gradients that go back to it. The network reads and writes both in
place. All other features come last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

BLOCK_ALIGNMENT_BYTES = 64  # a cache line; what XLA asks of memory that it uses in place
_FLOAT_BYTES = 4
_PADDING = np.zeros(BLOCK_ALIGNMENT_BYTES // _FLOAT_BYTES, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationLayout:
    """Blocks of float32 in one memory.

    Attributes:
      num_samples: the host's share of a batch with its padding.
      widths: columns of each feature's block, in the features' order.
      owners: per feature, the host that pools it, or -1 where the rows come here and are pooled on the spot.
      inner: per feature, the axes between samples and width: `(length,)` of a sequence; empty for one vector a sample.
        Left out, no feature has any.
      vectors: per feature, rows of its block. Left out, one for each sample and position.
      order: the features as they lie in memory: by owner, those without one last, otherwise in their own order.
      block_floats: length of each block with its padding up to a cache line, in the features' order.
      starts: where each feature's block begins, in floats, in the features' order.
    """

    num_samples: int
    widths: tuple[int, ...]
    owners: tuple[int, ...]
    inner: tuple[tuple[int, ...], ...] = ()
    vectors: tuple[int, ...] = ()
    order: tuple[int, ...] = field(init=False)
    block_floats: tuple[int, ...] = field(init=False)
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        line = BLOCK_ALIGNMENT_BYTES // _FLOAT_BYTES
        if not self.inner:
            object.__setattr__(self, "inner", ((),) * len(self.widths))
        if not self.vectors:
            object.__setattr__(self, "vectors", tuple(self.num_samples * math.prod(inner) for inner in self.inner))
        lengths = tuple(
            -(-count * width // line) * line for count, width in zip(self.vectors, self.widths, strict=True)
        )
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

    def with_vectors(self, counts: Mapping[int, int] | Sequence[int]) -> ActivationLayout:
        """The layout of a batch with other numbers of vectors: one a feature, or by feature, where others have none."""
        by_feature = counts if isinstance(counts, Mapping) else dict(enumerate(counts))
        vectors = tuple(by_feature.get(at, 0) for at in range(len(self.widths)))
        return self if vectors == self.vectors else replace(self, vectors=vectors)

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

    def frame(self, owner: int, blocks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What `region(owner)` of a memory would hold, as pieces to be sent one after another. They are the blocks of
        this owner, each followed by its padding.
        """
        pieces: list[np.ndarray] = []
        for at in self.order:
            if self.owners[at] == owner:
                pieces += [blocks[at], _PADDING[: self.block_floats[at] - blocks[at].size]]
        return [piece for piece in pieces if piece.size]

    def _block(self, feature: int, memory: np.ndarray) -> np.ndarray:
        """The block at the beginning of a piece of memory."""
        count, width = self.vectors[feature], self.widths[feature]
        return memory[: count * width].reshape(count, width)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The activations of a batch, or their gradients.

    Attributes:
      arrays: per feature float32 `[vectors, width]`, columns side by side.
      memory: float32 in which they lie as the layout says; None where each lies by itself.
    """

    layout: ActivationLayout
    arrays: Sequence[np.ndarray]
    memory: np.ndarray | None = None

    @staticmethod
    def of(layout: ActivationLayout, memory: np.ndarray) -> Blocks:
        """Views of a flat memory of `layout.num_floats`."""
        return Blocks(layout, layout.blocks(memory), memory)

    def region(self, owner: int) -> np.ndarray:
        """The part of the memory that a host pools, to be filled.

        Raises:
          RuntimeError: the arrays lie apart.
        """
        if self.memory is None:
            raise RuntimeError("Found arrays that lie apart. Expected one memory to receive into. Use Blocks.of.")
        return self.memory[self.layout.region(owner)]

    def frame(self, owner: int) -> list[np.ndarray]:
        """The same to be sent, in one piece or several."""
        return self.layout.frame(owner, self.arrays) if self.memory is None else [self.region(owner)]

    def of_owner(self, owner: int) -> list[np.ndarray]:
        """The blocks that a host pools, in the order in which they lie."""
        return [self.arrays[at] for at in self.layout.order if self.layout.owners[at] == owner]


def pooling_owners(placements: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Per table, the one host that holds all of its buckets, or -1."""
    return tuple(int(owners[0]) if (owners == owners[0]).all() else -1 for owners in placements)
