"""`LookupSteps`: the way of one batch from ids to activations, and of its gradients to updated rows, on one host.

`Trainer` and `TPUEmbedding` both go this way, on one host and on many. All hosts make the same calls in the same order,
since most of them exchange something. Where activations lie is the caller's business, and so is what runs beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks
from podembed.embedding.lookup.exchange import Exchange, Prefetched, Splits
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.lookup.pooled_frames import PooledRequest
from podembed.embedding.lookup.prefetch import Part
from podembed.embedding.lookup.streams import Prepared
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


@dataclass(slots=True, kw_only=True, eq=False)
class LookupStep:
    """A batch on its way.

    Attributes:
      number: of its exchanges; the same on all hosts.
      weight_sum: weight of the global batch.
      tries_prefetch: what any host would prefetch; the same on all hosts.
      levels: that all hosts agreed on.
      is_grouped: whether the owners know where its gradients will lie.
      prefetched_rows, prefetched_pooled: by host, what that host sent ahead of the update of the step before.
    """

    prepared: Prepared
    request: PooledRequest
    number: int = 0
    weight_sum: float = 0.0
    tries_prefetch: Prefetched = Prefetched.NONE
    levels: tuple[int, ...] = ()
    is_grouped: bool = False
    prefetched_rows: Splits = field(default_factory=dict)
    prefetched_pooled: Splits = field(default_factory=dict)

    @property
    def layout(self) -> ActivationLayout:
        """Of this host's activations."""
        return self.request.layout


class LookupSteps:
    """The lookups and updates of one host. Mutated: the tables.

    Args:
      exchange: with the other hosts.
      phase: entered for every part of the work.
    """

    def __init__(
        self,
        lookups: Lookups,
        exchange: Exchange,
        *,
        phase: Callable[[LookupPhase], AbstractContextManager[None]] = lambda phase: nullcontext(),
    ) -> None:
        self.lookups = lookups
        self._sharded, self._pooled, self._exchange, self._phase = lookups.sharded, lookups.pooled, exchange, phase
        self._prefetched = Prefetched.ROWS | Prefetched.POOLED
        self._rows_asked = np.zeros(len(lookups.specs), np.int64)

    def take_rows_asked(self) -> tuple[int, ...]:
        """Per table, rows that all hosts asked of this one since the last call."""
        taken = tuple(int(rows) for rows in self._rows_asked)
        self._rows_asked[:] = 0
        return taken

    def find(
        self,
        bags: Mapping[str, Ragged],
        *,
        buffer: int = 0,
        layout: ActivationLayout | None = None,
        is_in_place: bool = True,
    ) -> LookupStep:
        """Finds the rows of a batch's ids. Touches no table and no other host.

        Args:
          buffer: which of each host's memories its activations will lie in.
          layout: of these activations, where it is not the usual one.
          is_in_place: whether other hosts may work in that memory.

        Raises:
          ValueError: an id lies outside its table.
        """
        prepared = self._sharded.prepare(bags)
        request = self._pooled.request(bags, buffer=buffer, layout=layout)
        request.is_usual = request.is_usual and is_in_place
        return LookupStep(prepared=prepared, request=request)

    def ask(
        self,
        step: LookupStep,
        number: int,
        *,
        weight: float = 0.0,
        gradients: Blocks | None = None,
        wants_prefetch: bool = True,
        levels: Sequence[int] = (),
        is_training: bool = True,
    ) -> None:
        """Tells the owners which rows are wanted, and takes what the others want.

        Args:
          weight: of this host's samples.
          gradients: where those of this host's activations will lie, if that is known already; then owners prepare
            their update now.
          wants_prefetch: whether this host wants a `prefetch` of this step, if anything can be prefetched.
          levels: as `Exchange.ids`.
          is_training: whether keys of the step may get a row; the same on all hosts.
        """
        prefetched = self._prefetched if wants_prefetch else Prefetched.NONE
        with self._phase(LookupPhase.ID_EXCHANGE):
            asked = self._exchange.ids(
                number, step.prepared, step.request, weight=weight, prefetched=prefetched, levels=levels
            )
            training_step = number if is_training else None
            self._sharded.accept(step.prepared, asked.wanted, asked.wanted_counts, training_step=training_step)
            self._pooled.accept(step.request, asked.frames, asked.are_usual, training_step=training_step)
            self._rows_asked += self._sharded.rows_by_table(asked.wanted_counts)
        step.number, step.weight_sum, step.tries_prefetch = number, asked.weight_sum, asked.prefetched
        step.levels = asked.levels
        if gradients is not None:
            self._group(step, gradients)

    def _group(self, step: LookupStep, gradients: Blocks) -> None:
        with self._phase(LookupPhase.GROUP):
            self._pooled.group(step.request, gradients.arrays)
        step.is_grouped = True

    def prefetch(self, step: LookupStep, previous: LookupStep, activations: Blocks) -> None:
        """The part of `forward` that no gradient of `previous`, a step under way, will change. Both must be grouped."""
        found = Prefetched.NONE
        if Prefetched.ROWS in step.tries_prefetch and self._sharded.groups:
            with self._phase(LookupPhase.SPLIT):
                self._sharded.split(step.prepared, previous.prepared)
            with self._phase(LookupPhase.PREFETCH_GATHER):
                self._sharded.gather(step.prepared, Part.PREFETCHED)
            with self._phase(LookupPhase.PREFETCH_EXCHANGE):
                step.prefetched_rows = self._exchange.prefetch_rows(step.prepared, step.number)
            found |= Prefetched.ROWS if any(step.prepared.splits) else Prefetched.NONE
        if Prefetched.POOLED in step.tries_prefetch and self._pooled.is_used:
            with self._phase(LookupPhase.SPLIT):
                self._pooled.split(step.request, previous.request)
            with self._phase(LookupPhase.PREFETCH_POOL):
                self._pooled.pool_for_others(step.request, activations.arrays, Part.PREFETCHED)
                self._exchange.begin_prefetch_pooled(step.request, step.number, activations)
                self._pooled.pool_own(step.request, activations.arrays, Part.PREFETCHED)
            with self._phase(LookupPhase.PREFETCH_EXCHANGE):
                step.prefetched_pooled = self._exchange.finish_prefetch_pooled(activations)
            found |= Prefetched.POOLED if any(step.request.splits) else Prefetched.NONE
        if step.tries_prefetch:
            self._prefetched = found

    def forward(self, step: LookupStep, activations: Blocks, *, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Fills the activations, from rows that come here and from vectors pooled at their owners; what was prefetched
        is done.

        Args:
          meanwhile: called while vectors travel.
        """
        with self._phase(LookupPhase.GATHER):
            self._sharded.gather(step.prepared)
        with self._phase(LookupPhase.POOL_FOR_OTHERS):
            self._pooled.pool_for_others(step.request, activations.arrays)
        with self._phase(LookupPhase.ACTIVATION_EXCHANGE):
            self._exchange.begin_vectors(
                step.prepared,
                step.request,
                step.number,
                activations,
                arrived_rows=step.prefetched_rows,
                arrived_pooled=step.prefetched_pooled,
            )
        # What needs no other host is done while vectors travel.
        with self._phase(LookupPhase.POOL):
            self._pooled.pool_own(step.request, activations.arrays)
            meanwhile()
        with self._phase(LookupPhase.ACTIVATION_EXCHANGE):
            self._exchange.finish()
        with self._phase(LookupPhase.POOL):
            blocks = self.lookups.by_name(activations.arrays)
            self._sharded.pool(step.prepared, blocks)
            for feature in self._sharded.features:
                blocks[feature.name][step.prepared.features[feature.name].num_samples :] = 0.0
        with self._phase(LookupPhase.POOL):
            self._pooled.add_partial_sums(step.request, activations)

    def backward(self, step: LookupStep, gradients: Blocks, learning_rates: Sequence[float]) -> None:
        """Gradients of this host's samples to the owners of the rows, then one update of each touched row.

        Args:
          learning_rates: one a table.
        """
        if not step.is_grouped:
            self._group(step, gradients)
        with self._phase(LookupPhase.GRADIENT_SUM):
            self._sharded.sum_gradients(step.prepared, self.lookups.by_name(gradients.arrays))
        with self._phase(LookupPhase.GRADIENT_EXCHANGE):
            self._exchange.begin_gradients(step.prepared, step.request, step.number, gradients)
            self._exchange.finish()
        with self._phase(LookupPhase.UPDATE):
            self._sharded.update(step.prepared, learning_rates)
            self._pooled.update(step.request, gradients.arrays, learning_rates)
