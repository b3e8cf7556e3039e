"""`problem_on_devices`: which tables may live on devices."""

from __future__ import annotations

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import ROW_OPTIMIZERS, CustomRowOptimizer, Optimizer

MOST_ROWS = 1 << 23
MOST_BYTES = 4 << 30
"""Most bytes of one table with place='replicated' on each device, with its slots."""
MOST_SHARDED_ROWS = 1 << 30
"""Of one table with place='sharded'. Places on all devices, with padding, are counted in 32 bits."""

ON_HOSTS = "Leave place out, which keeps the table on the hosts"


def problem_on_devices(table: TableConfig, default: Optimizer) -> str | None:
    """Why a table cannot live on devices, in sentences for the user; None if it can.

    Args:
      default: optimizer of a table that has none of its own.
    """
    optimizer = default if table.optimizer is None else table.optimizer
    name = f"table {table.name!r}"
    placed = f"place={table.place!r}"
    if table.is_sharded and table.vocabulary_size > MOST_SHARDED_ROWS:
        return (
            f"Found {name} of {table.vocabulary_size:,} rows with {placed}. Expected at most {MOST_SHARDED_ROWS:,}, "
            f"since devices count rows in 32 bits. {ON_HOSTS}."
        )
    if not table.is_sharded and table.vocabulary_size > MOST_ROWS:
        return (
            f"Found {name} of {table.vocabulary_size:,} rows with {placed}. Expected at most {MOST_ROWS:,}, since "
            f"every device holds all of it. {ON_HOSTS}, or say place='sharded'."
        )
    row_bytes = optimizer.row_bytes(table.dim) if table.trainable else 4 * table.dim
    size = table.vocabulary_size * row_bytes
    if not table.is_sharded and size > MOST_BYTES:
        return (
            f"Found {name} of {size:,} bytes with its slots, and {placed}. Expected at most {MOST_BYTES:,}, since "
            f"every device holds all of it. {ON_HOSTS}, say place='sharded', or choose an optimizer with fewer slots."
        )
    if not table.trainable:
        return None
    if type(optimizer) not in ROW_OPTIMIZERS:
        return (
            f"Found {name} with {placed} and a {type(optimizer).__name__}, whose rule is compiled for hosts. "
            f"Expected {', '.join(rule.__name__ for rule in ROW_OPTIMIZERS)}. {ON_HOSTS}."
        )
    if isinstance(optimizer, CustomRowOptimizer) and (why := optimizer.why_not_on_devices(table.dim)) is not None:
        return (
            f"Found {name} with {placed} and a CustomRowOptimizer whose rule JAX cannot trace: {why}. Expected "
            f"arithmetic and functions of numpy on whole arrays, without branches on their values. {ON_HOSTS}, or "
            "write the rule so."
        )
    if not optimizer.use_gradient_accumulation:
        return (
            f"Found {name} with {placed} and use_gradient_accumulation=False. Expected accumulated gradients, "
            f"since devices update each row once a step. {ON_HOSTS}, or accumulate."
        )
    return None
