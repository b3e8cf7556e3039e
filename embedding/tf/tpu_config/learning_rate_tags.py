"""Dynamic learning rates by number: which table reads which of the rates that come with the gradients.

A table whose optimizer has a number as learning rate has no tag. One with a callable has the tag of that callable.
Callables are numbered from 0 in the order in which the tables first use them, and equal callables are one tag. A
serialized configuration carries the tags; the rates themselves arrive with each step, one float32 per tag, and are not
in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import Optimizer


class LearningRateTags(NamedTuple):
    """The tag of each table, None for a constant rate, and the callable of each tag."""

    tags: tuple[int | None, ...]
    callables: tuple[Callable[..., Any], ...]


class TaggedLearningRate:
    """Stands for the rate of one tag: called, it gives the rate last set, which is how a step passes its rates to the
    tables.

    Mutable. Tables with the same tag hold the same object.
    """

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self._rate: float | None = None

    def set(self, rate: float | np.floating) -> None:
        """Makes `rate` the value of this tag until the next call."""
        self._rate = float(rate)

    def __call__(self) -> float:
        """Returns the rate last set.

        Raises:
          ValueError: none was set yet.
        """
        if self._rate is None:
            raise ValueError(
                f"Found no rate for tag {self.tag}. Expected the rate of the step to be set before it is read. "
                "Pass one learning rate per tag with the gradients."
            )
        return self._rate

    def __repr__(self) -> str:
        return f"TaggedLearningRate(tag={self.tag}, rate={self._rate})"


def learning_rate_tags(tables: Iterable[TableConfig], *, optimizer: Optimizer | None = None) -> LearningRateTags:
    """Numbers the callable learning rates of `tables` in the order of first use.

    Args:
      tables: in the order of the configuration.
      optimizer: optimizer of the tables that have none of their own.

    Raises:
      ValueError: an optimizer is none of ours.
    """
    numbers: dict[Callable[..., Any], int] = {}
    tags: list[int | None] = []
    for table in tables:
        chosen = optimizer if table.optimizer is None else table.optimizer
        if chosen is not None and not isinstance(chosen, Optimizer):
            raise ValueError(
                f"Table '{table.name}': {chosen!r} is an unsupported optimizer class. Expected one of "
                "podembed.embedding. Pass SGD, Adagrad, AdagradMomentum, FTRL or Adam."
            )
        rate = None if chosen is None else chosen.learning_rate
        tags.append(numbers.setdefault(rate, len(numbers)) if callable(rate) else None)
    return LearningRateTags(tuple(tags), tuple(numbers))


def tag_of(parameters: Any) -> int | None:
    """The tag in an `OptimizationParameters` message, None for a constant or missing rate."""
    rate = parameters.learning_rate
    return rate.dynamic.tag if rate.WhichOneof("learning_rate") == "dynamic" else None


def number_of_tags(message: Any) -> int:
    """Returns how many rates a step must bring for this configuration.

    Raises:
      ValueError: a tag is negative or left out, or there are more tags than tables.
    """
    used: dict[int, str] = {}
    for table in message.table_descriptor:
        parameters = table.optimization_parameters
        tags = [tag_of(parameters)]
        if parameters.frequency_aware_adagrad.HasField("step_counter"):
            # The step counter of this optimizer is numbered together with the learning rates.
            tags.append(parameters.frequency_aware_adagrad.step_counter.tag)
        used.update((tag, table.name) for tag in tags if tag is not None and tag not in used)
    for tag, table_name in used.items():
        if tag < 0:
            raise ValueError(
                f"Found tag {tag} in table '{table_name}'. Expected tags from 0 on. Number the rates from 0."
            )
    left_out = next((tag for tag in range(len(used)) if tag not in used), None)
    if left_out is not None:
        raise ValueError(
            f"Found tags {sorted(used)} without tag {left_out}. Expected every tag from 0 to {len(used) - 1}. "
            f"Give tag {left_out} to the table '{used[max(used)]}' that has tag {max(used)}."
        )
    if len(used) > len(message.table_descriptor):
        raise ValueError(
            f"Found {len(used)} tags for {len(message.table_descriptor)} tables, tag {max(used)} being one too many. "
            "Expected at most as many tags as tables. Let inputs that are equal share a tag."
        )
    return len(used)


def check_learning_rates(message: Any, learning_rates: Sequence[Any] | np.ndarray) -> tuple[np.float32, ...]:
    """Returns the rates that came with a step as float32, the rate of tag t at position t.

    Args:
      message: the `TPUEmbeddingConfiguration` of the tables.
      learning_rates: Python numbers or float32 scalars of numpy or JAX; empty if every rate is constant.

    Raises:
      ValueError: the tags of the message are not 0..n-1, there are more or fewer rates than tags, or a rate is no
        float32 scalar.
    """
    expected = number_of_tags(message)
    found = len(learning_rates)
    if found < expected:
        tables = [table.name for table in message.table_descriptor if tag_of(table.optimization_parameters) == found]
        raise ValueError(
            f"Found {found} learning rates, so none for tag {found} of "
            f"{' and '.join(map(repr, tables)) or 'a step counter'}. "
            f"Expected {expected}, one per tag. Pass the rate of tag {found} at position {found}."
        )
    if found > expected:
        raise ValueError(
            f"Found {found} learning rates, but no table has tag {expected}. Expected {expected}, one per tag. "
            f"Pass {'none' if expected == 0 else f'only the first {expected}'}."
        )
    return tuple(_scalar(tag, rate) for tag, rate in enumerate(learning_rates))


def _scalar(tag: int, rate: Any) -> np.float32:
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool | np.floating)
    dtype, shape = getattr(rate, "dtype", None), getattr(rate, "shape", None)
    if not is_number and (dtype != np.float32 or shape != ()):
        kind = f"{dtype} of shape {shape}" if dtype is not None else repr(rate)
        raise ValueError(
            f"Found {kind} as learning rate of tag {tag}. Expected a float32 scalar. Pass np.float32(rate)."
        )
    return np.float32(rate)
