"""`DeviceTables`: all that a host does for the tables on devices, in one generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from podembed.embedding.table.table import Table
from podembed.workers.device.shared_memory import ChannelEnd
from podembed.workers.device.tables.ids_layout import IdsLayout
from podembed.workers.host.device_tables.ids import DeviceIds, ids_layout
from podembed.workers.host.device_tables.rows import DeviceRows
from podembed.workers.host.row_norms import RowNorms
from podembed.workers.job.job import JobConfig
from podembed.workers.job.on_devices.declared import device_tables
from podembed.workers.liveness.progress import Tracker


class DeviceTables:
    """The tables on devices, as their host sees them.

    Args:
      tables: all of the shard, in the job's order.
    """

    def __init__(self, job: JobConfig, tables: Sequence[Table]) -> None:
        self._job, self._tables = job, tables

    def layout(self, *, num_samples: int) -> IdsLayout:
        """What the shared memory has for them, where this host's share of a batch has so many samples."""
        return ids_layout(self._job, [table.spec for table in self._tables], num_samples=num_samples)

    def ids(self, device: ChannelEnd) -> DeviceIds:
        """The ids of batches."""
        return DeviceIds(self._job, device)

    def norms(self, rows: DeviceRows) -> RowNorms:
        """Norms of rows of all tables, wherever these are.

        Args:
          rows: of tables on devices.
        """
        return RowNorms(self._tables, {table.at: partial(rows.values, table.at) for table in device_tables(self._job)})

    def rows(self, device: ChannelEnd, *, timeout_s: float, check: Callable[[], None], tracker: Tracker) -> DeviceRows:
        """The way of buckets."""
        held = {table.at: self._tables[table.at] for table in device_tables(self._job)}
        return DeviceRows(held, device, timeout_s=timeout_s, check=check, tracker=tracker)
