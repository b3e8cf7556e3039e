"""Tables on the devices of this process: the port through which an engine, which knows no devices, reaches them.

The package one floor up implements it (`workers.stepwise.sharded_tables`). It is looked up by name when a table is
first declared so. This module therefore imports nothing from above.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from podembed.embedding.device_places import DeviceRoom
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.table import Table
from podembed.embedding.tf.engine.engine import EngineSpec

_TABLES = "podembed.workers.stepwise.sharded_tables"
_ROOM = "podembed.workers.device.room"


class DeviceTables(Protocol):
    """The sharded tables of an engine. Their rows on hosts are those that were last given or taken. Mutable."""

    def give(self) -> None:
        """Brings rows and slots from this host to the devices."""
        ...

    def take(self) -> None:
        """Brings the rows that changed back to this host."""
        ...

    def look_up(self, bags: Sequence[Ragged]) -> tuple[Any, list[Any]]:
        """What `update` needs of a batch, and its activations: JAX arrays `[num_bags, dim]` over the devices.

        Args:
          bags: one for each feature of these tables, in the order of the features.
        """
        ...

    def update(self, asked: Any, gradients: Sequence[Any], learning_rates: Sequence[float]) -> None:
        """Updates the rows of a batch.

        Args:
          asked: as from `look_up`.
          gradients: gradients of the activations, arrays of numpy or JAX.
          learning_rates: one a table of the engine.
        """
        ...

    def placed(self, activations: np.ndarray) -> Any:
        """Activations of a table on this host as a JAX array that lies as those of `look_up` do."""
        ...


def devices_here() -> DeviceRoom | str:
    """The devices of this process, or why there are none for tables."""
    return importlib.import_module(_ROOM).room_here()


def cut_for_devices(spec: EngineSpec) -> EngineSpec:
    """The same with so many buckets of each sharded table that all devices of this process have an even share."""
    if not any(table.is_sharded for table in spec.tables):
        return spec
    return importlib.import_module(_TABLES).cut_for_devices(spec)


def device_tables(spec: EngineSpec, tables: Mapping[int, Table]) -> DeviceTables:
    """The sharded tables of an engine.

    Args:
      tables: by position those that are sharded, as this host holds them.
    """
    return importlib.import_module(_TABLES).ShardedTables(spec, tables)
