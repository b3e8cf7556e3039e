"""`Exchange`: what the ways of all hosts send each other, and `SingleHost`, where there is no other host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from podembed.embedding.lookup.activation_layout import Blocks
from podembed.embedding.lookup.prefetch import Split
from podembed.embedding.lookup.way import Way

Splits = Mapping[int, Split | None]
"""By host. Those that arrive from a host say which of the vectors that it sends are prefetched."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Agreement:
    """What all hosts said for one step.

    Attributes:
      frames: per way and host, for `Way.accept`.
      weight_sum: weight of the global batch.
      prefetches: bits of the ways on which any host could prefetch in the step before; the same on all hosts.
      levels: the least of all hosts, number by number.
    """

    frames: list[list[np.ndarray]]
    weight_sum: float
    prefetches: int
    levels: tuple[int, ...] = ()


class Exchange(Protocol):
    """Moves requests, vectors and gradients between hosts. All hosts make the same calls in the same order, each with
    the number of the step. Requests are one a way.
    """

    def ids(
        self, number: int, requests: Sequence[Any], *, weight: float, prefetches: int, levels: Sequence[int] = ()
    ) -> Agreement:
        """Sends each owner what is asked of it, with the weight of this host's samples and the ways on which it could
        prefetch in the step before.

        Args:
          levels: numbers of at least 0, of which all hosts use the least; as many on every host.
        """
        ...

    def begin_prefetch(self, way: Way, request: Any, number: int, activations: Blocks) -> None:
        """Starts to exchange the vectors of a way that the step under way does not touch; `finish_prefetch` ends it."""
        ...

    def finish_prefetch(self, way: Way, request: Any, activations: Blocks) -> Splits:
        """Waits for these vectors. Returns what the others found."""
        ...

    def begin_vectors(
        self, requests: Sequence[Any], number: int, activations: Blocks, *, arrived: Sequence[Splits]
    ) -> None:
        """Starts to exchange the vectors that are left; `finish` ends it.

        Args:
          arrived: what was prefetched, one a way.
        """
        ...

    def begin_gradients(self, requests: Sequence[Any], number: int, gradients: Blocks) -> None:
        """Starts to send the gradients of vectors to their owners; `finish` ends it."""
        ...

    def finish(self) -> None:
        """Waits for vectors or their gradients."""
        ...


class SingleHost:
    """The exchange of a host that has no other one to talk to. What it asks of itself, its ways know."""

    def ids(
        self, number: int, requests: Sequence[Any], *, weight: float, prefetches: int, levels: Sequence[int] = ()
    ) -> Agreement:
        nothing = [[np.empty(0, np.int64)] for _ in requests]
        return Agreement(frames=nothing, weight_sum=weight, prefetches=prefetches, levels=tuple(levels))

    def begin_prefetch(self, way: Way, request: Any, number: int, activations: Blocks) -> None:
        pass

    def finish_prefetch(self, way: Way, request: Any, activations: Blocks) -> Splits:
        return {}

    def begin_vectors(
        self, requests: Sequence[Any], number: int, activations: Blocks, *, arrived: Sequence[Splits]
    ) -> None:
        pass

    def begin_gradients(self, requests: Sequence[Any], number: int, gradients: Blocks) -> None:
        pass

    def finish(self) -> None:
        pass
