"""`ActivationLayout`: where the activations of each feature lie in one piece of memory, and their gradients in another.

A feature is a block of vectors `[num_samples * positions, width]`, sample after sample. Where features differ in their
number of vectors, the layout says how many each has.

Features whose table lies whole on one host are pooled there. The blocks of one owner follow each other. So what this
owner sends is one contiguous region, and so are the gradients that go back to it. The network reads and writes both in
place.

Features of a table that is cut may be pooled by every host, each for the rows that it owns. Their blocks come next, as
one region that goes back to all hosts. Behind all blocks of the activations, each host has a *slot* of the size of that
region, for its partial sums. All other features come last among the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

BLOCK_ALIGNMENT_BYTES = 64  # a cache line; what XLA asks of memory that it uses in place
ROWS_TRAVEL = -1
EVERY_HOST = -2
"""In place of an owner: the rows come to the samples, or every host pools those that it owns."""

_FLOAT_BYTES = 4
_PADDING = np.zeros(BLOCK_ALIGNMENT_BYTES // _FLOAT_BYTES, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationLayout:
    """Blocks of float32 in one memory.

    Attributes:
      num_samples: the host's share of a batch with its padding.
      widths: columns of each feature's block, in the features' order.
      owners: per feature, the host that pools it, or `EVERY_HOST` where each host pools the rows that it owns. It is
        `ROWS_TRAVEL`, -1, where the rows come here and are pooled on the spot.
      inner: per feature, the axes between samples and width: `(length,)` of a sequence; empty for one vector a sample.
        Left out, no feature has any.
      vectors: per feature, rows of its block. Left out, one for each sample and position.
      num_hosts: number of hosts; used only where every host pools.
      order: the features as they lie in memory: by owner, then those of every host, then those whose rows travel;
        otherwise in their own order.
      block_floats: length of each block with its padding up to a cache line, in the features' order.
      starts: where each feature's block begins, in floats, in the features' order.
      partial: the floats of all features that every host pools.
    """

    num_samples: int
    widths: tuple[int, ...]
    owners: tuple[int, ...]
    inner: tuple[tuple[int, ...], ...] = ()
    vectors: tuple[int, ...] = ()
    num_hosts: int = 1
    order: tuple[int, ...] = field(init=False)
    block_floats: tuple[int, ...] = field(init=False)
    starts: tuple[int, ...] = field(init=False)
    partial: slice = field(init=False)

    def __post_init__(self) -> None:
        line = BLOCK_ALIGNMENT_BYTES // _FLOAT_BYTES
        if not self.inner:
            object.__setattr__(self, "inner", ((),) * len(self.widths))
        if not self.vectors:
            object.__setattr__(self, "vectors", tuple(self.num_samples * math.prod(inner) for inner in self.inner))
        lengths = tuple(
            -(-count * width // line) * line for count, width in zip(self.vectors, self.widths, strict=True)
        )
        ranks = {EVERY_HOST: 1, ROWS_TRAVEL: 2}
        order = sorted(range(len(self.widths)), key=lambda at: (ranks.get(self.owners[at], 0), self.owners[at], at))
        starts, first = [0] * len(order), 0
        for at in order:
            starts[at] = first
            first += lengths[at]
        # Derived once: every step asks for them.
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "block_floats", lengths)
        object.__setattr__(self, "starts", tuple(starts))
        object.__setattr__(self, "partial", self.region(EVERY_HOST))

    @property
    def num_floats(self) -> int:
        return sum(self.block_floats)

    @property
    def memory_floats(self) -> int:
        """Of the activations with the slots behind them."""
        return self.num_floats + self.num_hosts * (self.partial.stop - self.partial.start)

    def slot(self, owner: int) -> slice:
        """Where the partial sums of a host lie in the activations, laid out as `partial`."""
        length = self.partial.stop - self.partial.start
        first = self.num_floats + owner * length
        return slice(first, first + length)

    def floats_of(self, owner: int) -> int:
        """Of what a host pools: those of its own region and of a slot."""
        region = self.region(owner)
        return region.stop - region.start + self.partial.stop - self.partial.start

    def with_vectors(self, counts: Mapping[int, int] | Sequence[int]) -> ActivationLayout:
        """The layout of a batch with other numbers of vectors: one a feature, or by feature, where others have none."""
        by_feature = counts if isinstance(counts, Mapping) else dict(enumerate(counts))
        vectors = tuple(by_feature.get(at, 0) for at in range(len(self.widths)))
        return self if vectors == self.vectors else replace(self, vectors=vectors)

    @property
    def pooling_hosts(self) -> range | list[int]:
        """The hosts that pool any feature, rising."""
        if EVERY_HOST in self.owners:
            return range(self.num_hosts)
        return sorted({owner for owner in self.owners if owner != ROWS_TRAVEL})

    def region(self, owner: int) -> slice:
        """The floats of all features that a host pools alone."""
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
        """Views of the blocks that `owner` pools, by feature, in a flat array of `floats_of(owner)`: `region(owner)`,
        then what every host pools.
        """
        region = self.region(owner)
        length = region.stop - region.start
        return self.blocks_in(owner, memory[:length], memory[length:])

    def blocks_in(self, owner: int, alone: np.ndarray, partial: np.ndarray) -> dict[int, np.ndarray]:
        """The same in two flat arrays: `alone` is laid out as `region(owner)`, `partial` as the region of that name."""
        return self.blocks_at(owner, alone) | self.blocks_at(EVERY_HOST, partial)

    def blocks_at(self, owner: int, memory: np.ndarray) -> dict[int, np.ndarray]:
        """Views of the blocks of one region, by feature, in a flat array that is laid out as `region(owner)`."""
        first = self.region(owner).start
        return {at: self._block(at, memory[self.starts[at] - first :]) for at in self.order if self.owners[at] == owner}

    def frame(self, owner: int, blocks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What `region(owner)` and `partial` of a memory would hold, as pieces to be sent one after another. They are
        the blocks that this owner pools, each followed by its padding.
        """
        pieces: list[np.ndarray] = []
        for at in self.order:
            if self.owners[at] in (owner, EVERY_HOST):
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
        """Views of a flat memory of `layout.num_floats`; of `layout.memory_floats` for activations that every host
        pools.
        """
        return Blocks(layout, layout.blocks(memory), memory)

    def room(self, owner: int) -> list[np.ndarray]:
        """The parts of the activations that a host pools, to be filled: its region, and its slot of partial sums.

        Raises:
          RuntimeError: the arrays lie apart.
        """
        return [part for part in (self._memory[self.layout.region(owner)], self._slot(owner)) if part.size]

    def frame(self, owner: int) -> list[np.ndarray]:
        """The gradients of what a host pools, to be sent, in one piece or several."""
        if self.memory is None:
            return self.layout.frame(owner, self.arrays)
        parts = self.memory[self.layout.region(owner)], self.memory[self.layout.partial]
        return [part for part in parts if part.size]

    def of_owner(self, owner: int) -> list[np.ndarray]:
        """The blocks of activations that a host pools, in the order in which they lie; partial sums in its slot."""
        alone = [self.arrays[at] for at in self.layout.order if self.layout.owners[at] == owner]
        return [*alone, *self.partial_sums(owner).values()]

    def partial_sums(self, owner: int) -> dict[int, np.ndarray]:
        """The blocks in the slot of a host, by feature."""
        if self.layout.partial.start == self.layout.partial.stop:
            return {}
        return self.layout.blocks_at(EVERY_HOST, self._slot(owner))

    def _slot(self, owner: int) -> np.ndarray:
        return self._memory[self.layout.slot(owner)]

    @property
    def _memory(self) -> np.ndarray:
        if self.memory is None:
            raise RuntimeError("Found arrays that lie apart. Expected one memory to receive into. Use Blocks.of.")
        return self.memory


def pooling_owners(placements: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Per table, the one host that holds all of its buckets, or -1."""
    return tuple(int(owners[0]) if (owners == owners[0]).all() else -1 for owners in placements)
