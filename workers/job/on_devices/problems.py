"""Why a table cannot live on devices."""

from __future__ import annotations

from collections.abc import Mapping

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import ROW_OPTIMIZERS, CustomRowOptimizer, Optimizer

MOST_ROWS = 1 << 23
MOST_BYTES = 4 << 30
"""Most bytes of one table on each device, with its slots."""

_RULES = tuple(rule for rule in ROW_OPTIMIZERS if rule is not CustomRowOptimizer)
_HOST = "Leave place out, which keeps the table on the hosts"


def placement_problem(features: Mapping[str, FeatureConfig], optimizer: Optimizer, *, staleness: int) -> str | None:
    """What is wrong with the tables that a job wants on its devices, in sentences for the user; None if nothing is.

    Args:
      optimizer: optimizer of tables that have none of their own.
    """
    tables = {id(feature.table): feature.table for feature in features.values() if feature.table.is_on_devices}
    if tables and staleness:
        return (
            f"Found staleness={staleness} beside TableConfig(place='device'). Expected staleness=0, since devices look "
            f"up with every update in the table. {_HOST}, or set staleness=0."
        )
    return next((problem for table in tables.values() if (problem := _problem(table, optimizer))), None)


def _problem(table: TableConfig, default: Optimizer) -> str | None:
    optimizer = default if table.optimizer is None else table.optimizer
    name = f"table {table.name!r}"
    if table.vocabulary_size > MOST_ROWS:
        return (
            f"Found {name} of {table.vocabulary_size:,} rows with place='device'. Expected at most {MOST_ROWS:,}, "
            f"since every device holds all of it. {_HOST}."
        )
    row_bytes = optimizer.row_bytes(table.dim) if table.trainable else 4 * table.dim
    size = table.vocabulary_size * row_bytes
    if size > MOST_BYTES:
        return (
            f"Found {name} of {size:,} bytes with its slots, and place='device'. Expected at most {MOST_BYTES:,}, "
            f"since every device holds all of it. {_HOST}, or choose an optimizer with fewer slots."
        )
    if not table.trainable:
        return None
    if type(optimizer) not in _RULES:
        return (
            f"Found {name} with place='device' and a {type(optimizer).__name__}, whose rule is compiled for hosts. "
            f"Expected {', '.join(rule.__name__ for rule in _RULES)}. {_HOST}."
        )
    if not optimizer.use_gradient_accumulation:
        return (
            f"Found {name} with place='device' and use_gradient_accumulation=False. Expected accumulated gradients, "
            f"since devices update each row once a step. {_HOST}, or accumulate."
        )
    return None
