"""Lookups in whole tables of this process, for serving and evaluation: `serving_embedding_lookup` and
`TPUEmbeddingForServing`.

They follow TensorFlow's lookups on the CPU, which differ from those of training. Dense inputs keep their shape, sparse
ones may have bad ids and weights dropped (`validate_weights_and_indices`). Ids are checked on the host; the arithmetic
is JAX, so gradients flow into tables that are being differentiated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.features.id_policies import fit_ids, shown_path, without
from podembed.embedding.optimizers import Optimizer
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.table_storage import WrittenTables, storage
from podembed.embedding.tf.features.bags import bags_of
from podembed.embedding.tf.features.inputs import FeatureInput, read_input, weight_dtype, weight_kind, with_weight
from podembed.embedding.tf.features.shapes import is_sequence
from podembed.embedding.tf.features.structures import flatten, flatten_with_paths, pack_like, require_same_structure
from podembed.embedding.tf.keras.module_members import ModuleMembers
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.replicas.strategies import current_strategy
from podembed.embedding.tf.tpu_embedding.declared import DeclaredTables
from podembed.embedding.tf.tpu_embedding.host_tables import HostTables

_logger = logging.getLogger(__name__)


def serving_embedding_lookup(inputs: Any, weights: Any, tables: Mapping[TableConfig, Any], feature_config: Any) -> Any:
    """Looks features up in whole tables.

    Args:
      inputs: features in a structure like `feature_config`, which may leave features out.
      weights: None, or structured like `inputs`, with None where there are none.
      tables: by `TableConfig`, variables or arrays `[vocabulary_size, dim]`, such as `TPUEmbedding.embedding_tables`.
      feature_config: feature config as given to `TPUEmbedding`.

    Returns:
      float32 JAX arrays structured like `inputs`: `[*ids.shape, dim]` for dense ids, otherwise one vector a row, or one
      for each position of a sequence feature.

    Raises:
      ValueError: an unknown feature, an id outside the vocabulary, or weights where they cannot be.
      TypeError: weights nested in another type of sequence than the inputs.
    """
    features = dict(flatten_with_paths(feature_config))
    named = flatten_with_paths(inputs)
    for path, _ in named:
        if path not in features:
            raise ValueError(
                f"Found input {shown_path(path)}, which feature_config does not have. Expected some of "
                f"{sorted(features)}. Nest the inputs like feature_config."
            )
    flat_weights = [None] * len(named)
    if weights is not None:
        require_same_structure(inputs, weights, "weights")
        flat_weights = flatten(weights)
    outputs = []
    for (path, value), weight in zip(named, flat_weights, strict=True):
        feature = features[path]
        outputs.append(_lookup(path, value, weight, _array(tables[feature.table]), feature))
    return pack_like(inputs, outputs)


class TPUEmbeddingForServing(ModuleMembers):
    """Whole tables in this process, for serving and for training by gradients through the lookup.

    Made outside any strategy. `embedding(features, weights)` looks up; `embedding_tables` are trainable variables.

    Args:
      feature_config: feature config as for `TPUEmbedding`.
      optimizer: None makes no slots.

    Raises:
      RuntimeError: made in the scope of a strategy.
      ValueError: as for `TPUEmbedding`.
    """

    def __init__(self, feature_config: Any, optimizer: Optimizer | None = None) -> None:
        if current_strategy() is not None:
            raise RuntimeError(
                "TPUEmbeddingForServing is not supported inside the scope of a strategy. Expected none. Make it "
                "outside, or use TPUEmbedding."
            )
        self._declared = DeclaredTables.of(feature_config, optimizer, needs_optimizer=False)
        self._restore_from: str | None = None
        self._tables: HostTables | None = None

    def build(self) -> None:
        """Makes the tables with their first values, or those of an earlier `restore`. A second call does nothing."""
        self._built  # noqa: B018  # made when first requested

    @property
    def embedding_tables(self) -> dict[TableConfig, Variable]:
        """The tables without slots, by their `TableConfig`."""
        return self._built.variables

    def embedding_lookup(self, features: Any, weights: Any = None) -> Any:
        """As `serving_embedding_lookup`, in the tables of this object."""
        return serving_embedding_lookup(features, weights, self.embedding_tables, self._declared.structure)

    def __call__(self, features: Any, weights: Any = None) -> Any:
        return self.embedding_lookup(features, weights)

    def save(self, path: str) -> None:
        """Writes all tables to a new folder or URL."""
        self._built.save(path)

    def restore(self, path: str) -> None:
        """Fills the tables from what `save` of this class or of `TPUEmbedding` wrote; before `build` it waits for
        it.
        """
        if self._tables is not None:
            self._tables.restore(path)
        else:
            storage().describe(path)
            self._restore_from = path

    def write_tables(self, path: str) -> WrittenTables:
        """The files of `save`, for an index that names more than tables: see `Checkpoint`."""
        return self._built.write(path)

    @property
    def declared_specs(self) -> tuple[TableSpec, ...]:
        """The tables that the features use, in the order of first use."""
        return self._declared.specs(seed=0)

    def _held_variables(self) -> tuple[Variable, ...]:
        return tuple(self.embedding_tables.values())

    @property
    def _built(self) -> HostTables:
        if self._tables is None:
            self._tables = HostTables(self._declared, restore_from=self._restore_from)
        return self._tables


def _array(table: Any) -> jax.Array:
    return table.value if isinstance(table, Variable) else jnp.asarray(table)


def _lookup(path: str, value: Any, weight: Any, table: jax.Array, feature: FeatureConfig) -> jax.Array:
    found = read_input(path, value)
    if weight is not None:
        _check_weight(found, value, weight, feature)
    if found.kind == "dense":
        return _dense(found, table, feature)
    weighted = with_weight(found, weight)
    return _sparse(weighted, table, feature) if found.kind == "sparse" else _ragged(weighted, table, feature)


def _check_weight(found: FeatureInput, value: Any, weight: Any, feature: FeatureConfig) -> None:
    path = shown_path(found.path)
    if found.kind == "dense":
        raise ValueError(f"Weight specified for {path}, but input is dense. Expected None. Leave the weight out.")
    if weight_kind(weight) != found.kind:
        raise ValueError(
            f"Weight for {path} is of type {type(weight)} but it does not match type of the input which is "
            f"{type(value)}. Pass both in one form."
        )
    if feature.max_sequence_length > 0:
        raise ValueError(
            f"Weight specified for {path}, but this is a sequence feature. Expected None: its rows are not combined. "
            "Leave the weight out."
        )
    dtype = weight_dtype(weight)
    if _takes_weights_as_they_are(found, feature) and dtype is not None and dtype != np.float32:
        raise ValueError(
            f"Found {dtype} weights for {path}. Expected float32, the dtype of the table. Pass "
            "weights.astype(np.float32)."
        )


def _takes_weights_as_they_are(found: FeatureInput, feature: FeatureConfig) -> bool:
    """Whether TensorFlow multiplies by the weights without a cast; otherwise it casts them, or leaves them out."""
    if found.kind == "sparse":
        return _is_safe(found, feature)
    return not feature.output_shape or int(np.prod(_known(feature.output_shape))) == found.num_rows


def _is_safe(found: FeatureInput, feature: FeatureConfig) -> bool:
    """Whether a sparse lookup drops what is not valid."""
    return feature.validate_weights_and_indices or len(found.shape) > 2


def _dense(found: FeatureInput, table: jax.Array, feature: FeatureConfig) -> jax.Array:
    if feature.max_sequence_length > 0:
        raise ValueError(
            f"Feature {shown_path(found.path)} is a sequence feature but a dense tensor was passed. Expected Ragged or "
            "Sparse. Convert it."
        )
    one_each = Ragged(found.ids, np.arange(len(found.ids) + 1))
    if feature.table.invalid_ids == "drop":
        return _combined(_fitted(found, one_each, feature), "sum", table).reshape(*_known(found.shape), -1)
    return table[_fitted(found, one_each, feature).values].reshape(*_known(found.shape), table.shape[1])


def _sparse(found: FeatureInput, table: jax.Array, feature: FeatureConfig) -> jax.Array:
    shape = _known(found.shape)
    if is_sequence(feature) and len(shape) == 2:
        return _positions(found, shape[0], feature.max_sequence_length, table, feature)
    if feature.max_sequence_length > 0:
        _logger.warning(
            "max_sequence_length of feature %s is ignored: it has an output_shape or inputs of rank %d, not 2.",
            shown_path(found.path),
            len(shape),
        )
    bags = Ragged(found.ids, found.row_splits, found.weights)
    is_safe = _is_safe(found, feature)
    if is_safe:
        bags = _safe(bags, feature)
    pooled = _combined(_fitted(found, bags, feature), feature.combiner, table)
    if is_safe:
        return pooled.reshape(*shape[:-1], table.shape[1])
    # As TensorFlow does: the output ends with the last row that has an id.
    return pooled[: int(np.flatnonzero(np.diff(found.row_splits))[-1]) + 1 if len(found.ids) else 0]


def _safe(bags: Ragged, feature: FeatureConfig) -> Ragged:
    """Without negative ids, and without weights that are not positive unless they are only summed."""
    dropped = np.zeros(bags.num_ids, bool)
    if feature.table.invalid_ids == "error":
        dropped |= bags.values < 0
    if bags.weights is not None and feature.combiner != "sum":
        dropped |= bags.weights <= 0
    return without(bags, dropped) if dropped.any() else bags


def _ragged(found: FeatureInput, table: jax.Array, feature: FeatureConfig) -> jax.Array:
    num_rows, dim = found.num_rows, table.shape[1]
    if is_sequence(feature):
        return _positions(found, num_rows, feature.max_sequence_length, table, feature)
    bags = Ragged(found.ids, found.row_splits, found.weights)
    if not feature.output_shape:
        return _combined(_fitted(found, bags, feature), feature.combiner, table)
    shape = _known(feature.output_shape)
    num_vectors = int(np.prod(shape))
    if num_vectors == num_rows:
        return _combined(_fitted(found, bags, feature), feature.combiner, table).reshape(*shape, dim)
    if num_vectors < num_rows or num_rows == 0 or num_vectors % num_rows:
        raise ValueError(
            "Output shape set in the FeatureConfig should be the factor of the input data batch size. Found output "
            f"shape {shape} and {num_rows} rows for {shown_path(found.path)}. Expected as many rows as its product, or "
            "a divisor of it. Change one of them."
        )
    return _positions(found, num_rows, num_vectors // num_rows, table, feature).reshape(*shape, dim)


def _positions(found: FeatureInput, num_rows: int, length: int, table: jax.Array, feature: FeatureConfig) -> jax.Array:
    """`[num_rows, length, dim]`: the rows of a sample apart, zero vectors where there is none."""
    bags = bags_of(replace(found, weights=None), num_bags=num_rows * length, is_sequence=True)
    return _combined(_fitted(found, bags, feature), "sum", table).reshape(num_rows, length, table.shape[1])


def _fitted(found: FeatureInput, bags: Ragged, feature: FeatureConfig) -> Ragged:
    if feature.table.dynamic_keys is not None:
        raise ValueError(
            f"Found table '{feature.table.name}' with a capacity for {shown_path(found.path)}. Expected "
            "vocabulary_size, since an array has rows for ids from 0 on. Look up with the TPUEmbedding that trains it."
        )
    return fit_ids(found.path, bags, feature.table)[0]


def _known(shape: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(int(axis or 0) for axis in shape)


def _combined(bags: Ragged, combiner: str, table: jax.Array) -> jax.Array:
    """One vector a bag, zeros for empty bags and zero denominators."""
    num_bags = bags.num_samples
    bag = np.repeat(np.arange(num_bags), np.diff(bags.row_splits))
    rows = table[bags.values]
    weights = np.ones(bags.num_ids, np.float32) if bags.weights is None else bags.weights
    total = jnp.zeros((num_bags, table.shape[1]), table.dtype).at[bag].add(rows * weights[:, None])
    if combiner == "sum":
        return total
    amounts = weights if combiner == "mean" else weights * weights
    denominator = np.zeros(num_bags, np.float32)
    np.add.at(denominator, bag, amounts)
    if combiner == "sqrtn":
        denominator = np.sqrt(denominator)
    is_zero = denominator == 0
    return jnp.where(is_zero[:, None], 0, total / np.where(is_zero, 1, denominator)[:, None])
