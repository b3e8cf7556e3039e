"""What a host does for tables that live on its devices: `DeviceIds` with each batch, `DeviceRows` between commits.

`DeviceIds` writes the ids of a batch into the memory of the device.

The host owns its buckets of such a table, saves them and restores them like those of others. Before the first step of a
generation `DeviceRows` gives the device what the host owns. For a commit it takes back the rows that changed, so deltas
and the undo log hold no others. Between two commits the host's own rows are those of the last one. So training goes on
from them after a fault without a read of the storage, and norms ask the devices for single rows. Rows on devices are in
`workers/device/tables`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.embedding.shards import sharded_arrays
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.data.input_errors import InputError
from podembed.workers.device.shared_memory import BagArrays, ChannelEnd, IdsLayout, Record, RecordKind
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import LARGEST_LEVELS, ONE_ID, PaddingLevels, most_ids, room_level, rows_of_room
from podembed.workers.job.tables import Bags, device_tables, weighted_features
from podembed.workers.liveness.progress import Phase, Tracker

ROW_BYTES = 16 << 20
"""Rows that are handed over at once, unless a bucket is larger. Pages that stay unused take no memory."""
_LOOK_EVERY = 256
"""Batches from one look at how many distinct rows they name to the next. Of the first ones more are looked at."""


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
    """The ids of one host in one generation. Mutated: the padding levels that hosts agreed on, and the shared
    memory.

    Args:
      specs: specs of all tables.
      device: the end of the memory that is shared with the device process.
      num_hosts: number of hosts.
    """

    def __init__(self, job: JobConfig, specs: Sequence[TableSpec], device: ChannelEnd, *, num_hosts: int) -> None:
        self._device, self._layout, self._num_hosts = device, device.layout.on_devices, num_hosts
        self._num_rows = {name: feature.table.vocabulary_size for name, feature in job.device_features.items()}
        self._levels: tuple[int, ...] = ()
        self._held = [(specs[table.at], [*table.features]) for table in device_tables(job)]
        self._tables = [table.at for table in device_tables(job)]
        self._num_batches = 0

    def levels(self, bags: Mapping[str, Ragged], others: PaddingLevels) -> PaddingLevels:
        """The room that a batch needs: `others` of its sequences, behind them one level a feature, and one an array of
        sharded tables.

        Raises:
          InputError: an id lies outside its table, or a bag has too many of them.
        """
        if not self._num_rows:
            return others
        before = self._levels or (ONE_ID,) * len(self._num_rows)
        own = [self._level(name, bags[name], level) for name, level in zip(self._num_rows, before, strict=False)]
        self._num_batches += 1
        if self._num_batches & (self._num_batches - 1) and self._num_batches % _LOOK_EVERY:
            own += self._levels[len(own) :]
        else:
            # Numbers of distinct rows change little from one batch to another.
            own += self._room_levels(bags)
        return (*(others or LARGEST_LEVELS), *map(min, own, self._levels or own))

    def _room_levels(self, bags: Mapping[str, Ragged]) -> list[int]:
        num_devices, features = self._device.num_devices, {spec.name: names for spec, names in self._held}
        levels = []
        for array in sharded_arrays([spec for spec, _ in self._held], self._num_hosts * num_devices):
            expected = [0.0] * num_devices
            for at, (table, layout) in itertools.product(range(num_devices), array.tables.items()):
                wanted = np.concatenate([_part(bags[name], at, num_devices) for name in features[table]])
                expected[at] += layout.largest_share * len(np.unique(wanted))
            levels.append(room_level(max(expected)))
        return levels

    def _level(self, name: str, bags: Ragged, before: int) -> int:
        values, num_rows = bags.values, self._num_rows[name]
        if len(values) and not 0 <= values.min() <= values.max() < num_rows:
            wrong = values[(values < 0) | (values >= num_rows)]
            raise InputError(
                f"Found id {wrong[0]} of feature '{name}'. Expected 0 to {num_rows - 1}, the rows of its table. Raise "
                "vocabulary_size, or set invalid_ids of the table."
            )
        if before == ONE_ID and np.diff(bags.row_splits).max(initial=0) <= 1:
            return ONE_ID
        count, num_devices = self._layout.num_bags[name], self._device.num_devices
        largest = int(np.diff(_ends(bags, count, num_devices)).max())
        most = most_ids(count) // num_devices
        if largest > most:
            raise InputError(
                f"Found {largest} ids of feature '{name}' in a device's part of a batch. Expected at most {most}, "
                "since its table lies on devices. Leave place out, which keeps the table on the hosts, or make batches "
                "smaller."
            )
        return before if before != ONE_ID and rows_of_room(before) >= largest else room_level(largest)

    def agreed(self, levels: PaddingLevels) -> None:
        """Takes the levels of all hosts. A room never becomes smaller."""
        self._levels = levels[len(LARGEST_LEVELS) :]

    def write(self, buffer: int, bags: Mapping[str, Ragged], levels: PaddingLevels) -> None:
        """Into the memory of a batch."""
        arrays, own = self._device.buffers[buffer], levels[len(LARGEST_LEVELS) :]
        self._layout.say_levels(arrays, own)
        num_devices = self._device.num_devices
        for name, out in self._layout.bags_in(arrays, own, num_devices=num_devices).items():
            _fill(out, bags[name], self._layout.num_bags[name], num_devices)

    def say_rates(self, buffer: int, rates: Sequence[float]) -> None:
        """The learning rates of a step.

        Args:
          rates: rates of all tables of the job.
        """
        self._layout.rates_in(self._device.buffers[buffer])[:] = [rates[at] for at in self._tables]


def _part(bags: Ragged, at: int, num_parts: int) -> np.ndarray:
    """About the ids of one device."""
    begin, end = at * len(bags.values) // num_parts, (at + 1) * len(bags.values) // num_parts
    return bags.values[begin:end]


def _ends(bags: Ragged, num_bags: int, num_devices: int) -> np.ndarray:
    """int64 `[num_devices + 1]`: where the ids of each device begin among the ids, and where the last one's end."""
    firsts = np.minimum(np.arange(num_devices + 1) * (num_bags // num_devices), bags.num_samples)
    return bags.row_splits[firsts] - bags.row_splits[0]


def _fill(out: BagArrays, bags: Ragged, num_bags: int, num_devices: int) -> None:
    """Bags behind those that there are become empty."""
    count, lengths, per_device = bags.num_samples, np.diff(bags.row_splits), num_bags // num_devices
    if out.bags is None:
        out.rows[count:] = -1
        places: Any = np.s_[:count]
        if bags.num_ids != count:
            out.rows[:count] = -1
            places = np.flatnonzero(lengths)
    else:
        ends, room = _ends(bags, num_bags, num_devices), len(out.rows) // num_devices
        own = np.diff(ends)
        places = np.arange(bags.num_ids) + np.repeat(np.arange(num_devices) * room - ends[:-1], own)
        out.rows[...], out.bags[...] = -1, per_device
        out.bags[places] = np.repeat(np.arange(count) % per_device, lengths)
    out.rows[places] = bags.values
    if out.weights is not None:
        out.weights[...] = 0
        out.weights[places] = 1.0 if bags.weights is None else bags.weights


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
        device: ChannelEnd,
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
