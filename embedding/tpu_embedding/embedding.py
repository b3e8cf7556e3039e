"""`TPUEmbedding`: the class of `tf.tpu.experimental.embedding`, over any engine.

The signature is that of TensorFlow 2.3, the behaviour that of 2.21: a stable order of tables and tags, sparse and
ragged inputs in one call, one activation per feature. This module checks calls and translates between the user's
structures and the flat batches of an engine (`embedding.engine.engine`); which engine that is, the strategy decides in
whose scope the object was made (`embedding.replicas.strategies`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.engine.engine import Engine, EngineSpec
from podembed.embedding.features.shapes import (
    Shape,
    check_shapes,
    merged_shapes,
    require_defined,
    shapes_of_batch,
    shapes_of_build,
    share_of,
    times,
)
from podembed.embedding.keras.variable import Variable
from podembed.embedding.optimizers import Optimizer, learning_rate_at
from podembed.embedding.replicas.strategies import RemoteStrategy, Strategy, current_strategy, get_replica_context
from podembed.embedding.table.table_storage import WrittenTables, storage
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tpu_config.learning_rate_tags import learning_rate_tags
from podembed.embedding.tpu_embedding.attaching import require_same_configuration
from podembed.embedding.tpu_embedding.batches import StepValues
from podembed.embedding.tpu_embedding.declared import DeclaredTables
from podembed.embedding.tpu_embedding.engine_specs import engine_spec, serialized_config
from podembed.embedding.tpu_embedding.host_tables import HostTables
from podembed.embedding.tpu_embedding.module_members import ModuleMembers
from podembed.embedding.tracing import require_eager


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingMetrics:
    """What an embedding has done since it was built or restored.

    Attributes:
      num_steps: calls of `apply_gradients`.
      learning_rates: by table, the rate of the last step; empty before the first.
      altered_ids: by table, ids outside the vocabulary that were dropped, clipped or hashed, as the table declares.
    """

    num_steps: int
    learning_rates: dict[str, float]
    altered_ids: dict[str, int]


_logger = logging.getLogger(__name__)
_ONCE_A_STEP = "Call it once a step; pass activations into the function and gradients out of it."
_AROUND_IT = "Call it before the function or after it."


class TPUEmbedding(ModuleMembers):
    """Embedding tables over the hosts of a strategy, trained step by step with `enqueue`, `dequeue` and
    `apply_gradients`.

    Made in the scope of a strategy, it trains; made outside any, it holds tables to read: `embedding_tables`,
    `restore`, `save`.
    Mutable: `build` starts the engine, and every step changes the tables.

    Args:
      feature_config: `FeatureConfig`s in any nesting of dicts, lists, tuples and namedtuples.
      batch_size: samples of a step over all replicas; None takes the shapes from `build` or from the first `enqueue`.
      optimizer: of the tables that have none; outside a scope None makes no slots.
      pipeline_execution_with_tensor_core: activations miss exactly the newest update, so that the lookup of a step can
        overlap the one before.
      initialize_tpu_embedding: False does not start the engine, and uses the one that another object of the strategy
        has started with the same configuration.

    Raises:
      ValueError: see the message; a leaf that is no feature, an unsupported optimizer, two tables of one name, or with
        `initialize_tpu_embedding=False` another configuration than that of the running engine.
      RuntimeError: `batch_size` is given and the strategy's engine is already running, or with
        `initialize_tpu_embedding=False` none is.
    """

    def __init__(
        self,
        feature_config: Any,
        batch_size: int | None = None,
        optimizer: Optimizer | None = None,
        pipeline_execution_with_tensor_core: bool = False,
        initialize_tpu_embedding: bool = True,
    ) -> None:
        if isinstance(batch_size, np.integer):
            batch_size = int(batch_size)
        if not isinstance(batch_size, int | None):
            # The positions of 2.21: (feature_config, optimizer, pipeline_execution_with_tensor_core).
            if isinstance(optimizer, bool):
                pipeline_execution_with_tensor_core, optimizer = optimizer, None
            batch_size, optimizer = _shifted(batch_size, optimizer)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"Found batch_size={batch_size!r}. Expected at least 1. Pass the samples of a step.")
        self._strategy: Strategy | None = current_strategy()
        self._is_pipelined = bool(pipeline_execution_with_tensor_core)
        self._starts_engine = bool(initialize_tpu_embedding)
        self._declared = DeclaredTables.of(feature_config, optimizer, needs_optimizer=self._strategy is not None)
        self._learning_rates = learning_rate_tags(self._declared.tables)
        self._batch_size = batch_size
        self._default_optimizer = optimizer
        self._restore_from: str | None = None
        self._engine: Engine | None = None
        # The engine of another object, once it was found to be what this one declares.
        self._attached_to: Engine | None = None
        self._host_tables: HostTables | None = None
        replicas = 1 if self._strategy is None else self._strategy.num_replicas_in_sync
        self._num_replicas = replicas
        # Of a whole batch, over all replicas; what is declared for one replica is multiplied on the first axis.
        self._output_shapes: list[Shape] = [times(f.output_shape, replicas) for f in self._declared.features]
        # Per share of the activations last dequeued, vectors of each feature.
        self._sizes: list[list[int]] = []
        self._warned: set[str] = set()
        self._is_built = False
        if self._strategy is not None and not self._starts_engine and batch_size is None:
            self._engine_of_another(self._strategy, ())
        if batch_size is not None and self._strategy is not None:
            self._build(shapes_of_batch(self._declared.features, batch_size))

    # ------------------------------------------------------------------ building

    def build(self, per_replica_input_shapes: Any = None, per_replica_batch_size: int | None = None) -> None:
        """Makes the tables with their first values, or those of an earlier `restore`. A second call does nothing.

        Args:
          per_replica_input_shapes: of the inputs on one replica, structured like the features, or a batch size as int.
          per_replica_batch_size: the same as a batch size.

        Raises:
          ValueError: the shapes contradict `FeatureConfig.output_shape` or are not fully known.
          RuntimeError: the strategy's engine is already running for another object.
        """
        if self._is_built:
            return
        if self._strategy is None:
            self._build([])
            return
        given = per_replica_batch_size if per_replica_input_shapes is None else per_replica_input_shapes
        if given is None:
            shapes = [()] * len(self._declared.features)
        else:
            shapes = shapes_of_build(self._declared.structure, self._declared.features, given)
        self._build([times(shape, self._num_replicas) for shape in shapes])

    def _build(self, shapes: Sequence[Shape]) -> None:
        """Args: shapes: output shapes of a whole batch, empty where unknown."""
        if self._strategy is None:
            self._host_tables = HostTables(self._declared, restore_from=self._restore_from)
            self._is_built = True
            return
        require_eager("build", "Call it before, or pass batch_size.")
        if get_replica_context() is not None and self._strategy.num_replicas_in_sync > 1:
            raise RuntimeError(
                "The embedding would be built inside a function that the strategy runs. Expected a built one, since "
                "all hosts are set up from "
                "the driver. Pass batch_size, or call build or enqueue once outside strategy.run."
            )
        if self._starts_engine and self._strategy.running is not None:
            raise RuntimeError(
                "TPU is already initialized for embeddings. Expected one TPUEmbedding at a time in the scope of a "
                "strategy. Call close() on the "
                "other one, or pass initialize_tpu_embedding=False to use its engine."
            )
        check_shapes(self._declared.paths, self._output_shapes, shapes)
        merged = merged_shapes(self._output_shapes, shapes)
        if self._starts_engine:
            require_defined(self._declared.paths, merged)
            spec = self._spec(self._strategy, merged)
            self._engine = self._strategy.start_engine(spec, restore_from=self._restore_from)
        else:
            engine = self._engine_of_another(self._strategy, merged)
            merged = merged_shapes(merged, engine.spec.output_shapes)
            require_defined(self._declared.paths, merged)
            self._attach(engine, merged)
            if self._restore_from is not None:
                engine.restore(self._restore_from)
        self._output_shapes = merged
        self._is_built = True

    def _spec(self, strategy: Strategy, output_shapes: Sequence[Shape]) -> EngineSpec:
        # An object that starts its engine takes the optimizers that its tables hold by now, as TensorFlow does.
        own = self._declared if self._starts_engine else self._declared.with_default_optimizer(self._default_optimizer)
        return engine_spec(
            own,
            strategy,
            output_shapes=output_shapes,
            batch_size=self._batch_size,
            is_pipelined=self._is_pipelined,
        )

    def _engine_of_another(self, strategy: Strategy, shapes: Sequence[Shape]) -> Engine:
        """The strategy's engine, which another object has started with this configuration, as far as it is known.

        Raises:
          RuntimeError: there is none.
          ValueError: it was started with another configuration.
        """
        if strategy.running is None:
            raise RuntimeError(
                "Found initialize_tpu_embedding=False, but no engine is running in this strategy. Expected one that "
                "another TPUEmbedding has "
                "started. Build that one first, or leave initialize_tpu_embedding out."
            )
        is_known = all(shape and None not in shape for shape in shapes)
        require_same_configuration(self._spec(strategy, shapes if is_known else ()), strategy.running.spec)
        return strategy.running

    def _attach(self, engine: Engine, output_shapes: Sequence[Shape]) -> None:
        """Takes an engine for this object's own. Raises ValueError if it was started with another configuration."""
        # What travelled to a replica was compared on the driver; functions of the user are other objects there.
        if engine is self._attached_to or self._strategy is None or isinstance(self._strategy, RemoteStrategy):
            return
        require_same_configuration(self._spec(self._strategy, output_shapes), engine.spec)
        self._attached_to = engine

    @property
    def serialized_config(self) -> bytes:
        """The `TPUEmbeddingConfiguration` that the engine was started with.

        Raises:
          RuntimeError: not built.
          UnsupportedConfigField: the tables have an option that this format cannot express.
        """
        strategy = self._require_strategy("serialized_config")
        self._require_built("serialized_config")
        return serialized_config(
            self._declared, strategy, self._output_shapes, self._batch_size, is_pipelined=self._is_pipelined
        )

    # ------------------------------------------------------------------ a step

    def enqueue(self, features: Any, weights: Any = None, training: bool = True, name: str | None = None) -> None:
        """Looks a batch up; `dequeue` returns the activations.

        Args:
          features: structured like `feature_config`; see `embedding.features.inputs` for the accepted values. On the
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
        shares = self._running.dequeue(name)
        self._sizes = [[len(part) for part in share] for share in shares]
        return self._values.activations(shares, self._shapes_here)

    def apply_gradients(self, gradients: Any, name: str | None = None) -> None:
        """Updates the tables with the gradients of the activations last dequeued; with pipelining, right after the next
        forward.

        Gradients are summed over samples, features of one table and replicas, never averaged. None stands for zeros,
        which still moves rows of some optimizers: Adam and AdagradMomentum go on by their momentum, and FTRL sets a row
        to what its linear slot says, which for a row that was never trained is 0.

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
        shares = self._values.gradients(gradients, self._shapes_here, self._sizes, num_shares=engine.num_shares)
        engine.apply_gradients(shares, self._rates, name)

    def _rates(self, step: int) -> list[float]:
        """One learning rate a table. Every callable is called once, also if tables share it."""
        dynamic = [float(np.float32(learning_rate_at(rate, step))) for rate in self._learning_rates.callables]
        return [
            dynamic[tag] if tag is not None else float(table.optimizer.learning_rate)  # type: ignore[union-attr]
            for table, tag in zip(self._declared.tables, self._learning_rates.tags, strict=True)
        ]

    # ------------------------------------------------------------------ state

    @property
    def embedding_tables(self) -> dict[TableConfig, Variable]:
        """The tables without slots, `[vocabulary_size, dim]`, by their `TableConfig`. Only outside a scope, where they
        are built on demand.

        Raises:
          RuntimeError: made in the scope of a strategy, whose tables are sharded.
        """
        if self._strategy is not None:
            raise RuntimeError(
                "Unable to retrieve embedding tables when using a TPU strategy. Expected an object made outside any "
                "scope. Call save here and "
                "restore there, or read_tables for a copy."
            )
        if not self._is_built:
            self.build()
        return self._tables_here.variables

    def read_tables(self) -> dict[TableConfig, dict[str, np.ndarray]]:
        """A copy of all tables: "rows" and each slot, `[vocabulary_size, width]`. Gradients that wait are applied
        first.

        Raises:
          RuntimeError: not built.
        """
        self._require_built("read_tables")
        require_eager("read_tables", _AROUND_IT)
        held = self._running.read_tables() if self._strategy is not None else self._tables_here.read()
        return dict(zip(self._declared.tables, held, strict=True))

    def save(self, path: str) -> None:
        """Writes all rows and slots to a new folder or URL. Gradients that wait are applied first.

        Raises:
          RuntimeError: not built.
          StorageError: the storage failed, or `path` holds a saved embedding already.
        """
        self._require_built("save")
        require_eager("save", _AROUND_IT)
        if self._strategy is not None:
            self._running.save(path)
        else:
            self._tables_here.save(path)

    def write_tables(self, path: str) -> WrittenTables:
        """The files of `save`, for an index that names more than tables: see `Checkpoint`. Gradients that wait are
        applied first.

        Raises:
          RuntimeError: not built.
          StorageError: the storage failed.
        """
        require_eager("write_tables", _AROUND_IT)
        self._require_built("write_tables")
        return self._running.write(path) if self._strategy is not None else self._tables_here.write(path)

    def restore(self, path: str) -> None:
        """Fills rows and slots from what `save` wrote, by any number of hosts. Before `build`, at once when it is
        built.

        Raises:
          StorageError: nothing is saved there, or it is damaged.
          ValueError: the saved tables have other names, shapes or slots.
        """
        require_eager("restore", _AROUND_IT)
        if not self._is_built:
            storage().describe(path)
            self._restore_from = path
        elif self._strategy is not None:
            self._running.restore(path)
        else:
            self._tables_here.restore(path)

    @property
    def declared_specs(self) -> tuple[TableSpec, ...]:
        """The tables that the features use, in the order of first use, as engines hold them."""
        return self._declared.specs(seed=0 if self._strategy is None else self._strategy.seed)

    def drain(self) -> None:
        """Applies gradients that wait for the next forward, so that the tables hold every update."""
        self._require_strategy("drain")
        self._require_built("drain")
        require_eager("drain", _AROUND_IT)
        self._running.drain()

    def discard(self) -> None:
        """Forgets enqueued batches, as after an error in the middle of a step; the next call is an `enqueue`. No update
        is lost or made.
        """
        self._require_strategy("discard")
        self._require_built("discard")
        require_eager("discard", _AROUND_IT)
        self._running.discard()

    @property
    def metrics(self) -> EmbeddingMetrics:
        """Steps, applied learning rates and altered ids.

        Raises:
          RuntimeError: made outside a scope, or not built.
        """
        self._require_strategy("metrics")
        self._require_built("metrics")
        found = self._running.metrics()
        names = [str(table.name) for table in self._declared.tables]
        return EmbeddingMetrics(
            num_steps=found.num_steps,
            learning_rates=dict(zip(names, found.learning_rates, strict=False)),
            altered_ids=dict(zip(names, found.altered_ids, strict=True)),
        )

    def close(self) -> None:
        """Frees the tables, so that the strategy can hold another embedding. Safe to call twice."""
        require_eager("close", _AROUND_IT)
        if self._strategy is not None and self._engine is not None:
            if self._strategy.running is self._engine:
                self._strategy.stop_engine()
            self._engine = None

    # ------------------------------------------------------------------ inside

    def _held_variables(self) -> tuple[Variable, ...]:
        return tuple(self.embedding_tables.values()) if self._strategy is None else ()

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a replica: all but the driver's engine, in place of which the replica has its own, and what
        the driver dequeued.
        """
        strategy = None if self._strategy is None else RemoteStrategy.of(self._strategy)
        return {
            **self.__dict__,
            "_engine": None,
            "_host_tables": None,
            "_strategy": strategy,
            "_sizes": [],
            "_attached_to": None,
        }

    @property
    def _is_in_replica(self) -> bool:
        return get_replica_context() is not None

    @property
    def _running(self) -> Engine:
        """The engine of this object; one that travelled to a replica uses the replica's own."""
        context = get_replica_context()
        engine = self._engine if self._engine is not None or context is None else context.engine
        if engine is None and not self._starts_engine and self._strategy is not None:
            engine = self._strategy.running
        if engine is not None and not self._starts_engine:
            self._attach(engine, self._output_shapes)
        if engine is None:
            raise RuntimeError(
                "The engine of this TPUEmbedding is not running. Expected one that was started and not closed. Make a "
                "new object, without "
                "initialize_tpu_embedding=False if there is no other."
            )
        return engine

    @property
    def _tables_here(self) -> HostTables:
        if self._host_tables is None:
            raise RuntimeError("Found no tables in this process. Expected an object made here. Restore it here.")
        return self._host_tables

    @property
    def _values(self) -> StepValues:
        return StepValues(declared=self._declared, num_parts=1 if self._is_in_replica else self._num_replicas)

    @property
    def _shapes_here(self) -> list[Shape]:
        """Output shapes as seen from here: of a whole batch on the driver, of one share inside `strategy.run`."""
        context = get_replica_context()
        if context is None:
            return self._output_shapes
        replica = context.replica_id_in_sync_group
        return [share_of(shape, self._num_replicas, replica=replica) for shape in self._output_shapes]

    def _warn_once(self, warnings: Mapping[str, str]) -> None:
        """Logs each feature's warning with the first batch that it is about."""
        for path in warnings.keys() - self._warned:
            _logger.warning(warnings[path])
        self._warned.update(warnings)

    def _require_strategy(self, method: str) -> Strategy:
        if self._strategy is None:
            raise RuntimeError(
                f"{method} is not valid when TPUEmbedding object is not created under a TPUStrategy. Expected `with "
                "strategy.scope():` around its "
                "creation. Use LocalStrategy for one process or PodStrategy for several hosts; outside, only "
                "embedding_tables works."
            )
        return self._strategy

    def _require_built(self, method: str) -> None:
        if not self._is_built:
            raise RuntimeError(
                f"{method} called on unbuilt TPUEmbedding object. Expected enqueue or build first. Call one of them, "
                "or pass batch_size."
            )


def _shifted(batch_size: Any, optimizer: Any) -> tuple[None, Any]:
    """Arguments of a call with the positions of 2.21, which has no batch size."""
    if optimizer is not None:
        raise ValueError(
            f"Found batch_size={batch_size!r}. Expected an int or None. Pass the samples of a step over all replicas."
        )
    return None, batch_size
