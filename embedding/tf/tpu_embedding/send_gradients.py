"""`send_tpu_embedding_gradients`: the op below `TPUEmbedding.apply_gradients`, for code that speaks to the engine
directly.

The engine is found by the serialized configuration it was started with. Both layouts of that configuration are
understood. There is one gradient per feature (TensorFlow 2.21, feature descriptors), or one per table with the features
of a sample side by side (2.3, `num_features`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from podembed.embedding.tf.engine.engine import Engine
from podembed.embedding.tf.engine.order import ANY_NAME
from podembed.embedding.tf.features.bags import share_ends
from podembed.embedding.tf.features.inputs import host_array
from podembed.embedding.tf.replicas.dynamic_rates import RatesQuestion, agreed
from podembed.embedding.tf.replicas.strategies import running_engines
from podembed.embedding.tf.tpu_config.serialized import check_learning_rates, parse_config
from podembed.embedding.tf.tracing import require_eager


def send_tpu_embedding_gradients(
    inputs: Sequence[Any], learning_rates: Sequence[Any], config: bytes, name: str | None = None
) -> None:
    """Updates the tables with the gradients of the activations last dequeued.

    Args:
      inputs: float32 arrays in the order of the configuration: per feature of the shape of its activations. Or, for a
        configuration with `num_features`, per table `[batch * num_features, dim]`, sample after sample.
      learning_rates: one float32 scalar for each dynamic tag, in the order of the tags; empty if every rate is
        constant.
      config: config as `TPUEmbedding.serialized_config`.
      name: name of the operation in TensorFlow's graphs, and without effect as there: gradients are those of the batch
        in turn, under whatever name it was enqueued.

    Raises:
      RuntimeError: no engine runs, no training batch waits for gradients, or called inside a function that JAX traces.
      ValueError: the configuration is that of no running engine, rates or gradients are missing or too many, or a shape
        is wrong. Inside `strategy.run` also, replicas gave different rates.
      TypeError: a gradient is not a float32 array.
    """
    require_eager("send_tpu_embedding_gradients", "Return the gradients from the function and send them once a step.")
    message = parse_config(config)
    engine = _engine_of(bytes(config))
    rates = check_learning_rates(message, learning_rates)
    gradients = [_as_array(at, gradient) for at, gradient in enumerate(inputs)]
    if message.feature_descriptor:
        per_feature = _per_feature(engine, gradients)
    else:
        per_feature = _from_tables(engine, gradients)
    described = [table.optimization_parameters.learning_rate for table in message.table_descriptor]

    def rates_of_tables(step: int) -> list[float]:
        # Replicas may have found their rates each by itself, and tables must not get different ones.
        same = agreed(RatesQuestion(step=step, given=tuple(float(rate) for rate in rates)))
        return [_rate(one, same) for one in described]

    shares = _shares(engine, per_feature, engine.sizes_to_update(ANY_NAME))
    engine.apply_gradients(shares, rates_of_tables if rates else [_rate(one, ()) for one in described], ANY_NAME)


def _engine_of(config: bytes) -> Engine:
    engines = running_engines()
    if not engines:
        raise RuntimeError(
            "Found no running engine. Expected a TPUEmbedding that was built in the scope of a strategy. Build one "
            "first."
        )
    for engine in engines:
        if config in engine.spec.configs:
            return engine
    raise ValueError(
        f"Found a configuration of {len(config)} bytes that none of {len(engines)} running engines was started with. "
        "Expected TPUEmbedding.serialized_config of one of them. Pass that."
    )


def _as_array(at: int, gradient: Any) -> np.ndarray:
    if not isinstance(gradient, jax.Array | np.ndarray) or gradient.dtype != np.float32:
        found = getattr(gradient, "dtype", type(gradient))
        raise TypeError(
            f"Found {found} as input {at}. Expected a float32 array. Pass zeros where there is no gradient."
        )
    return host_array(str(at), gradient)


def _per_feature(engine: Engine, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
    features, tables = engine.spec.features, engine.spec.tables
    _require_count(len(gradients), len(features), "feature")
    for at, (gradient, feature) in enumerate(zip(gradients, features, strict=True)):
        if gradient.ndim < 2 or gradient.shape[-1] != tables[feature.table].dim:
            raise ValueError(
                f"Found input {at} of shape {gradient.shape}. Expected [*output_shape, {tables[feature.table].dim}], "
                f"the shape of the activations of feature {at}. Pass the gradients in flat order."
            )
    return list(gradients)


def _from_tables(engine: Engine, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Takes the tensors of tables apart: `[batch, places, dim]`, where a sequence feature has as many places as
    positions.
    """
    spec = engine.spec
    _require_count(len(gradients), len(spec.tables), "table")
    places = [
        sum(p for p, f in zip(spec.positions, spec.features, strict=True) if f.table == t)
        for t in range(len(spec.tables))
    ]
    next_place = [0] * len(spec.tables)
    found = []
    for positions, feature in zip(spec.positions, spec.features, strict=True):
        gradient, dim, count = gradients[feature.table], spec.tables[feature.table].dim, places[feature.table]
        if gradient.ndim != 2 or gradient.shape[1] != dim or len(gradient) % count:
            raise ValueError(
                f"Found the gradient of table {feature.table} with shape {gradient.shape}. Expected [batch * {count}, "
                f"{dim}]: {count} places a "
                "sample, those of a sequence counted singly. Lay the features of a sample side by side."
            )
        first = next_place[feature.table]
        next_place[feature.table] += positions
        own = gradient.reshape(-1, count, dim)[:, first : first + positions]
        # One axis for batch and position, as the activations have.
        found.append(np.ascontiguousarray(own).reshape(len(own), positions, dim) if positions > 1 else own[:, 0])
    return found


def _require_count(found: int, expected: int, what: str) -> None:
    if found != expected:
        raise ValueError(
            f"Found {found} inputs. Expected {expected}, one per {what} of the configuration. Pass zeros where there "
            "is no gradient."
        )


def _rate(described: Any, rates: Sequence[float]) -> float:
    if described.WhichOneof("learning_rate") == "dynamic":
        return rates[described.dynamic.tag]
    return float(described.constant)


def _shares(engine: Engine, gradients: Sequence[np.ndarray], sizes: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """Per share and feature float32 `[num_bags, dim]`. `sizes`: as of `Engine.sizes_to_update`."""
    shares: list[list[np.ndarray]] = [[] for _ in range(engine.num_shares)]
    for at, gradient in enumerate(gradients):
        flat = gradient.reshape(-1, gradient.shape[-1])
        own = [share[at] for share in sizes] if all(sizes) else []
        if sum(own) == len(flat):
            ends = [0, *np.cumsum(own).tolist()]
        else:
            # Nothing waits for these, which the engine says.
            ends = share_ends(len(flat), len(gradient), engine.num_shares)
        for share, own in enumerate(shares):
            own.append(flat[ends[share] : ends[share + 1]])
    return shares
