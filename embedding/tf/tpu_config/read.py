"""A `TPUEmbeddingConfiguration` message to tables and features of our own, or an error that names what is not
supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.tf.tpu_config.checks import UnsupportedConfigField, reject_enum, reject_unknown_fields
from podembed.embedding.tf.tpu_config.learning_rate_tags import TaggedLearningRate, number_of_tags, tag_of
from podembed.embedding.tf.tpu_config.optimizers import read_optimizer, read_quantization


class ReadConfig(NamedTuple):
    """What `from_config` found.

    Attributes:
      tables: in the order of the message.
      features: in the order of the message; those of one table hold the same object.
      tables_by_tag: tables of each learning rate tag, from tag 0 on; tables with a constant rate are in none.
    """

    tables: list[TableConfig]
    features: list[FeatureConfig]
    tables_by_tag: dict[int, list[TableConfig]]


def from_config(
    message: Any,
    learning_rates: Sequence[Callable[..., Any]] | None = None,
    *,
    combiners: Sequence[str] | None = None,
) -> ReadConfig:
    """Returns the tables and features of a `TPUEmbeddingConfiguration` message.

    Without feature descriptors (generation "2.3") each table has one feature with all its activations, of shape
    `(batch_size_per_tensor_core * num_features,)`, which is how that generation passes them. Rows are placed by buckets
    whatever the sharding strategy says; no result depends on it. `num_hosts`, `num_tensor_cores` and the pipeline flag
    are left to the caller.

    Args:
      message: message as `parse_config` returns it.
      learning_rates: a callable for each tag, at the position of the tag. None makes a `TaggedLearningRate` for each,
        shared by the tables of the tag.
      combiners: combiners of the tables, in their order; None is "mean" for all.

    Raises:
      UnsupportedConfigField: the message asks for something that is not supported here, or contradicts itself.
      ValueError: the tags are not 0..n-1, or there are not as many rates as tags or combiners as tables.
    """
    _check_engine(message)
    rates = _rates(number_of_tags(message), learning_rates)
    num_tables = len(message.table_descriptor)
    if combiners is not None and len(combiners) != num_tables:
        raise ValueError(
            f"Found {len(combiners)} combiners for {num_tables} tables. Expected one for each. Pass None for the mean "
            "everywhere."
        )
    chosen = combiners or ["mean"] * num_tables
    tables: dict[str, TableConfig] = {}
    for described, combiner in zip(message.table_descriptor, chosen, strict=True):
        if described.name in tables or not described.name:
            problem = f"Found the name '{described.name}'. Expected a name no other table has. Rename the table."
            raise UnsupportedConfigField(described.name, "name", problem)
        tables[described.name] = _read_table(described, rates, combiner)
    tables_by_tag: dict[int, list[TableConfig]] = {tag: [] for tag in range(len(rates))}
    for described in message.table_descriptor:
        tag = tag_of(described.optimization_parameters)
        if tag is not None:
            tables_by_tag[tag].append(tables[described.name])
    read_features = _read_features if message.feature_descriptor else _read_counts
    return ReadConfig(list(tables.values()), read_features(message, list(tables.values())), tables_by_tag)


def _check_engine(message: Any) -> None:
    """Refuses what a configuration says about the whole engine and is not supported here."""
    reject_unknown_fields(message, table=None, without=frozenset({"table_descriptor", "feature_descriptor"}))
    mode_remedy = "Set TRAINING, or INFERENCE for lookups only."
    reject_enum(message, "mode", supported=("TRAINING", "INFERENCE"), table=None, remedy=mode_remedy)
    strategy_remedy = "Set DIV_DEFAULT; rows are placed by buckets in any case."
    reject_enum(message, "sharding_strategy", supported=("DIV_DEFAULT", "MOD"), table=None, remedy=strategy_remedy)
    sharding = message.spmd_sharding
    set_fields = {
        "profile_data_directory": (message.profile_data_directory, "lookups are not profiled to files here"),
        "spmd_sharding.use_manual_partitioning": (sharding.use_manual_partitioning, "a replica is one device here"),
        "spmd_sharding.use_shardy_partitioner": (sharding.use_shardy_partitioner, "a replica is one device here"),
        "spmd_sharding.num_cores_per_replica": (
            sharding.num_cores_per_replica if sharding.enabled and sharding.num_cores_per_replica > 1 else 0,
            "a replica is one device here",
        ),
    }
    for field, (value, reason) in set_fields.items():
        if value:
            raise UnsupportedConfigField(None, field, f"Found {value!r}. Expected it unset. Remove it: {reason}.")
    if not message.table_descriptor:
        problem = "Found no table. Expected at least one. Pass the whole configuration."
        raise UnsupportedConfigField(None, "table_descriptor", problem)


def _rates(num_tags: int, given: Sequence[Callable[..., Any]] | None) -> list[Callable[..., Any]]:
    if given is None:
        return [TaggedLearningRate(tag) for tag in range(num_tags)]
    if len(given) != num_tags:
        raise ValueError(
            f"Found {len(given)} learning_rates for {num_tags} tags. Expected a callable for each tag, at its "
            "position. Pass None to set the rates at each step."
        )
    for tag, rate in enumerate(given):
        if not callable(rate):
            raise ValueError(f"Found {rate!r} for tag {tag}. Expected a callable. Pass one that returns the rate.")
    return list(given)


def _read_table(described: Any, rates: Sequence[Callable[..., Any]], combiner: str) -> TableConfig:
    name = described.name
    parameters = described.optimization_parameters
    reject_unknown_fields(described, table=name, without=frozenset({"optimization_parameters"}))
    for field in ("vocabulary_size", "dimension"):
        if getattr(described, field) < 1:
            problem = f"Found {getattr(described, field)}. Expected at least 1. Set the size of the table."
            raise UnsupportedConfigField(name, field, problem)
    return TableConfig(
        vocabulary_size=described.vocabulary_size,
        dim=described.dimension,
        optimizer=read_optimizer(parameters, table=name, rate_of_tag=rates.__getitem__),
        combiner=combiner,
        name=name,
        quantization_config=read_quantization(parameters, table=name),
    )


def _read_features(message: Any, tables: Sequence[TableConfig]) -> list[FeatureConfig]:
    features = []
    num_activations = [0] * len(tables)
    for position, described in enumerate(message.feature_descriptor):
        path = f"feature_descriptor[{position}]."
        reject_unknown_fields(described, table=None, path=path)
        if not 0 <= described.table_id < len(tables):
            problem = f"Found {described.table_id}. Expected a table from 0 to {len(tables) - 1}. Correct it."
            raise UnsupportedConfigField(None, f"{path}table_id", problem)
        shape = tuple(described.input_shape)
        if not shape or any(size < 1 for size in shape):
            problem = f"Found {shape}. Expected one or more sizes of at least 1. Set the shape of the activations."
            raise UnsupportedConfigField(None, f"{path}input_shape", problem)
        num_activations[described.table_id] += math.prod(shape)
        table = tables[described.table_id]
        features.append(FeatureConfig(table, output_shape=shape, name=described.name or None))
    _check_counts(message, num_activations)
    return features


def _check_counts(message: Any, num_activations: Sequence[int]) -> None:
    """Descriptors and counts may both be there, as in a configuration that an engine has completed, if they say the
    same.
    """
    batch_size = message.batch_size_per_tensor_core
    for described, expected in zip(message.table_descriptor, num_activations, strict=True):
        if not expected:
            problem = "Found no feature of this table. Expected at least one. Add a feature, or remove the table."
            raise UnsupportedConfigField(described.name, "feature_descriptor", problem)
        if (batch_size or described.num_features) and described.num_features * batch_size != expected:
            raise UnsupportedConfigField(
                described.name,
                "num_features",
                f"Found num_features={described.num_features} and batch_size_per_tensor_core={batch_size}, but feature "
                f"descriptors with {expected} activations. Expected neither, or the same number. Leave num_features "
                "and batch_size_per_tensor_core out.",
            )


def _read_counts(message: Any, tables: Sequence[TableConfig]) -> list[FeatureConfig]:
    batch_size = message.batch_size_per_tensor_core
    if batch_size < 1:
        problem = f"Found {batch_size} and no feature_descriptor. Expected one of the two. Set the samples per core."
        raise UnsupportedConfigField(None, "batch_size_per_tensor_core", problem)
    features = []
    for described, table in zip(message.table_descriptor, tables, strict=True):
        if described.num_features < 1:
            problem = (
                f"Found {described.num_features} and no feature_descriptor. Expected at least 1. Count the features."
            )
            raise UnsupportedConfigField(described.name, "num_features", problem)
        features.append(FeatureConfig(table, output_shape=(batch_size * described.num_features,)))
    return features
