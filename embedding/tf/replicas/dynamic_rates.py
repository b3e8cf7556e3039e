"""`DynamicRates`: the learning rates of an embedding that are callables. The driver alone calls them.

A function that a strategy runs travels to its replicas with a copy of all that it refers to. A copied callable would
read copied variables and count calls of its own, and so each replica would train with another rate. What travels
instead asks the driver, by `ReplicaContext.ask_driver`: every replica gets the one answer to the one question.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.optimizers import learning_rate_at
from podembed.embedding.tf.replicas.replica_context import get_replica_context

# Of this process, by key, as long as their embeddings live.
_here: weakref.WeakValueDictionary[str, DynamicRates] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesQuestion:
    """What a replica asks before it applies gradients. All replicas must ask the same.

    Attributes:
      key: key of the `DynamicRates` whose callables the driver shall call; empty where the rates are given.
      step: number of the step, from 0.
      given: one rate a tag, to be compared with those of the other replicas.
    """

    key: str = ""
    step: int = 0
    given: tuple[float, ...] = ()


class DynamicRates:
    """The callables of an embedding's tags. Never changes.

    Args:
      callables: the rate of tag t at position t.
    """

    def __init__(self, callables: Sequence[Callable[..., Any]]) -> None:
        self._callables = tuple(callables)
        self._key = secrets.token_hex(8)
        _here[self._key] = self

    def at(self, step: int) -> list[float]:
        """One rate a tag, in float32, each from one call.

        Raises:
          TypeError, ValueError: as `learning_rate_at`.
        """
        return [float(np.float32(learning_rate_at(rate, step))) for rate in self._callables]

    def __reduce__(self) -> tuple[Any, ...]:
        return RatesOfDriver, (self._key,)


class RatesOfDriver:
    """`DynamicRates` as a replica knows them."""

    def __init__(self, key: str) -> None:
        self._key = key

    def at(self, step: int) -> list[float]:
        """As `DynamicRates.at`, from the driver.

        Raises:
          RuntimeError: called by no replica of a strategy over hosts, or the driver's embedding is gone.
        """
        return agreed(RatesQuestion(key=self._key, step=step))


def agreed(question: RatesQuestion) -> list[float]:
    """The driver's answer to the question of a replica, where there is a driver to ask.

    Raises:
      ValueError: the replicas gave different rates.
      RuntimeError: see the message.
    """
    context = get_replica_context()
    if context is None or context.ask_driver is None:
        return rates_of(question)
    return list(context.ask_driver(question))


def rates_of(question: RatesQuestion) -> list[float]:
    """What the driver answers. Raises what a callable raised, or RuntimeError where the embedding is gone."""
    if not question.key:
        return list(question.given)
    found = _here.get(question.key)
    if found is None:
        raise RuntimeError(
            "Found learning rates of a TPUEmbedding that this process does not hold. Expected the object on the driver "
            "to live as long as its copies train, since its rates are called there. Keep a reference to it."
        )
    return found.at(question.step)
