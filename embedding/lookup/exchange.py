"""`Exchange`: what the lookups of all hosts send each other, and `Alone`, where there is no other host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Protocol

import numpy as np

from podembed.embedding.lookup.activation_layout import Blocks
from podembed.embedding.lookup.pooled_frames import PooledRequest
from podembed.embedding.lookup.prefetch import Split
from podembed.embedding.lookup.streams import Prepared

Splits = Mapping[int, Split | None]
"""By host. Those that arrive from a host say which of the vectors that it sends are prefetched."""


class Prefetched(IntFlag):
    """Kinds of vectors of which some were sent ahead of an update."""

    NONE = 0
    ROWS = 1
    POOLED = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What all hosts said for one step.

    Attributes:
      wanted, wanted_counts: for `ShardedLookup.accept`.
      frames, are_usual: per host, for `PooledLookup.accept`.
      weight_sum: weight of the global batch.
      prefetched: what any host could prefetch in the step before; the same on all hosts.
      levels: the least of all hosts, number by number.
    """

    wanted: list[np.ndarray]
    wanted_counts: np.ndarray
    frames: list[np.ndarray]
    are_usual: list[bool]
    weight_sum: float
    prefetched: Prefetched
    levels: tuple[int, ...] = ()


class Exchange(Protocol):
    """Moves ids, vectors and gradients between hosts. All hosts make the same calls in the same order, each with the
    number of the step.
    """

    def ids(
        self,
        number: int,
        prepared: Prepared,
        request: PooledRequest,
        *,
        weight: float,
        prefetched: Prefetched,
        levels: Sequence[int] = (),
    ) -> Asked:
        """Sends each owner what is asked of it, with the weight of this host's samples and what it could prefetch in
        the step before.

        Args:
          levels: numbers of at least 0, of which all hosts use the least; as many on every host.
        """
        ...

    def prefetch_rows(self, prepared: Prepared, number: int) -> Splits:
        """Exchanges the rows that the step under way does not touch. Returns what the others found."""
        ...

    def begin_prefetch_pooled(self, request: PooledRequest, number: int, activations: Blocks) -> None:
        """Starts to exchange the bags that the step under way does not touch; `finish_prefetch_pooled` ends it."""
        ...

    def finish_prefetch_pooled(self, activations: Blocks) -> Splits:
        """Waits for the bags. Returns what the others found."""
        ...

    def begin_vectors(
        self,
        prepared: Prepared,
        request: PooledRequest,
        number: int,
        activations: Blocks,
        *,
        arrived_rows: Splits,
        arrived_pooled: Splits,
    ) -> None:
        """Starts to exchange the rows and the bags that are left; `finish` ends it.

        Rows go from `served` into the other hosts' `rows`.

        Args:
          arrived_rows, arrived_pooled: what was prefetched.
        """
        ...

    def begin_gradients(self, prepared: Prepared, request: PooledRequest, number: int, gradients: Blocks) -> None:
        """Starts to send the gradients of rows and of pooled vectors to their owners; `finish` ends it.

        Those of rows go from `rows` into their owners' `served`.
        """
        ...

    def finish(self) -> None:
        """Waits for vectors or their gradients."""
        ...


class Alone:
    """The exchange of a single host: it has no other host to talk to."""

    def ids(
        self,
        number: int,
        prepared: Prepared,
        request: PooledRequest,
        *,
        weight: float,
        prefetched: Prefetched,
        levels: Sequence[int] = (),
    ) -> Asked:
        return Asked(
            wanted=list(prepared.asked),
            wanted_counts=prepared.asked_counts,
            frames=request.frames,
            are_usual=[request.is_usual],
            weight_sum=weight,
            prefetched=prefetched,
            levels=tuple(levels),
        )

    def prefetch_rows(self, prepared: Prepared, number: int) -> Splits:
        return {}

    def begin_prefetch_pooled(self, request: PooledRequest, number: int, activations: Blocks) -> None:
        pass

    def finish_prefetch_pooled(self, activations: Blocks) -> Splits:
        return {}

    def begin_vectors(
        self,
        prepared: Prepared,
        request: PooledRequest,
        number: int,
        activations: Blocks,
        *,
        arrived_rows: Splits,
        arrived_pooled: Splits,
    ) -> None:
        pass

    def begin_gradients(self, prepared: Prepared, request: PooledRequest, number: int, gradients: Blocks) -> None:
        pass

    def finish(self) -> None:
        pass
