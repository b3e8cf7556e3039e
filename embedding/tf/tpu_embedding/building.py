"""`BuiltEmbedding`: what a `TPUEmbedding` declares, and the engine that is built from it.

Which engine that is, the strategy decides in whose scope the object was made (`embedding.tf.replicas.strategies`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from podembed.embedding.optimizers import Optimizer
from podembed.embedding.tf.engine.device_tables import devices_here
from podembed.embedding.tf.engine.engine import Engine, EngineSpec, no_first_values
from podembed.embedding.tf.features.shapes import (
    Shape,
    check_shapes,
    merged_shapes,
    require_defined,
    shapes_of_batch,
    shapes_of_build,
    share_of,
    times,
)
from podembed.embedding.tf.keras.module_members import ModuleMembers
from podembed.embedding.tf.replicas.dynamic_rates import DynamicRates, RatesOfDriver
from podembed.embedding.tf.replicas.kept import Kept
from podembed.embedding.tf.replicas.strategies import (
    LocalStrategy,
    RemoteStrategy,
    Strategy,
    current_strategy,
    get_replica_context,
)
from podembed.embedding.tf.tpu_config.learning_rate_tags import learning_rate_tags
from podembed.embedding.tf.tpu_embedding.attaching import require_same_configuration
from podembed.embedding.tf.tpu_embedding.declared import DeclaredTables
from podembed.embedding.tf.tpu_embedding.engine_specs import engine_spec, serialized_config
from podembed.embedding.tf.tpu_embedding.host_tables import HostTables
from podembed.embedding.tf.tracing import require_eager


class BuiltEmbedding(ModuleMembers):
    """A declaration and its engine, or its tables where there is no strategy. Mutable: `build` starts the engine.

    Arguments and errors are those of `TPUEmbedding`.
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
        if isinstance(self._strategy, LocalStrategy):
            self._declared.place(devices_here)
        elif self._strategy is not None:
            _refuse_sharded(self._declared)
        # As replicas get it, once it was packed.
        self._declared_there: Kept[DeclaredTables] | None = None
        numbered = learning_rate_tags(self._declared.tables)
        # Per table the tag of its callable; a replica has no callables, and asks the driver.
        self._rate_tags = numbered.tags
        self._dynamic_rates: DynamicRates | RatesOfDriver | None = (
            DynamicRates(numbered.callables) if numbered.callables else None
        )
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
        # The same of all its copies.
        self._key = secrets.token_hex(8)
        self._is_built = False
        if self._strategy is not None and not self._starts_engine and batch_size is None:
            self._engine_of_another(self._strategy, ())
        if batch_size is not None and self._strategy is not None:
            self._build(shapes_of_batch(self._declared.features, batch_size))

    def build(self, per_replica_input_shapes: Any = None, per_replica_batch_size: int | None = None) -> None:
        """Makes the tables with their first values, or those of an earlier `restore`. A second call does nothing.

        Args:
          per_replica_input_shapes: per replica input shapes of the inputs on one replica, structured like the features,
            or a batch size as int.
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
                "strategy. Call close() on the other one, or pass initialize_tpu_embedding=False to use its engine."
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
                "another TPUEmbedding has started. Build that one first, or leave initialize_tpu_embedding out."
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

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a replica. Left out are the driver's engine, since the replica has its own, and initializers,
        which only hosts need. Callables of learning rates stay on the driver as well.
        """
        strategy = None if self._strategy is None else RemoteStrategy.of(self._strategy)
        if self._declared_there is None:
            self._declared_there = Kept(self._declared.for_replicas(no_first_values, self._rate_tags))
        return {
            **self.__dict__,
            "_declared": None,
            "_engine": None,
            "_host_tables": None,
            "_strategy": strategy,
            "_attached_to": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._declared = state["_declared_there"].value

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
                "new object, without initialize_tpu_embedding=False if there is no other."
            )
        return engine

    @property
    def _tables_here(self) -> HostTables:
        if self._host_tables is None:
            raise RuntimeError("Found no tables in this process. Expected an object made here. Restore it here.")
        return self._host_tables

    @property
    def _shapes_here(self) -> list[Shape]:
        """Output shapes as seen from here: of a whole batch on the driver, of one share inside `strategy.run`."""
        context = get_replica_context()
        if context is None:
            return self._output_shapes
        replica = context.replica_id_in_sync_group
        return [share_of(shape, self._num_replicas, replica=replica) for shape in self._output_shapes]

    def _require_strategy(self, method: str) -> Strategy:
        if self._strategy is None:
            raise RuntimeError(
                f"{method} is not valid when TPUEmbedding object is not created under a TPUStrategy. Expected `with "
                "strategy.scope():` around its creation. Use LocalStrategy for one process or PodStrategy for several "
                "hosts; outside, only embedding_tables works."
            )
        return self._strategy

    def _require_built(self, method: str) -> None:
        if not self._is_built:
            raise RuntimeError(
                f"{method} called on unbuilt TPUEmbedding object. Expected enqueue or build first. Call one of them, "
                "or pass batch_size."
            )


def _refuse_sharded(declared: DeclaredTables) -> None:
    for table in declared.tables:
        if table.is_sharded:
            raise ValueError(
                f"Found table '{table.name}' with place='sharded' in the scope of a strategy over hosts. Expected a "
                "LocalStrategy, whose process has the devices. Use one, leave place out, or train with a Trainer, "
                "which cuts tables over the devices of all hosts."
            )


def _shifted(batch_size: Any, optimizer: Any) -> tuple[None, Any]:
    """Arguments of a call with the positions of 2.21, which has no batch size."""
    if optimizer is not None:
        raise ValueError(
            f"Found batch_size={batch_size!r}. Expected an int or None. Pass the samples of a step over all replicas."
        )
    return None, batch_size
