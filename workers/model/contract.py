"""`Model`: what the dense half of a job is, and `ModelSpec`, what it gets to know before the first step.

Nothing of JAX is imported here, since the driver reads declarations too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from podembed.embedding.features.column_shape import ColumnShape

if TYPE_CHECKING:
    import jax

    from podembed.workers.model.batch import ModelBatch, WithState
    from podembed.workers.model.context import StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model may want to know of its job.

    Attributes:
      num_dense: dense numbers a sample.
      activation_shapes: per feature, the shape of its activation behind the axis of the samples, in the order of the
        features: `(width,)`, or `(max_sequence_length, width)` of a sequence.
      batch_size: samples of a step over all hosts.
      label: name of the column of the label; empty where the data has none.
      labels: names of all labels, where there are several.
      columns: the extra columns, with the shape and type of a sample's part.
      negatives: the features whose column has `Negatives(k, only=True)`, with k. A sample has k of their positions for
        each id of the column.
      sequences: the features whose samples differ in length, with the most that a sample has.
      log_q, log_frequency: the features of which a batch has these.
    """

    num_dense: int
    activation_shapes: Mapping[str, tuple[int, ...]]
    batch_size: int
    label: str = "label"
    labels: tuple[str, ...] = ()
    sequences: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, ColumnShape] = field(default_factory=dict)
    negatives: Mapping[str, int] = field(default_factory=dict)
    log_q: tuple[str, ...] = ()
    log_frequency: tuple[str, ...] = ()

    @property
    def widths(self) -> dict[str, int]:
        """Per feature, the last axis of its activation."""
        return {name: shape[-1] for name, shape in self.activation_shapes.items()}

    def example(self, num_samples: int = 1) -> ModelBatch:
        """A batch of zeros, for frameworks that find the shapes of their parameters by a call. Sequences are full."""
        import jax.numpy as jnp

        from podembed.embedding.features.activations import Activations
        from podembed.workers.model.batch import ModelBatch
        from podembed.workers.model.jagged import Jagged

        shapes = self.activation_shapes.items()
        labels = self.labels or ((self.label,) if self.label else ())
        rooms = {name: jnp.zeros((num_samples, *self.activation_shapes[name][:-1])) for name in self.activation_shapes}
        lengths = {name: jnp.full(num_samples, most, jnp.int32) for name, most in self.sequences.items()}
        return ModelBatch(
            dense=jnp.zeros((num_samples, self.num_dense)),
            activations=Activations({name: jnp.zeros((num_samples, *shape)) for name, shape in shapes}),
            labels={name: jnp.zeros(num_samples) for name in labels},
            weights=jnp.ones(num_samples),
            label_masks={name: jnp.ones(num_samples, bool) for name in labels},
            columns={name: jnp.asarray(shape.zeros(num_samples)) for name, shape in self.columns.items()},
            lengths=lengths,
            sequences={
                name: Jagged.of_padded(jnp.zeros((num_samples, *self.activation_shapes[name])), column)
                for name, column in lengths.items()
                if name in self.activation_shapes
            },
            log_q={name: rooms[name] for name in self.log_q},
            log_frequency={name: rooms[name] for name in self.log_frequency},
        )


class Model(Protocol):
    """The dense half of a job, as pure functions.

    All hosts call them on their own share of a batch. What a sample's score depends on is that sample. What depends on
    other samples goes through `context`, which reaches the whole batch.

    A model may also have a method `loss(outputs, batch, context)`. It returns the loss of each sample, `[n]`. For a
    loss of the batch as a whole it returns one number, or `podembed.Losses` for both. Without that method, and without
    `JobConfig.loss`, the loss is the sigmoid binary cross entropy of the scores.

    `ShortModel` is a shorter form, for models of pooled vectors and one score. It may have the same method `loss`.
    """

    def init(self, key: jax.Array, spec: ModelSpec) -> Any | WithState:
        """Returns the parameters, a pytree of floating-point arrays. A model that changes something else in its steps,
        such as the statistics of a batch normalization, returns `podembed.WithState(parameters, state)`.
        """
        ...

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> Any | WithState:
        """Returns outputs: one score (logit) a sample, `[n]`, or a mapping with these as `scores` and anything else.

        A model with state reads `context.state` and returns `podembed.WithState(outputs, new state)`. In an evaluation
        the new state is dropped.
        """
        ...


class ShortModel(Protocol):
    """The dense half of a job in the short form, which knows nothing of the step.

    Features have one order everywhere, that of `JobConfig.features`. `widths` comes in it, and so does what `apply`
    gets in training, in evaluations and in every other place here. There it is an `embedding.Activations`, a JAX pytree
    that keeps this order under `jit`, `grad` and `vmap`. A plain dict does not, since JAX sorts its keys; so call
    `apply` by hand with `Activations`, or name in it what it reads. A model that shall take plain dicts keeps an
    `embedding.FeatureOrder` as its attribute `order`, as those of `jobs.models` do; the job tells it its order.
    """

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> Any:
        """Returns the parameters, a pytree of float32 arrays. `widths` maps each feature to the width of its
        activation, in their order.
        """
        ...

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        """Returns one score (logit) a sample, `[n]`, from `dense` `[n, num_dense]` and per feature `[n, width]`, in the
        order of `widths`.

        A feature with `max_sequence_length` comes as `[n, max_sequence_length, width]`, positions without an id as
        zeros; one with `output_shape` as `[n, *output_shape[1:], width]`.
        """
        ...


def has_short_form(model: Any) -> bool:
    """Whether a model is a `ShortModel`: its `init` takes three arguments, and does not require two of them only."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        parameters = inspect.signature(model.init).parameters.values()
    except (TypeError, ValueError):
        return True
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        return True
    taken = [one for one in parameters if one.kind in kinds]
    required = [one for one in taken if one.default is inspect.Parameter.empty]
    return len(taken) != 2 and len(required) != 2
