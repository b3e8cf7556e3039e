"""What a host does for tables that live on its devices: `DeviceIds` with each batch, `DeviceRows` between commits.

`DeviceIds` writes the ids of a batch into the memory of the device, in rooms that `id_rooms.py` finds.

The host owns its buckets of such a table, saves them and restores them like those of others. Before the first step of a
generation `DeviceRows` gives the device what the host owns. For a commit it takes back the rows that changed, so deltas
and the undo log hold no others. Between two commits the host's own rows are those of the last one. So training goes on
from them after a fault without a read of the storage, and norms ask the devices for single rows. Rows on devices are in
`workers/device/tables`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.device.shared_memory import ChannelEnd, IdsLayout, Record, RecordKind
from podembed.workers.host.id_rooms import IdRooms, write_bags
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import LARGEST_LEVELS, PaddingLevels
from podembed.workers.job.tables import Bags, device_tables, weighted_features
from podembed.workers.liveness.progress import Phase, Tracker

ROW_BYTES = 16 << 20
"""Rows that are handed over at once, unless a bucket is larger. Pages that stay unused take no memory."""


def ids_layout(job: JobConfig, specs: Sequence[TableSpec], *, num_samples: int) -> IdsLayout:
    """The arrays for the tables on devices.

    Args:
      specs: specs of all tables.
      num_samples: number of samples of this host's share of a batch, with padding.
    """
    held, bags = device_tables(job), Bags(job)
    if not held:
        return IdsLayout()
    return IdsLayout(
        num_bags={name: num_samples * math.prod(job.activation_shapes[name][:-1]) for name in job.device_features},
        weighted=weighted_features(job),
        of_positions=frozenset(name for name in job.device_features if bags.positions(name)),
        num_tables=len(held),
        num_arrays=sum(specs[one.at].is_sharded for one in held),
        row_floats=max(ROW_BYTES, *(specs[one.at].bucket_bytes for one in held)) // 4,
    )


class DeviceIds:
    """The ids of one host in one generation. Mutated: the shared memory.

    Args:
      specs: specs of all tables.
      device: the end of the memory that is shared with the device process.
      num_hosts: number of hosts.
    """

    def __init__(self, job: JobConfig, specs: Sequence[TableSpec], device: ChannelEnd, *, num_hosts: int) -> None:
        self._device, self._layout = device, device.layout.on_devices
        self._tables = [table.at for table in device_tables(job)]
        self._rooms = IdRooms(
            {name: feature.table.vocabulary_size for name, feature in job.device_features.items()},
            [(specs[table.at], table.features) for table in device_tables(job)],
            num_hosts=num_hosts,
        )

    def levels(self, bags: Mapping[str, Ragged], others: PaddingLevels) -> PaddingLevels:
        """The room that a batch needs: `others` of its sequences, and behind them those of `IdRooms.levels`.

        Raises:
          InputError: an id lies outside its table, or a bag has too many of them.
        """
        if not self._layout.num_bags:
            return others
        own = self._rooms.levels(bags, self._layout.num_bags, num_devices=self._device.num_devices)
        return (*(others or LARGEST_LEVELS), *own)

    def agreed(self, levels: PaddingLevels) -> None:
        """Takes the levels of all hosts."""
        if self._layout.num_bags:
            self._rooms.agreed(levels[len(LARGEST_LEVELS) :])

    def write(self, buffer: int, bags: Mapping[str, Ragged], levels: PaddingLevels) -> None:
        """Into the memory of a batch."""
        arrays, own = self._device.buffers[buffer], levels[len(LARGEST_LEVELS) :]
        self._layout.say_levels(arrays, own)
        num_devices = self._device.num_devices
        for name, out in self._layout.bags_in(arrays, own, num_devices=num_devices).items():
            write_bags(out, bags[name], self._layout.num_bags[name], num_devices)

    def say_rates(self, buffer: int, rates: Sequence[float]) -> None:
        """The learning rates of a step.

        Args:
          rates: rates of all tables of the job.
        """
        self._layout.rates_in(self._device.buffers[buffer])[:] = [rates[at] for at in self._tables]


class RowsEnd(Protocol):
    """What `DeviceRows` needs of a `ChannelEnd`."""

    @property
    def row_memory(self) -> np.ndarray: ...

    def send(self, record: Record) -> None: ...

    def receive(self, *, timeout_s: float, keep_waiting: Callable[[], None] | None = None) -> Record: ...


class DeviceRows:
    """The buckets of one host in one generation. Mutated: the tables, and the shared memory.

    Args:
      tables: by number those that live on devices, as this host holds them.
      device: the end of the memory that is shared with the device process.
      timeout_s: longest wait for the device.
      check: called in each wait; raises to end it.
      tracker: sees each bucket pass.
    """

    def __init__(
        self,
        tables: Mapping[int, Table],
        device: RowsEnd,
        *,
        timeout_s: float,
        check: Callable[[], None],
        tracker: Tracker,
    ) -> None:
        self.tables, self._device, self._timeout_s = tables, device, timeout_s
        self._check, self._tracker = check, tracker
        self._is_given = False

    def give(self) -> None:
        """Gives the device process its rows before the first step; later calls do nothing.

        Raises:
          ChannelError: the device process is gone or silent.
        """
        if self._is_given or not self.tables:
            return
        with self._tracker.phase(Phase.DEVICE):
            for number, table in self.tables.items():
                for first, count in self._runs(table):
                    at = 0
                    for bucket in range(first, first + count):
                        for values in table.bucket(bucket).values():
                            own = values[: table.spec.layout.num_rows_of(bucket)]
                            self._device.row_memory[at : at + own.size].reshape(own.shape)[...] = own
                            at += own.size
                    self._ask(RecordKind.GIVE_BUCKETS, number, first, count)
            self._ask(RecordKind.JOIN_BUCKETS)
        self._is_given = True

    def _runs(self, table: Table) -> Iterator[tuple[int, int]]:
        """This host's buckets of a table: the first and the number of those that are handed over at once."""
        most = max(1, 4 * len(self._device.row_memory) // table.spec.bucket_bytes)
        buckets = np.sort(table.buckets)
        for run in np.split(buckets, np.flatnonzero(np.diff(buckets) != 1) + 1):
            for at in range(0, len(run), most):
                yield int(run[at]), len(run[at : at + most])

    def take(self) -> None:
        """Takes the rows of this host that changed since they were given or taken, as they are after the last step.

        Raises:
          ChannelError: the device process is gone or silent.
        """
        if not self.tables:
            return
        # Before the first step devices have what hosts have.
        given = self.tables if self._is_given else {}
        with self._tracker.phase(Phase.DEVICE):
            for number, table in given.items():
                # A table that is not trained never changes.
                num_taken, left = 0, int(table.spec.optimizer is not None)
                while left:
                    answer = self._ask(RecordKind.TAKE_CHANGED, number, num_taken)
                    num_taken, (left, _) = num_taken + answer.buffer, answer.levels
                    self._replace(table, answer.buffer)
        self._device.send(Record(kind=RecordKind.END, step=0))

    def values(self, number: int, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows and their slots as the devices have them now, between two steps: float32 `[n, width]` by name.

        Args:
          number: number of the table.
          ids: int64 `[n]`, of any rows.

        Raises:
          ChannelError: the device process is gone or silent.
        """
        widths = self.tables[number].spec.widths
        found = {name: np.empty((len(ids), width), np.float32) for name, width in widths.items()}
        room = len(self._device.row_memory) // sum(widths.values())
        with self._tracker.phase(Phase.DEVICE):
            for first in range(0, len(ids), room):
                part = ids[first : first + room]
                self._device.row_memory[: len(part)].view(np.int32)[:] = part
                self._ask(RecordKind.TAKE_ROWS, number, len(part))
                at = 0
                for name, width in widths.items():
                    memory = self._device.row_memory[at : at + len(part) * width]
                    found[name][first : first + len(part)] = memory.reshape(-1, width)
                    at += memory.size
        return found

    def _replace(self, table: Table, count: int) -> None:
        """Takes so many rows from the memory. All hosts get those of a replicated table, and each keeps its own."""
        memory, at, found = self._device.row_memory, count, {}
        for name, width in table.spec.widths.items():
            found[name] = memory[at : at + count * width].reshape(count, width)
            at += count * width
        rows = table.index.rows_of(memory[:count].view(np.int32).astype(np.int64))
        is_own = rows >= 0
        if is_own.any():
            table.announce(rows[is_own])
            table.store.write(rows[is_own], {name: values[is_own] for name, values in found.items()})

    def _ask(self, kind: RecordKind, number: int = 0, buffer: int = 0, count: int = 0) -> Record:
        self._device.send(Record(kind=kind, step=number, buffer=buffer, levels=(count, 0)))
        answer = self._device.receive(timeout_s=self._timeout_s, keep_waiting=self._check)
        if answer.kind is not RecordKind.DONE or answer.step != number:
            raise RuntimeError(
                f"The device process answered {answer.kind.name} for table {answer.step}. Expected DONE for table "
                f"{number}."
            )
        self._tracker.mark()
        return answer
