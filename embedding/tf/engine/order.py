"""`StepOrder`: which of enqueue, dequeue and apply_gradients may come when, and in which order tables are read and
updated.

Forward runs inside `enqueue`. Without pipelining one batch is in flight and its update runs inside `apply`. With
pipelining forward N + 1 runs before update N, so activations miss exactly the newest update. The gradients of step N
wait here until then, or until `drain`. What would wait for ever on an accelerator is refused at once. Mutable, for one
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

Batch = TypeVar("Batch")
Prepared = TypeVar("Prepared")


ANY_NAME = "\0any"
"""Given for a name by a call that belongs to the batch in turn, whatever that one was enqueued as."""


class OrderError(RuntimeError):
    """A call that could never be answered where it came."""


@dataclass(slots=True, eq=False)
class _Flight(Generic[Prepared]):
    """One enqueued batch. It leaves when its activations were taken and, in training, its gradients were applied.

    Attributes:
      activations: one array per feature, None once dequeued.
      shapes: shapes of the activations, and so of the gradients.
    """

    name: str | None
    is_training: bool
    prepared: Prepared
    activations: list[np.ndarray] | None
    shapes: list[tuple[int, ...]]
    is_applied: bool = False

    @property
    def is_done(self) -> bool:
        return self.activations is None and (self.is_applied or not self.is_training)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[Prepared]):
    """Gradients whose update comes after the next forward."""

    prepared: Prepared
    gradients: Sequence[np.ndarray]
    learning_rates: Sequence[float]


class StepOrder(Generic[Batch, Prepared]):
    """The batches in flight of one engine.

    Args:
      forward: looks a batch up; returns what the backward pass needs, and the activations.
      backward: updates the tables from gradients and one learning rate a table.
      is_pipelined: one step of staleness.
    """

    def __init__(
        self,
        forward: Callable[[Batch], tuple[Prepared, list[np.ndarray]]],
        backward: Callable[[Prepared, Sequence[np.ndarray], Sequence[float]], None],
        *,
        is_pipelined: bool,
    ) -> None:
        self._forward = forward
        self._backward = backward
        self._is_pipelined = is_pipelined
        self._flights: list[_Flight[Prepared]] = []
        self._waiting: _Waiting[Prepared] | None = None
        # Of the last batch that left: whether it was one of training, and itself if its name may still turn it into
        # one.
        self._last_was_training = True
        self._last_tagged: _Flight[Prepared] | None = None
        self.num_applied = 0

    @property
    def has_room(self) -> bool:
        """Whether another batch would be accepted now."""
        return len(self._flights) < (2 if self._is_pipelined else 1)

    def enqueue(self, features: Batch, *, is_training: bool, name: str | None) -> None:
        """Looks a batch up and keeps its activations for `dequeue`.

        Raises:
          OrderError: an earlier batch still waits for its dequeue or its gradients.
        """
        self._retire_unapplied_tagged()
        if not self.has_room:
            raise self._full()
        if not is_training:
            # An evaluation sees what a checkpoint of this moment would hold.
            self.drain()
        prepared, activations = self._forward(features)
        if self._waiting is not None:
            self._apply_waiting()
        self._flights.append(_Flight(name, is_training, prepared, activations, [a.shape for a in activations]))

    def dequeue(self, name: str | None) -> list[np.ndarray]:
        """The activations of the oldest batch that has not been dequeued.

        Raises:
          OrderError: there is none, or it was enqueued under another name.
        """
        flight = next((f for f in self._flights if f.activations is not None), None)
        if flight is None or flight.activations is None:
            raise OrderError(
                "dequeue was called without an enqueued batch, which would wait for ever. Expected an enqueue before "
                "each dequeue. Call enqueue."
            )
        _require_name("dequeue", flight.name, name)
        activations, flight.activations = flight.activations, None
        self._clear()
        return activations

    def apply(
        self, gradients: Sequence[np.ndarray], learning_rates: Callable[[int], Sequence[float]], name: str | None
    ) -> Sequence[float]:
        """Updates the tables with the gradients of the oldest batch that has none yet, now or after the next forward.

        Args:
          learning_rates: step → one rate a table; called once all else is in order.

        Returns:
          The rates of this step.

        Raises:
          OrderError: no training batch waits for gradients, or it was enqueued under another name.
          ValueError: a gradient has another shape than its activations.
        """
        flight = self.require_unapplied(name)
        found = [gradient.shape for gradient in gradients]
        if found != flight.shapes:
            raise ValueError(
                f"Found gradients of shapes {found}. Expected {flight.shapes}, those of the activations. Pass one "
                "gradient per activation."
            )
        rates = learning_rates(self.num_applied)
        # Not before all that may raise: a batch of inference that got no gradients is out of the way of later ones.
        if flight is self._last_tagged:
            self._last_tagged = None
            self._flights.append(flight)
        is_followed = any(later.is_training for later in self._flights[self._flights.index(flight) + 1 :])
        if self._is_pipelined and not is_followed:
            self._waiting = _Waiting(flight.prepared, gradients, rates)
        else:
            self._backward(flight.prepared, gradients, rates)
        flight.is_applied = flight.is_training = True
        self.num_applied += 1
        self._clear()
        return rates

    @property
    def waiting(self) -> Prepared | None:
        """What the backward pass needs of the batch whose gradients wait for the next forward."""
        return None if self._waiting is None else self._waiting.prepared

    @property
    def next_unapplied(self) -> Prepared | None:
        """What the backward pass needs of the batch that the next gradients belong to; None if no training batch
        waits for any.
        """
        return next((f.prepared for f in self._flights if f.is_training and not f.is_applied), None)

    def sizes_to_update(self, name: str | None) -> list[int]:
        """Per feature, the vectors of the batch that gradients with this name belong to; empty if `apply` would refuse
        them. Without a name they stay the same until that batch is updated or discarded.
        """
        flight = self._unapplied(name)
        if flight is None or name not in (flight.name, ANY_NAME):
            return []
        return [shape[0] for shape in flight.shapes]

    def require_unapplied(self, name: str | None) -> _Flight[Prepared]:
        """The batch that the next gradients belong to. It stays where it is.

        Raises:
          OrderError: as `apply`.
        """
        flight = self._unapplied(name)
        if flight is None:
            raise self._nothing_to_apply()
        _require_name("apply_gradients", flight.name, name)
        return flight

    def _unapplied(self, name: str | None) -> _Flight[Prepared] | None:
        flight = next((f for f in self._flights if f.is_training and not f.is_applied), None)
        if flight is not None or name in (None, ANY_NAME):
            return flight
        # With a name, gradients make a batch one of training, also one enqueued for inference and already dequeued.
        last = [] if self._last_tagged is None else [self._last_tagged]
        return next((f for f in [*self._flights, *last] if f.name == name and not f.is_applied), None)

    def require_none_in_flight(self, method: str) -> None:
        """Before the tables are replaced: gradients of their old rows must not reach the new ones.

        Raises:
          OrderError: a batch still waits for its dequeue or its gradients.
        """
        self._retire_unapplied_tagged()
        if self._flights:
            missing, count = self._missing(), _batches(len(self._flights))
            raise OrderError(
                f"{method} was called while {count} in flight, the oldest waiting for {missing}; its gradients belong "
                f"to the rows of before. Expected {missing} first. Call it, or discard() a batch that shall not be "
                "finished."
            )
        self._last_tagged = None

    def discard(self) -> None:
        """Forgets all batches in flight, as after an error in the middle of a step. Gradients given already still
        count.
        """
        self._flights, self._last_tagged, self._last_was_training = [], None, True

    def drain(self) -> None:
        """Applies gradients that wait for the next forward; then the tables hold every update."""
        if self._waiting is not None:
            self._apply_waiting()

    def _apply_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._backward(waiting.prepared, waiting.gradients, waiting.learning_rates)

    def _retire_unapplied_tagged(self) -> None:
        """With a name, a batch that was dequeued and got no gradients turns out to have been one of inference."""
        for flight in self._flights:
            if flight.name is not None and flight.activations is None:
                flight.is_training = False
        self._clear()

    def _clear(self) -> None:
        for flight in self._flights:
            if flight.is_done:
                self._last_was_training = flight.is_training
                self._last_tagged = flight if flight.name is not None and not flight.is_applied else None
        self._flights = [flight for flight in self._flights if not flight.is_done]

    def _missing(self) -> str:
        return "dequeue" if self._flights[0].activations is not None else "apply_gradients"

    def _full(self) -> OrderError:
        missing, count = self._missing(), _batches(len(self._flights), "earlier ")
        return OrderError(
            f"enqueue was called while {count} in flight, the oldest waiting for {missing}; "
            f"this would wait for ever. Expected {missing} first. Call it, enqueue with "
            "training=False where no gradients follow, or discard() a batch that shall not be finished."
        )

    def _nothing_to_apply(self) -> OrderError:
        was_training = self._flights[-1].is_training if self._flights else self._last_was_training
        if not was_training:
            return OrderError(
                "apply_gradients was called after a batch that was enqueued with training=False, which would wait for "
                "ever. Expected training=True. Enqueue the batch for training, or leave apply_gradients out."
            )
        return OrderError(
            "apply_gradients was called without an enqueued training batch, which would wait for ever. Expected "
            "enqueue(..., training=True) before each apply_gradients. Call enqueue."
        )


def _batches(count: int, which: str = "") -> str:
    return f"{count} {which}{'batch is' if count == 1 else 'batches are'}"


def _require_name(method: str, enqueued: str | None, given: str | None) -> None:
    if given not in (enqueued, ANY_NAME):
        raise OrderError(
            f"{method} was called with name={given!r} while the batch in turn was enqueued with name={enqueued!r}. "
            "Expected one name for the enqueue, dequeue and apply_gradients of a batch. Pass the same."
        )
