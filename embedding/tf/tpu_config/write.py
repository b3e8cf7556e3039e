"""Tables and features of our own to a `TPUEmbeddingConfiguration` message, byte for byte as TensorFlow writes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, AdagradMomentum, Optimizer
from podembed.embedding.tf.tpu_config.checks import UnsupportedConfigField
from podembed.embedding.tf.tpu_config.learning_rate_tags import learning_rate_tags
from podembed.embedding.tf.tpu_config.optimizers import forbid_accumulation, write_optimizer, write_quantization
from podembed.embedding.tf.tpu_config.schema import TPUEmbeddingConfiguration

OutputShape: TypeAlias = Sequence[int | None]
"""Shape of a feature's activations on one replica without the last axis; 0 and None are unknown sizes."""

_Features: TypeAlias = Sequence[tuple[str, FeatureConfig]]
"""Path and declaration of each flattened feature."""

_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The samples of a step and the replicas that share them."""

    batch_size: int | None
    num_replicas: int

    def share(self, *, round_down: bool) -> int:
        """Samples of each replica."""
        if self.batch_size is None or self.batch_size < self.num_replicas:
            raise ValueError(
                f"Found batch_size={self.batch_size} for {self.num_replicas} replicas. Expected at least one sample "
                "for each. Pass the global batch size."
            )
        if self.batch_size % self.num_replicas and not round_down:
            raise ValueError(
                f"Found batch_size={self.batch_size} for {self.num_replicas} replicas. Expected equal shares. "
                "Pass a multiple, or the shape of each feature's activations as output_shapes."
            )
        return self.batch_size // self.num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A table with the defaults filled in."""

    config: TableConfig
    name: str
    optimizer: Optimizer | None
    tag: int | None


def to_config(
    feature_config: Any,
    *,
    num_hosts: int,
    num_tensor_cores: int,
    batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    pipeline_execution_with_tensor_core: bool = False,
    output_shapes: Sequence[OutputShape | None] | None = None,
    num_cores_per_replica: int | None = None,
    generation: Literal["2.21", "2.3"] = "2.21",
) -> Any:
    """Returns the `TPUEmbeddingConfiguration` of a feature configuration, in mode TRAINING.

    Tables come in the order of their first use by the flattened features, learning rate tags in that of their first use
    by the tables. The arguments are not changed; a table without a name is announced as `table_<position>`.

    Args:
      feature_config: `FeatureConfig`s in any nesting of dicts (taken in the order of their sorted keys), lists and
        tuples.
      num_hosts: hosts that share the tables. A table with fewer rows is announced with this many.
      num_tensor_cores: cores of all hosts, which is replicas times cores per replica.
      batch_size: batch size of all replicas together. Each gets an equal share; generation "2.3" rounds it down.
      optimizer: optimizer of the tables that have none. A table that has none at all is written without optimizer.
      pipeline_execution_with_tensor_core: pipeline execution with tensor core as in `TPUEmbedding`.
      output_shapes: one for each flattened feature; None takes `FeatureConfig.output_shape` or, without one, `(share,)`
        or `(share, max_sequence_length)`.
      num_cores_per_replica: given, model parallelism over this many cores is announced.
      generation: "2.21" describes each feature; "2.3" counts features per table instead and never accumulates gradients
        of SGD.

    Raises:
      ValueError: a leaf is no feature, two tables have one name, an optimizer is none of ours, or a size is unknown or
        impossible.
      UnsupportedConfigField: the message, or that of this generation, has no place for an option of a table.
    """
    if generation not in ("2.21", "2.3"):
        raise ValueError(f"Found generation={generation!r}. Expected '2.21' or '2.3'. Leave it out for '2.21'.")
    features = list(_flatten(feature_config, ()))
    tables = _tables(features, optimizer)
    message = TPUEmbeddingConfiguration(
        mode=TPUEmbeddingConfiguration.TRAINING,
        pipeline_execution_with_tensor_core=bool(pipeline_execution_with_tensor_core),
    )
    _write(message, "num_hosts", num_hosts, least=1)
    _write(message, "num_tensor_cores", num_tensor_cores, least=1)
    if num_cores_per_replica is not None:
        message.spmd_sharding.enabled = True
        _write(message.spmd_sharding, "num_cores_per_replica", num_cores_per_replica, least=1)
    batch = _Batch(batch_size=batch_size, num_replicas=_num_replicas(num_tensor_cores, num_cores_per_replica or 1))
    _write_tables(message, tables, num_hosts)
    if generation == "2.21":
        _write_features(message, features, tables, batch, output_shapes)
    elif output_shapes is None:
        _write_counts(message, features, tables, batch)
    else:
        raise ValueError(
            "Found output_shapes for generation '2.3'. Expected only batch_size, which decides every shape there. "
            "Leave output_shapes out."
        )
    return message


def _flatten(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, FeatureConfig]]:
    """Path and feature of each leaf: keys sorted, sequences in order."""
    if isinstance(node, FeatureConfig):
        yield "/".join(path), node
    elif isinstance(node, Mapping):
        for key in sorted(node):
            yield from _flatten(node[key], (*path, str(key)))
    elif isinstance(node, list | tuple):
        for position, child in enumerate(node):
            yield from _flatten(child, (*path, str(position)))
    else:
        raise ValueError(
            f"Found {node!r} at path '{'/'.join(path)}'. Expected a FeatureConfig, or a dict, list or tuple of them. "
            "Build a FeatureConfig."
        )


def _tables(features: _Features, default: Optimizer | None) -> list[_Table]:
    configs = list(dict.fromkeys(feature.table for _, feature in features))
    tags = learning_rate_tags(configs, optimizer=default).tags
    tables: dict[str, _Table] = {}
    for position, (config, tag) in enumerate(zip(configs, tags, strict=True)):
        name = f"table_{position}" if config.name is None else config.name
        if name in tables:
            raise ValueError(f"Multiple tables with name {name} found. Expected different names. Rename one.")
        optimizer = default if config.optimizer is None else config.optimizer
        tables[name] = _Table(config=config, name=name, optimizer=optimizer, tag=tag)
    return list(tables.values())


def _num_replicas(num_tensor_cores: int, num_cores_per_replica: int) -> int:
    if num_tensor_cores % num_cores_per_replica:
        raise ValueError(
            f"Found num_tensor_cores={num_tensor_cores} and num_cores_per_replica={num_cores_per_replica}. "
            "Expected whole replicas. Make the first a multiple of the second."
        )
    return num_tensor_cores // num_cores_per_replica


def _write(message: Any, field: str, value: Any, *, least: int, table: str | None = None) -> None:
    try:
        size = operator.index(value)
        if size >= least:
            setattr(message, field, int(size))
            return
    except (TypeError, ValueError):
        pass
    bits = 64 if field == "vocabulary_size" else 32
    problem = f"Found {value!r}. Expected an integer from {least} to 2**{bits - 1} - 1. Change it."
    raise UnsupportedConfigField(table, field, problem)


def _write_tables(message: Any, tables: Sequence[_Table], num_hosts: int) -> None:
    for table in tables:
        if table.config.dynamic_keys is not None:
            problem = f"Found capacity={table.config.dynamic_keys.capacity}, which the message cannot say. "
            problem += "Expected vocabulary_size. Keep the configuration in Python."
            raise UnsupportedConfigField(table.name, "vocabulary_size", problem)
        described = message.table_descriptor.add(name=table.name)
        _write(described, "vocabulary_size", max(table.config.vocabulary_size, num_hosts), least=1, table=table.name)
        _write(described, "dimension", table.config.dim, least=1, table=table.name)
        if table.optimizer is not None:
            write_optimizer(described.optimization_parameters, table.optimizer, table=table.name, tag=table.tag)
        if table.config.quantization_config is not None:
            write_quantization(described.optimization_parameters, table.config.quantization_config, table=table.name)


def _write_features(
    message: Any,
    features: _Features,
    tables: Sequence[_Table],
    batch: _Batch,
    output_shapes: Sequence[OutputShape | None] | None,
) -> None:
    given = [None] * len(features) if output_shapes is None else output_shapes
    if len(given) != len(features):
        raise ValueError(
            f"Found {len(given)} output_shapes for {len(features)} features. Expected one for each, in the order of "
            "the flattened feature_config. Pass None for a feature whose shape is known otherwise."
        )
    ids = {table.config: position for position, table in enumerate(tables)}
    for (path, feature), shape in zip(features, given, strict=True):
        described = message.feature_descriptor.add(name=feature.name or "", table_id=ids[feature.table])
        described.input_shape.extend(_output_shape(path, feature, shape, batch))


def _output_shape(path: str, feature: FeatureConfig, given: OutputShape | None, batch: _Batch) -> list[int]:
    declared = feature.output_shape
    if given is None and not declared:
        share = batch.share(round_down=False)
        return [share, feature.max_sequence_length] if feature.max_sequence_length else [share]
    shapes = [shape for shape in (declared, given) if shape]
    known = [{size for size in sizes if size} for sizes in zip(*shapes, strict=False)]
    if len({len(shape) for shape in shapes}) > 1 or any(len(sizes) > 1 for sizes in known):
        raise ValueError(
            f"Inconsistent shape founded for input feature {path}: {tuple(given or ())}, but its FeatureConfig says "
            f"{declared}. Expected the same. Leave one of them out."
        )
    sizes = [int(size) for size in (max(choice, default=0) for choice in known)]
    if not sizes or not all(0 < size <= _LARGEST_INT32 for size in sizes):
        raise ValueError(
            f"Input Feature {path} has output shape set as {tuple(sizes)}, 0 for an unknown size. "
            "Expected every size to be known and an int32. Pass it in output_shapes."
        )
    return sizes


def _write_counts(message: Any, features: _Features, tables: Sequence[_Table], batch: _Batch) -> None:
    """Turns a message with tables into one of 2.3: features are counted, a sequence as often as it is long."""
    _write(message, "batch_size_per_tensor_core", batch.share(round_down=True), least=1)
    for table, described in zip(tables, message.table_descriptor, strict=True):
        own_features = [feature for _, feature in features if feature.table is table.config]
        _check_known_to_2_3(table, own_features)
        count = sum(feature.max_sequence_length or 1 for feature in own_features)
        _write(described, "num_features", count, least=1, table=table.name)
        if isinstance(table.optimizer, SGD):
            forbid_accumulation(described.optimization_parameters)


def _check_known_to_2_3(table: _Table, features: Sequence[FeatureConfig]) -> None:
    """A reader of 2.3 skips fields that came later, and would train something else without a word."""
    optimizer = table.optimizer
    later = {
        "parameters": "no optimizer" if optimizer is None else "",
        "adagrad_momentum": "AdagradMomentum" if isinstance(optimizer, AdagradMomentum) else "",
        "gradient_clipping_limits": "clipvalue of SGD" if isinstance(optimizer, SGD) and optimizer.clipvalue else "",
        "simulated_quantization": "quantization_config" if table.config.quantization_config else "",
        "low_dimensional_packing_status": (
            "low_dimensional_packing_status" if getattr(optimizer, "low_dimensional_packing_status", False) else ""
        ),
    }
    found = {f"optimization_parameters.{field}": what for field, what in later.items() if what}
    if any(feature.output_shape for feature in features):
        found["num_features"] = "output_shape of a feature"
    for field, what in found.items():
        problem = (
            f"Found {what}. Expected only what generation '2.3' can announce. Leave it out, or use generation='2.21'."
        )
        raise UnsupportedConfigField(table.name, field, problem)
