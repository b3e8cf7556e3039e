"""`LookupSteps`: the way of one batch from ids to activations, and of its gradients to updated rows, on one host.

`Trainer` and `TPUEmbedding` both go this way, on one host and on many. All hosts make the same calls in the same order,
since most of them exchange something. Where activations lie is the caller's business, and so is what runs beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks
from podembed.embedding.lookup.exchange import Exchange, Splits
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.lookup.prefetch import Part
from podembed.embedding.lookup.way import LookupPhase
from podembed.embedding.ragged import Ragged


@dataclass(slots=True, kw_only=True, eq=False)
class LookupStep:
    """A batch on its way.

    Attributes:
      bags: the batch, by feature.
      requests: one a way.
      layout: layout of this host's activations.
      number: number of its exchanges; the same on all hosts.
      weight_sum: weight of the global batch.
      tries_prefetch: bits of the ways on which any host would prefetch; the same on all hosts.
      levels: levels that all hosts agreed on.
      is_grouped: whether the owners know where its gradients will lie.
      arrived: per way and host, what that host sent ahead of the update of the step before.
    """

    bags: Mapping[str, Ragged]
    requests: tuple[Any, ...]
    layout: ActivationLayout
    arrived: list[Splits]
    number: int = 0
    weight_sum: float = 0.0
    tries_prefetch: int = 0
    levels: tuple[int, ...] = ()
    is_grouped: bool = False


class LookupSteps:
    """The lookups and updates of one host. Mutated: the tables.

    Args:
      exchange: exchange with the other hosts.
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
        self._ways, self._exchange, self._phase = lookups.ways, exchange, phase
        self._prefetches = every_way(len(self._ways))

    def take_rows_asked(self) -> tuple[int, ...]:
        """Per table, rows that all hosts asked of this one since the last call."""
        return tuple(np.sum([way.take_rows_asked() for way in self._ways], axis=0).tolist())

    def find(
        self,
        bags: Mapping[str, Ragged],
        *,
        buffer: int = 0,
        layout: ActivationLayout | None = None,
        is_in_place: bool = True,
    ) -> LookupStep:
        """Finds what a batch asks of which host; arguments as of `Way.request`.

        Raises:
          ValueError: an id lies outside its table.
        """
        requests = tuple(way.request(bags, buffer=buffer, layout=layout, is_in_place=is_in_place) for way in self._ways)
        nothing: list[Splits] = [{} for _ in requests]
        return LookupStep(bags=bags, requests=requests, layout=layout or self.lookups.layout, arrived=nothing)

    def ask(
        self,
        step: LookupStep,
        number: int,
        *,
        training_step: int | None,
        weight: float = 0.0,
        gradients: Blocks | None = None,
        wants_prefetch: bool = True,
        levels: Sequence[int] = (),
    ) -> None:
        """Tells the owners which rows are wanted, and takes what the others want.

        Args:
          weight: weight of this host's samples.
          gradients: where those of this host's activations will lie, if that is known already; then owners prepare
            their update now.
          wants_prefetch: whether this host wants a `prefetch` of this step, if anything can be prefetched.
          levels: as `Exchange.ids`.
          training_step: the step of training that it is, counted from 0, in which keys may get a row; None where
            nothing is trained. The same on all hosts.
        """
        prefetches = self._prefetches if wants_prefetch else 0
        with self._phase(LookupPhase.ID_EXCHANGE):
            agreed = self._exchange.ids(number, step.requests, weight=weight, prefetches=prefetches, levels=levels)
            for way, request, frames in zip(self._ways, step.requests, agreed.frames, strict=True):
                way.accept(request, frames, training_step=training_step)
        step.number, step.weight_sum, step.tries_prefetch = number, agreed.weight_sum, agreed.prefetches
        step.levels = agreed.levels
        if gradients is not None:
            self._group(step, gradients)

    def lay_out(self, step: LookupStep, bags: Mapping[str, Ragged]) -> None:
        """Gives positions of sequences other places, as the hosts have agreed on."""
        step.bags = bags
        for way, request in zip(self._ways, step.requests, strict=True):
            way.lay_out(request, bags)

    def _group(self, step: LookupStep, gradients: Blocks) -> None:
        with self._phase(LookupPhase.GROUP):
            for way, request in zip(self._ways, step.requests, strict=True):
                way.group(request, gradients)
        step.is_grouped = True

    def prefetch(self, step: LookupStep, previous: LookupStep, activations: Blocks) -> None:
        """The part of `forward` that no gradient of `previous`, a step under way, will change. Both must be grouped."""
        found = 0
        for at, (way, request) in enumerate(zip(self._ways, step.requests, strict=True)):
            if not step.tries_prefetch >> at & 1 or not way.is_used:
                continue
            with self._phase(LookupPhase.SPLIT):
                way.split(request, previous.requests[at])
            with self._phase(way.prefetch_phase):
                way.gather(request, activations, Part.PREFETCHED)
                self._exchange.begin_prefetch(way, request, step.number, activations)
                way.gather_own(request, activations, Part.PREFETCHED)
            with self._phase(LookupPhase.PREFETCH_EXCHANGE):
                step.arrived[at] = self._exchange.finish_prefetch(way, request, activations)
            found |= any(request.splits) << at
        if step.tries_prefetch:
            self._prefetches = found

    def forward(self, step: LookupStep, activations: Blocks, *, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Fills the activations; what was prefetched is done.

        Args:
          meanwhile: called while vectors travel.
        """
        pairs = list(zip(self._ways, step.requests, strict=True))
        for way, request in pairs:
            with self._phase(way.gather_phase):
                way.gather(request, activations)
        with self._phase(LookupPhase.ACTIVATION_EXCHANGE):
            self._exchange.begin_vectors(step.requests, step.number, activations, arrived=step.arrived)
        # What needs no other host is done while vectors travel.
        with self._phase(LookupPhase.POOL):
            for way, request in pairs:
                way.gather_own(request, activations)
            meanwhile()
        with self._phase(LookupPhase.ACTIVATION_EXCHANGE):
            self._exchange.finish()
        with self._phase(LookupPhase.POOL):
            for way, request in pairs:
                way.finish(request, activations)

    def backward(self, step: LookupStep, gradients: Blocks, learning_rates: Sequence[float]) -> None:
        """Gradients of this host's samples to the owners of the rows, then one update of each touched row.

        Args:
          learning_rates: one for each table.
        """
        if not step.is_grouped:
            self._group(step, gradients)
        pairs = list(zip(self._ways, step.requests, strict=True))
        with self._phase(LookupPhase.GRADIENT_SUM):
            for way, request in pairs:
                way.sum_gradients(request, gradients)
        with self._phase(LookupPhase.GRADIENT_EXCHANGE):
            self._exchange.begin_gradients(step.requests, step.number, gradients)
            self._exchange.finish()
        with self._phase(LookupPhase.UPDATE):
            for way, request in pairs:
                way.update(request, gradients, learning_rates)


def every_way(num_ways: int) -> int:
    """The bits of all ways."""
    return (1 << num_ways) - 1
