"""`TPUEmbedding`: the class of `tf.tpu.experimental.embedding`, over any engine.

The signature is that of TensorFlow 2.3, the behaviour that of 2.21. So tables and tags have a stable order, one call
takes sparse and ragged inputs, and each feature has one activation.

This module checks calls and translates between the user's structures and the flat batches of an engine
(`embedding.tf.engine.engine`). The strategy in whose scope the object was made decides which engine that is
(`embedding.tf.replicas.strategies`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from podembed.embedding.tf.features.shapes import (
    check_shapes,
)
from podembed.embedding.tf.tpu_embedding.batches import StepValues
from podembed.embedding.tf.tpu_embedding.state import EmbeddingState
from podembed.embedding.tf.tracing import require_eager

_logger = logging.getLogger(__name__)
# By the key of an embedding. Of the process, since every run of a function gets a new copy of the embedding.
_told: dict[str, set[str]] = {}
_ONCE_A_STEP = "Call it once a step; pass activations into the function and gradients out of it."


class TPUEmbedding(EmbeddingState):
    """Embedding tables over the hosts of a strategy, trained step by step with `enqueue`, `dequeue` and
    `apply_gradients`.

    Made in the scope of a strategy, it trains; made outside any, it holds tables to read: `embedding_tables`,
    `restore`, `save`.
    Mutable: `build` starts the engine, and every step changes the tables.

    Args:
      feature_config: `FeatureConfig`s in any nesting of dicts, lists, tuples and namedtuples.
      batch_size: samples of a step over all replicas; None takes the shapes from `build` or from the first `enqueue`.
      optimizer: optimizer of the tables that have none; outside a scope None makes no slots.
      pipeline_execution_with_tensor_core: activations miss exactly the newest update, so that the lookup of a step can
        overlap the one before.
      initialize_tpu_embedding: False does not start the engine, and uses the one that another object of the strategy
        has started with the same configuration.

    Raises:
      ValueError: see the message: a leaf that is no feature, an unsupported optimizer, or two tables of one name. With
        `initialize_tpu_embedding=False` also another configuration than that of the running engine.
      RuntimeError: `batch_size` is given and the strategy's engine is already running, or with
        `initialize_tpu_embedding=False` none is.
    """

    def enqueue(self, features: Any, weights: Any = None, training: bool = True, name: str | None = None) -> None:
        """Looks a batch up; `dequeue` returns the activations.

        Args:
          features: structured like `feature_config`; see `embedding.tf.features.inputs` for the accepted values. On the
            driver a whole batch, or `PerReplica` values; inside `strategy.run` the replica's own part.
          weights: None, or the same structure with None or weights in the form of the ids.
          training: False where no `apply_gradients` follows.
          name: ties together the calls of one batch. With it, whether gradients follow decides if the batch was one of
            training.

        Raises:
          RuntimeError: made outside a scope, or an earlier batch still waits for its dequeue or its gradients.
          TypeError: a sequence of another type than in `feature_config`.
          ValueError: another structure, shape or type of input; ids outside the vocabulary; weights that do not fit.
        """
        self._require_strategy("enqueue")
        require_eager("enqueue", _ONCE_A_STEP)
        values = self._values
        inputs = values.read(features)
        incoming = values.incoming_shapes(inputs)
        if not self._is_built:
            self._build(incoming)
        check_shapes(self._declared.paths, self._shapes_here, incoming)
        self._warn_once(values.ignored_lengths(inputs))
        inputs = values.weigh(inputs, weights)
        engine = self._running
        shares = values.shares(
            inputs, self._shapes_here, num_shares=engine.num_shares, is_training=bool(training), name=name
        )
        engine.enqueue(shares)

    def dequeue(self, name: str | None = None) -> Any:
        """The activations of the batch enqueued first, structured like `feature_config`.

        A dict has the order of `feature_config`, until JAX takes it apart and sorts its keys, as `jit` and `grad` do. A
        model that reads in order rather than by name needs `Activations(embedding.dequeue())`, whose gradients
        `apply_gradients` takes.

        Returns:
          float32 JAX arrays `[*output_shape, dim]`: `(batch, dim)`, or `(batch, max_sequence_length, dim)` for
          sequences.

        Raises:
          RuntimeError: made outside a scope, not built, or nothing was enqueued.
        """
        self._require_strategy("dequeue")
        require_eager("dequeue", _ONCE_A_STEP)
        self._require_built("dequeue")
        return self._values.activations(self._running.dequeue(name), self._shapes_here)

    def embedding_lookup(self, features: Any, weights: Any = None) -> tuple[Any, str]:
        """`enqueue` and `dequeue` in one call, as of `TPUEmbeddingV2`; so is a call of the embedding itself.

        Returns:
          The activations, and a name of the batch for `apply_gradients(gradients, name)`, which makes it one of
          training. Without that before the next lookup, the batch was one of inference.

        Raises:
          As `enqueue`.
        """
        name = f"lookup {secrets.token_hex(8)}"
        self.enqueue(features, weights, name=name)
        return self.dequeue(name), name

    __call__ = embedding_lookup

    def apply_gradients(self, gradients: Any, name: str | None = None) -> None:
        """Updates the tables with the gradients of the activations last dequeued; with pipelining, right after the next
        forward.

        Gradients are summed over samples, features of one table and replicas, never averaged. None stands for zeros,
        which still moves rows of some optimizers, and the first one of a feature is warned of. Adam, AdagradMomentum,
        Momentum and Lion go on by their momentum. FTRL sets a row to what its linear slot says, which is 0 for a row
        that was never trained.

        Args:
          gradients: structured like `feature_config`, JAX arrays of the shapes of the activations, or None.

        Raises:
          RuntimeError: made outside a scope, not built, or no training batch waits for gradients.
          TypeError: a sequence of another type than in `feature_config`, or gradients that are not float32.
          ValueError: another structure, something else than a JAX array, or another shape.
        """
        self._require_strategy("apply_gradients")
        require_eager("apply_gradients", _ONCE_A_STEP)
        self._require_built("apply_gradients")
        engine = self._running
        sizes = engine.sizes_to_update(name)
        shares = self._values.gradients(gradients, self._shapes_here, sizes, num_shares=engine.num_shares)
        self._warn_once(self._values.missing_gradients(gradients))
        # Rates that are numbers need no step, whose number only the hosts know.
        engine.apply_gradients(shares, self._rates(0) if self._dynamic_rates is None else self._rates, name)

    def _rates(self, step: int) -> list[float]:
        """One learning rate a table. Every callable is called once, on the driver, also if tables share it."""
        dynamic = [] if self._dynamic_rates is None else self._dynamic_rates.at(step)
        return [
            dynamic[tag] if tag is not None else float(table.optimizer.learning_rate)  # type: ignore[union-attr]
            for table, tag in zip(self._declared.tables, self._rate_tags, strict=True)
        ]

    @property
    def _values(self) -> StepValues:
        return StepValues(declared=self._declared, num_parts=1 if self._is_in_replica else self._num_replicas)

    def _warn_once(self, warnings: Mapping[str, str]) -> None:
        """Logs each feature's warning with the first batch that it is about, once in this process."""
        told = _told.setdefault(self._key, set())
        for text in warnings.values():
            if text not in told:
                _logger.warning(text)
                told.add(text)
