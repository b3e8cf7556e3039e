"""`Way`: one way of looking up some features over all hosts, and of taking their gradients back to the rows.

`LookupSteps` and an `Exchange` loop over the ways of a host, and know no more of them than this. All hosts have the
same ways in the same order. A way owns the arrays of its path. It sends nothing: an exchange moves the bytes between
the calls below, and asks a way what goes where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks
from podembed.embedding.lookup.prefetch import Part
from podembed.embedding.ragged import Ragged


class LookupPhase(StrEnum):
    """What a host is doing for a step. The text is what users see."""

    ID_EXCHANGE = "id exchange"
    GROUP = "group"
    SPLIT = "split"
    PREFETCH_GATHER = "prefetch gather"
    PREFETCH_POOL = "prefetch pool"
    PREFETCH_EXCHANGE = "prefetch exchange"
    GATHER = "gather"
    POOL_FOR_OTHERS = "pool for others"
    POOL = "pool"
    ACTIVATION_EXCHANGE = "activation exchange"
    GRADIENT_SUM = "gradient sum"
    GRADIENT_EXCHANGE = "gradient exchange"
    UPDATE = "update"


class Way(Protocol):
    """See the module. A request is that of the same way: what one host asks of all in one step, and what all ask of it.
    The update uses it up. Its `splits` say per host which vectors go before the update of the step under way, or None;
    `split` fills them.

    Attributes:
      gather_phase, prefetch_phase: what an owner does for the vectors of a step, and for those that it sends ahead.
    """

    gather_phase: LookupPhase
    prefetch_phase: LookupPhase

    @property
    def is_used(self) -> bool:
        """Whether any feature takes this way; the same on all hosts."""
        ...

    # ------------------------------------------------------------------ requests

    def request(
        self, bags: Mapping[str, Ragged], *, buffer: int, layout: ActivationLayout | None, is_in_place: bool
    ) -> Any:
        """Finds what a batch asks of which host. Touches no table.

        Args:
          buffer: which of each host's memories its activations will lie in.
          layout: layout of these activations, where it is not the usual one.
          is_in_place: whether other hosts may work in that memory.

        Raises:
          ValueError: an id lies outside its table.
        """
        ...

    def lay_out(self, request: Any, bags: Mapping[str, Ragged]) -> None:
        """Takes the bags of the request with other places for their positions, as the hosts have agreed on."""
        ...

    def words(self, request: Any, host: int) -> list[np.ndarray]:
        """What a host is asked: int64 arrays, to be sent one after another."""
        ...

    def accept(self, request: Any, frames: Sequence[np.ndarray], *, training_step: int | None = None) -> None:
        """Takes what every host asks of this one, and finds the rows.

        Args:
          frames: per host, the `words` of its request for this host as one array; the own one may be anything.
          training_step: number of the step; None where nothing is trained.

        Raises:
          ValueError: a frame is not one, or has keys of buckets that are not held here.
        """
        ...

    def take_rows_asked(self) -> np.ndarray:
        """Per table, rows that all hosts asked of this one since the last call: int64 `[num_tables]`."""
        ...

    # ------------------------------------------------------------------ from rows to activations

    def group(self, request: Any, gradients: Blocks) -> None:
        """Prepares the update, once it is known where the gradients of this host's activations will lie."""
        ...

    def split(self, request: Any, previous: Any) -> None:
        """Finds which vectors no gradient of `previous`, the step under way, will change."""
        ...

    def gather(self, request: Any, activations: Blocks, part: Part = Part.REST) -> None:
        """Reads the rows of what goes to other hosts; for a host without a split, all of it is the rest."""
        ...

    def gather_own(self, request: Any, activations: Blocks, part: Part = Part.REST) -> None:
        """The same for what this host asked of itself, while vectors travel."""
        ...

    def finish(self, request: Any, activations: Blocks) -> None:
        """Fills the activations, once all vectors are there."""
        ...

    # ------------------------------------------------------------------ from gradients to rows

    def sum_gradients(self, request: Any, gradients: Blocks) -> None:
        """Makes what goes to the owners of the gradients of this host's activations."""
        ...

    def update(self, request: Any, gradients: Blocks, learning_rates: Sequence[float]) -> None:
        """Adds the gradients of all hosts, in host order, and updates each touched row once.

        Args:
          learning_rates: one for each table of the job.
        """
        ...

    # ------------------------------------------------------------------ what an exchange moves

    def receivers(self, request: Any) -> Sequence[int]:
        """Hosts that get vectors of this one, and send their gradients back; this one may be among them."""
        ...

    def senders(self, request: Any) -> Sequence[int]:
        """Hosts from which vectors come; those whose `receivers` name this one."""
        ...

    def outgoing(self, request: Any, host: int) -> list[np.ndarray]:
        """Vectors for a host: the rest, where some were prefetched. Nothing where they lie in memory of that host."""
        ...

    def arriving(self, request: Any, host: int, activations: Blocks, *, is_split: bool) -> list[np.ndarray]:
        """Where vectors of a host belong, in the order of its `outgoing`.

        Args:
          is_split: whether some of them are prefetched. Then blocks `[n, width]`, as a `Split` counts them.
        """
        ...

    def outgoing_gradients(self, request: Any, host: int, gradients: Blocks) -> list[np.ndarray]:
        """Gradients of vectors that came from a host."""
        ...

    def arriving_gradients(self, request: Any, host: int) -> list[np.ndarray]:
        """Where gradients of a host belong, in the order of its `outgoing_gradients`."""
        ...

    def prefetch_partners(self) -> Sequence[int]:
        """Other hosts that share no memory with this one."""
        ...

    def prefetched(self, request: Any, host: int) -> list[np.ndarray]:
        """Blocks `[n, width]` of all vectors for a host, of which `splits` says what goes ahead."""
        ...
