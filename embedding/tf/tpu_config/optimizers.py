"""Optimizers and quantization of one table, to and from an `OptimizationParameters` message.

The message holds what an update needs and nothing else: first values of slots, creation functions and our own options
are not in it. Its numbers are float32; read back, a number is the shortest decimal that rounds to the same float32, so
0.1 comes back as 0.1. What a message can say and our optimizers cannot do is an `UnsupportedConfigField`, never
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.optimizers import ROW_OPTIMIZERS, Adagrad, Adam, Optimizer
from podembed.embedding.tf.tpu_config.checks import (
    UnsupportedConfigField,
    as_float32,
    reject_enum,
    reject_unknown_fields,
)

_ENABLED, _DISABLED = 1, 2
_PARAMETERS = "optimization_parameters"

# Optimizer class to the field that chooses it and, for each field of its message, the attribute it holds.
_MESSAGE_OF = {cls: cls.tpu_message for cls in ROW_OPTIMIZERS if cls.tpu_message is not None}
_CLASS_OF = {field: (cls, attributes) for cls, (field, attributes) in _MESSAGE_OF.items()}
_SUPPORTED = ", ".join(_CLASS_OF)


def write_optimizer(parameters: Any, optimizer: Optimizer, *, table: str, tag: int | None) -> None:
    """Fills an empty `OptimizationParameters` message from an optimizer, as `tf.tpu.experimental.embedding` does.

    Limits are written where given, also 0. A weight decay factor of None or 0 is left out, and with it the flag that
    multiplies it.

    Args:
      tag: tag of a callable learning rate, None for a constant one.

    Raises:
      UnsupportedConfigField: the message has no place for what the optimizer does.
    """
    _check_expressible(optimizer, table)
    if tag is None:
        parameters.learning_rate.constant = _written(optimizer.learning_rate, table, "learning_rate.constant")
    else:
        parameters.learning_rate.dynamic.tag = tag
    parameters.gradient_accumulation_status = _ENABLED if optimizer.use_gradient_accumulation else _DISABLED
    weight_limits = (optimizer.clip_weight_min, optimizer.clip_weight_max)
    _write_limits(parameters, "clipping_limits", weight_limits, table)
    gradient_limits = (optimizer.clip_gradient_min, optimizer.clip_gradient_max)
    _write_limits(parameters, "gradient_clipping_limits", gradient_limits, table)
    factor = _written(optimizer.weight_decay_factor or 0.0, table, "weight_decay_factor")
    if factor:
        parameters.weight_decay_factor = factor
        multiply = bool(optimizer.multiply_weight_decay_factor_by_learning_rate)
        parameters.multiply_weight_decay_factor_by_learning_rate = multiply
    if getattr(optimizer, "low_dimensional_packing_status", False):
        parameters.low_dimensional_packing_status = _ENABLED
    _write_rule(parameters, optimizer, table)


def forbid_accumulation(parameters: Any) -> None:
    """Makes an `OptimizationParameters` message apply the gradients of a row one by one."""
    parameters.gradient_accumulation_status = _DISABLED


def _check_expressible(optimizer: Optimizer, table: str) -> None:
    if type(optimizer) not in _MESSAGE_OF:
        raise UnsupportedConfigField(
            table,
            f"{_PARAMETERS}.parameters",
            f"Found {type(optimizer).__name__}, which no class of tf.tpu.experimental.embedding announces in a "
            f"TPUEmbeddingConfiguration. Expected an optimizer for {_SUPPORTED}. "
            "Give the table one of these, or keep its configuration in Python.",
        )
    if isinstance(optimizer, Adagrad) and optimizer.epsilon:
        raise UnsupportedConfigField(
            table,
            f"{_PARAMETERS}.adagrad",
            f"Found epsilon={optimizer.epsilon}. Expected 0, since the message has no field for it. "
            "Leave epsilon out, or use AdagradMomentum, which has one.",
        )
    if isinstance(optimizer, Adam) and optimizer.l2:
        raise UnsupportedConfigField(
            table,
            f"{_PARAMETERS}.adam",
            f"Found l2={optimizer.l2}. Expected 0, since the message has no field for it. "
            "Leave l2 out, or use weight_decay_factor, which is the decoupled decay.",
        )


def _written(value: Any, table: str, field: str) -> float:
    return as_float32(value, table=table, field=f"{_PARAMETERS}.{field}")


def _write_limits(parameters: Any, field: str, limits: tuple[float | None, float | None], table: str) -> None:
    for end, limit in zip(("lower", "upper"), limits, strict=True):
        if limit is not None:
            getattr(getattr(parameters, field), end).value = _written(limit, table, f"{field}.{end}")


def _write_rule(parameters: Any, optimizer: Optimizer, table: str) -> None:
    chosen, attributes = _MESSAGE_OF[type(optimizer)]
    rule = getattr(parameters, chosen)
    # Also an empty message must be on the wire: it is what chooses the optimizer.
    rule.SetInParent()
    for field, name in attributes.items():
        value = getattr(optimizer, name.removeprefix("not "))
        if isinstance(getattr(rule, field), bool):
            setattr(rule, field, bool(value) != name.startswith("not "))
        else:
            setattr(rule, field, _written(value, table, f"{chosen}.{field}"))


def write_quantization(parameters: Any, quantization: QuantizationConfig, *, table: str) -> None:
    """Fills the simulated quantization of an `OptimizationParameters` message.

    Raises:
      UnsupportedConfigField: a limit is no float32, or the number of buckets no int32.
    """
    simulated = parameters.simulated_quantization
    simulated.enabled = True
    try:
        simulated.num_buckets = quantization.num_buckets
    except ValueError:
        raise UnsupportedConfigField(
            table,
            f"{_PARAMETERS}.simulated_quantization.num_buckets",
            f"Found {quantization.num_buckets}. Expected an int32. Float32 rows do not have so many values: choose "
            "fewer.",
        ) from None
    limits = simulated.clipping_limits
    limits.lower.value = _written(quantization.lower, table, "simulated_quantization.clipping_limits.lower")
    limits.upper.value = _written(quantization.upper, table, "simulated_quantization.clipping_limits.upper")


def read_optimizer(parameters: Any, *, table: str, rate_of_tag: Callable[[int], Any]) -> Optimizer | None:
    """Returns the optimizer that an `OptimizationParameters` message describes, None if it describes none.

    Args:
      rate_of_tag: gives the learning rate that stands for a tag.

    Raises:
      UnsupportedConfigField: the message asks for something that none of our optimizers does.
    """
    chosen = parameters.WhichOneof("parameters")
    if chosen is not None and chosen not in _CLASS_OF:
        raise UnsupportedConfigField(
            table,
            f"{_PARAMETERS}.{chosen}",
            f"Found optimizer {chosen}. Expected one of {_SUPPORTED}. "
            "Choose one of these, or configure the table in Python with Momentum, Lion or a CustomRowOptimizer.",
        )
    reject_unknown_fields(parameters, table=table, path=f"{_PARAMETERS}.")
    _reject_hot_id_replication(parameters, table)
    if chosen is not None:
        options = _common_options(parameters, table, rate_of_tag)
        return _constructed(getattr(parameters, chosen), options, chosen, table)
    described = [field.name for field, _ in parameters.ListFields() if field.name != "simulated_quantization"]
    if described:
        raise UnsupportedConfigField(
            table,
            f"{_PARAMETERS}.parameters",
            f"Found {', '.join(described)} but no optimizer. Expected one of {_SUPPORTED}. "
            "Set the message of the optimizer, empty if it has no fields.",
        )
    return None


def _common_options(parameters: Any, table: str, rate_of_tag: Callable[[int], Any]) -> dict[str, Any]:
    rate = parameters.learning_rate
    kind = rate.WhichOneof("learning_rate")
    if kind is None:
        raise UnsupportedConfigField(
            table,
            f"{_PARAMETERS}.learning_rate",
            "Found no learning rate. Expected a constant or a tag. Set constant, also if it is 0, or dynamic.tag.",
        )
    weight_limits = _limits(parameters.clipping_limits, table, "clipping_limits")
    gradient_limits = _limits(parameters.gradient_clipping_limits, table, "gradient_clipping_limits")
    return {
        "learning_rate": _shortest(rate.constant) if kind == "constant" else rate_of_tag(rate.dynamic.tag),
        "use_gradient_accumulation": _status(parameters, "gradient_accumulation_status", table) != _DISABLED,
        "clip_weight_min": weight_limits[0],
        "clip_weight_max": weight_limits[1],
        "clipvalue": None if gradient_limits == (None, None) else gradient_limits,
        "weight_decay_factor": _shortest(parameters.weight_decay_factor) or None,
        "multiply_weight_decay_factor_by_learning_rate": parameters.multiply_weight_decay_factor_by_learning_rate
        or None,
        "low_dimensional_packing_status": _status(parameters, "low_dimensional_packing_status", table) == _ENABLED,
    }


def _status(parameters: Any, field: str, table: str) -> int:
    reject_enum(
        parameters,
        field,
        supported=("UNSPECIFIED", "ENABLED", "DISABLED"),
        table=table,
        path=f"{_PARAMETERS}.",
        remedy="Leave it out for the default.",
    )
    return getattr(parameters, field)


def _reject_hot_id_replication(parameters: Any, table: str) -> None:
    reject_enum(
        parameters.hot_id_replication_configuration,
        "status",
        supported=("UNSPECIFIED", "DISABLED"),
        table=table,
        path=f"{_PARAMETERS}.hot_id_replication_configuration.",
        remedy="Disable it: repeated ids are merged before they travel, so hot rows need no copies here.",
    )


def _limits(limits: Any, table: str, field: str) -> tuple[float | None, float | None]:
    found = [_shortest(getattr(limits, end).value) if limits.HasField(end) else None for end in ("lower", "upper")]
    if any(limit is not None and np.isnan(limit) for limit in found):
        problem = f"Found limits {found[0]} and {found[1]}. Expected numbers. Leave a limit out for none."
        raise UnsupportedConfigField(table, f"{_PARAMETERS}.{field}", problem)
    return found[0], found[1]


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32."""
    return float(str(np.float32(value)))


def _constructed(rule: Any, options: dict[str, Any], chosen: str, table: str) -> Optimizer:
    cls, attributes = _CLASS_OF[chosen]
    for field, name in attributes.items():
        value = getattr(rule, field)
        is_opposite = name.startswith("not ")
        options[name.removeprefix("not ")] = value != is_opposite if isinstance(value, bool) else _shortest(value)
    try:
        return cls(**options)
    except ValueError as error:
        # The constructor's message begins with the name of the argument it refuses.
        fields = {"clipvalue": "gradient_clipping_limits", "clip_weight": "clipping_limits"}
        fields |= {name.removeprefix("not "): f"{chosen}.{field}" for field, name in attributes.items()}
        refused = next((field for name, field in fields.items() if str(error).startswith(f"Found {name}")), chosen)
        raise UnsupportedConfigField(table, f"{_PARAMETERS}.{refused}", str(error)) from error


def read_quantization(parameters: Any, *, table: str) -> QuantizationConfig | None:
    """Returns the simulated quantization of an `OptimizationParameters` message, None if it is off.

    Raises:
      UnsupportedConfigField: fewer than 2 buckets, or limits that are missing, infinite or not increasing.
    """
    simulated = parameters.simulated_quantization
    if not simulated.enabled:
        return None
    field = f"{_PARAMETERS}.simulated_quantization"
    lower, upper = _limits(simulated.clipping_limits, table, "simulated_quantization.clipping_limits")
    if lower is None or upper is None or not np.isfinite(upper - lower) or not lower < upper:
        raise UnsupportedConfigField(
            table,
            f"{field}.clipping_limits",
            f"Found limits {lower} and {upper}. Expected two finite numbers, lower below upper. Set both, or turn "
            "quantization off.",
        )
    if simulated.num_buckets < 2:
        raise UnsupportedConfigField(
            table,
            f"{field}.num_buckets",
            f"Found {simulated.num_buckets} buckets. Expected 2 or more. Set more, or turn quantization off.",
        )
    return QuantizationConfig(num_buckets=simulated.num_buckets, lower=lower, upper=upper)
