"""From a declaration to the value that engines are started with, and to the serialized configuration that names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.engine import EngineSpec
from podembed.embedding.tf.features.shapes import Shape, is_sequence, share_of
from podembed.embedding.tf.replicas.strategies import Strategy
from podembed.embedding.tf.tpu_config.learning_rate_tags import learning_rate_tags
from podembed.embedding.tf.tpu_config.serialized import UnsupportedConfigField, serialize_config, to_config
from podembed.embedding.tf.tpu_embedding.declared import DeclaredTables


def engine_spec(
    declared: DeclaredTables,
    strategy: Strategy,
    *,
    output_shapes: Sequence[Shape],
    batch_size: int | None,
    is_pipelined: bool,
) -> EngineSpec:
    """All that the strategy's engine must know.

    Args:
      output_shapes: output shapes of the activations of a whole batch; empty where they are not known yet, which is
        enough to compare specs.
      batch_size: batch size of all replicas, if it was declared.
    """
    rates = [None if table.optimizer is None else table.optimizer.learning_rate for table in declared.tables]
    numbers = declared.table_numbers
    return EngineSpec(
        tables=tuple(_without_rate(spec) for spec in declared.specs(seed=strategy.seed)),
        features=tuple(
            FeatureBinding(name=str(at), table=numbers[at], combiner=feature.combiner)
            for at, feature in enumerate(declared.features)
        ),
        quantization=tuple(table.quantization_config for table in declared.tables),
        is_pipelined=is_pipelined,
        positions=tuple(f.max_sequence_length if is_sequence(f) else 1 for f in declared.features),
        paths=declared.paths,
        output_shapes=tuple(tuple(shape) for shape in output_shapes),
        learning_rates=tuple(None if rate is None or callable(rate) else float(rate) for rate in rates),
        rate_tags=learning_rate_tags(declared.tables).tags,
        invalid_ids=tuple(table.invalid_ids for table in declared.tables),
        configs=_configs(declared, strategy, output_shapes, batch_size, is_pipelined=is_pipelined),
    )


def serialized_config(
    declared: DeclaredTables,
    strategy: Strategy,
    output_shapes: Sequence[Shape],
    batch_size: int | None,
    *,
    is_pipelined: bool,
    generation: Literal["2.21", "2.3"] = "2.21",
) -> bytes:
    """The `TPUEmbeddingConfiguration` of an engine.

    Raises:
      UnsupportedConfigField, ValueError: an option of ours has no place in that format.
    """
    replicas = strategy.num_replicas_in_sync
    of_replica = [share_of(shape, replicas) for shape in output_shapes]
    whole = output_shapes[0][0] if output_shapes and output_shapes[0] else None
    message = to_config(
        declared.structure,
        num_hosts=strategy.num_hosts,
        num_tensor_cores=replicas,
        batch_size=batch_size or whole,
        pipeline_execution_with_tensor_core=is_pipelined,
        output_shapes=of_replica if generation == "2.21" else None,
        generation=generation,
    )
    return serialize_config(message)


def _configs(
    declared: DeclaredTables, strategy: Strategy, shapes: Sequence[Shape], batch_size: int | None, *, is_pipelined: bool
) -> tuple[bytes, ...]:
    if not shapes:
        return ()
    found: list[bytes] = []
    generations: tuple[Any, ...] = ("2.21", "2.3")
    for generation in generations:
        try:
            found.append(
                serialized_config(
                    declared, strategy, shapes, batch_size, is_pipelined=is_pipelined, generation=generation
                )
            )
        except (UnsupportedConfigField, ValueError):
            # An option of ours, such as a row optimizer, has no place in the format; only the op that needs it is
            # missing then.
            continue
    return tuple(found)


def _without_rate(spec: TableSpec) -> TableSpec:
    """A spec without the callable of its learning rate, which may not travel; rates come with each step."""
    if spec.optimizer is None:
        return spec
    return replace(spec, optimizer=replace(spec.optimizer, learning_rate=0.0))  # pyright: ignore[reportArgumentType]
