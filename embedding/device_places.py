"""Which tables may live on devices (`problem_on_devices`), and which do where nobody says so (`auto_places`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import ROW_OPTIMIZERS, CustomRowOptimizer, Optimizer
from podembed.embedding.shards import fewest_buckets

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


AUTO_SHARE = 0.5
"""Share of a device's memory that tables may take with place='auto'. The model and what a step computes need the rest,
and `podembed compile` says how much that is."""
_LINE = 128
ON_CPUS = "devices are CPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """The memory of the devices over which tables may be cut.

    Attributes:
      kind: what they are called, such as `TPU-V6E`.
      memory_bytes: bytes of memory of one.
      num_parts: devices that have parts of their own.
      is_tpu: rows lie in lines of 128 numbers, which one row or several share. Elsewhere they follow each other.
    """

    kind: str
    memory_bytes: int
    num_parts: int
    is_tpu: bool = False

    def part_bytes(self, table: TableConfig, default: Optimizer) -> int:
        """Bytes of a table with its slots on the device that has most of it, with a byte a row that says whether it
        changed.

        Args:
          default: optimizer of a table that has none of its own.
        """
        optimizer = default if table.optimizer is None else table.optimizer
        row_bytes = optimizer.row_bytes(table.dim) + 1 if table.trainable else 4 * table.dim
        if self.is_tpu:
            is_alone = table.trainable and optimizer.touches_all_rows
            lines = -(-table.dim // _LINE) / (1 if is_alone else max(1, _LINE // table.dim))
            row_bytes = math.ceil(row_bytes * lines * _LINE / table.dim)
        if table.is_on_devices and not table.is_sharded:
            return row_bytes * table.vocabulary_size
        buckets = fewest_buckets(table.vocabulary_size)
        return -(-buckets // self.num_parts) * -(-table.vocabulary_size // buckets) * row_bytes


class AutoPlace(NamedTuple):
    """A place that was chosen: `host` or `sharded`, and why, for the user."""

    place: str
    why: str


def auto_places(tables: Mapping[str, TableConfig], default: Optimizer, room: DeviceRoom | str) -> dict[str, AutoPlace]:
    """Chooses for the tables with place='auto'. The smallest go to the devices first, since a step asks as much of a
    small table as of a large one. Tables of one width and rule are looked up at once, so one more costs little.

    Args:
      tables: all tables of a job by their names. Those that are declared to be on devices take their memory first.
      default: optimizer of a table that has none of its own.
      room: devices; or why there are none for tables, such as "devices are CPUs".
    """
    waiting = {name: table for name, table in tables.items() if table.place == "auto"}
    if isinstance(room, str):
        return {name: AutoPlace("host", f"place='auto', and {room}") for name in waiting}
    declared = [table for table in tables.values() if table.is_on_devices]
    free = AUTO_SHARE * room.memory_bytes - sum(room.part_bytes(table, default) for table in declared)
    found = {}
    for name, table in sorted(waiting.items(), key=lambda item: room.part_bytes(item[1], default)):
        sharded = copy.copy(table)
        sharded.place = "sharded"
        size = room.part_bytes(sharded, default)
        sizes = f"{_mib(size)} on each of {room.num_parts} x {room.kind}, where {_mib(free)} are left for tables"
        if table.dynamic_keys is not None:
            found[name] = AutoPlace("host", "place='auto', and hosts decide which keys have a row")
        elif problem_on_devices(sharded, default) is not None:
            found[name] = AutoPlace("host", "place='auto', and place='sharded' would be refused")
        elif size > free:
            found[name] = AutoPlace("host", f"place='auto': {sizes}")
        else:
            found[name] = AutoPlace("sharded", f"place='auto': {sizes}")
            free -= size
    return {name: found[name] for name in waiting}


def _mib(size: float) -> str:
    return f"{max(0, math.ceil(size / (1 << 20))):,} MiB"
