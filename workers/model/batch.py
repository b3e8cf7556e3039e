"""What a model is given of a batch, and what it may return besides plain arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import DictKey

from podembed.embedding.features.activations import Activations
from podembed.workers.model.jagged import Jagged

_tree = jax.tree_util.register_dataclass


@jax.tree_util.register_pytree_with_keys_class
class OfNegatives(dict[str, Any]):
    """Arrays by feature that negatives must declare. A JAX pytree.

    Attributes:
      declaration: the argument of `Negatives`.
    """

    def __init__(self, declaration: str, arrays: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.declaration = declaration

    def __missing__(self, feature: str) -> Any:
        raise KeyError(
            f"Found no batch.{self.declaration}[{feature!r}]. Expected one of {list(self)}. Write "
            f"IdColumn(..., negatives=Negatives(..., {self.declaration}=True)) for the feature {feature!r} in the data."
        )

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """As JAX asks for it."""
        return [(DictKey(name), array) for name, array in self.items()], (self.declaration, *self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: Iterable[Any]) -> OfNegatives:
        """As JAX asks for it."""
        return cls(names[0], dict(zip(names[1:], arrays, strict=True)))


@_tree
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBatch:
    """One host's share of a batch, or one device's. A JAX pytree.

    Some rows are padding. They have weight 0, and their activations are zeros.

    Attributes:
      dense: float32 `[n, num_dense]`.
      activations: per feature `[n, width]`, or `[n, max_sequence_length, width]` of a sequence, in the order of the
        features.
      labels: by name of the column, float32 `[n]`; 0 where a label is missing.
      weights: float32 `[n]`, 0 on padding.
      label_masks: by name of the column, bool `[n]`: whether the sample counts and has the label.
      columns: extra columns by name, `[n, ...]`, as the data declares them; zeros on padding.
      lengths: by sequence feature or extra column of lists, int32 `[n]`, how many of its positions a sample has. The
        others are zeros. An id that its table drops leaves its position, as zeros, and counts.
      log_q: by feature whose negatives declare it, float32 `[n, c]`: the logarithm of the probability with which a draw
        for the sample gives each of its ids. It is that of the draws that are kept: none of the sample's own ids, and
        none that `without_positives_of` leaves out. An id that cannot be drawn, such as the positive one, has what it
        would have if it could be. 0 at positions without an id, and wherever nothing is trained.
      log_frequency: by feature whose negatives declare it, float32 `[n, c]`: the logarithm of the share of each id
        among those of the positive training samples. An id without any counts as one with one. 0 as in `log_q`.
      sequences: by sequence feature, the same without the room up to the maximum. What a model does with these costs
        as much as the sequences are long.
    """

    dense: jax.Array
    activations: Activations
    labels: Mapping[str, jax.Array]
    weights: jax.Array
    label_masks: Mapping[str, jax.Array] = field(default_factory=dict)
    lengths: Mapping[str, jax.Array] = field(default_factory=dict)
    columns: Mapping[str, jax.Array] = field(default_factory=dict)
    sequences: Mapping[str, Jagged] = field(default_factory=dict)
    log_q: Mapping[str, jax.Array] = field(default_factory=dict)
    log_frequency: Mapping[str, jax.Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("log_q", "log_frequency"):
            arrays = getattr(self, name)
            # JAX puts other things than arrays into its trees now and then.
            if isinstance(arrays, Mapping) and not isinstance(arrays, OfNegatives):
                object.__setattr__(self, name, OfNegatives(name, arrays))

    @property
    def label(self) -> jax.Array:
        """The one label, `[n]`.

        Raises:
          ValueError: there are several, or none.
        """
        if not self.labels:
            raise ValueError(
                "Found no label in the data, whose samples are all positive ones. Expected one, since the model reads "
                "batch.label. Write label='click' in the data."
            )
        if len(self.labels) != 1:
            raise ValueError(f"Found the labels {list(self.labels)}. Expected one. Name it: batch.labels['...'].")
        return next(iter(self.labels.values()))


@_tree
@dataclass(frozen=True, slots=True)
class WithState:
    """Parameters or outputs, with the state that a model keeps beside its parameters. A JAX pytree.

    The state is a pytree of arrays. Commits hold it, restores bring it back, and it is the same on all hosts.

    Attributes:
      value: parameters from `init`, outputs from `apply`.
      state: the state after that.
    """

    value: Any
    state: Any


@_tree
@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What a step minimizes: the mean of `per_sample` over the global batch, by the samples' weights, plus `batch`.

    Attributes:
      per_sample: `[n]`.
      batch: one number that is the same on every host, such as a penalty of the parameters, or a loss that was made of
        gathered arrays. It is not divided by anything.
    """

    per_sample: jax.Array | float = 0.0
    batch: jax.Array | float = field(default=0.0)
