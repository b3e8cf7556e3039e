"""`IdRooms`: how much room the ids of a batch need on the devices of a host; `write_bags` lays them out in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.embedding.shards import sharded_arrays
from podembed.embedding.table_spec import TableSpec
from podembed.workers.data.input_errors import InputError
from podembed.workers.device.shared_memory import BagArrays
from podembed.workers.job.padding import ONE_ID, PaddingLevels, most_ids, room_level, rows_of_room

_LOOK_EVERY = 256
"""Batches from one look at how many distinct rows they name to the next. Of the first ones more are looked at."""


class IdRooms:
    """The rooms of ids that batches need. Mutated: the levels that hosts agreed on.

    Args:
      num_rows: rows of the table of each feature, in the order of the levels.
      tables: tables on devices, with the features that look up in them.
      num_hosts: number of hosts.
    """

    def __init__(
        self, num_rows: Mapping[str, int], tables: Sequence[tuple[TableSpec, Sequence[str]]], *, num_hosts: int
    ) -> None:
        self._num_rows, self._held, self._num_hosts = num_rows, tables, num_hosts
        self._levels: PaddingLevels = ()
        self._num_batches = 0

    def levels(self, bags: Mapping[str, Ragged], num_bags: Mapping[str, int], *, num_devices: int) -> PaddingLevels:
        """The room that a batch needs: one level a feature, and one an array of sharded tables.

        Args:
          num_bags: by feature the bags of a host, with padding.
          num_devices: devices of a host.

        Raises:
          InputError: an id lies outside its table, or a bag has too many of them.
        """
        before = self._levels or (ONE_ID,) * len(self._num_rows)
        own = [
            self._level(name, bags[name], level, count=num_bags[name], num_devices=num_devices)
            for name, level in zip(self._num_rows, before, strict=False)
        ]
        self._num_batches += 1
        if self._num_batches & (self._num_batches - 1) and self._num_batches % _LOOK_EVERY:
            own += self._levels[len(own) :]
        else:
            # Numbers of distinct rows change little from one batch to another.
            own += self._room_levels(bags, num_devices)
        return tuple(map(min, own, self._levels or own))

    def agreed(self, levels: PaddingLevels) -> None:
        """Takes the levels of all hosts. A room never becomes smaller."""
        self._levels = levels

    def _room_levels(self, bags: Mapping[str, Ragged], num_devices: int) -> list[int]:
        features, levels = {spec.name: names for spec, names in self._held}, []
        for array in sharded_arrays([spec for spec, _ in self._held], self._num_hosts * num_devices):
            expected = [0.0] * num_devices
            for at, (table, layout) in itertools.product(range(num_devices), array.tables.items()):
                wanted = np.concatenate([_part(bags[name], at, num_devices) for name in features[table]])
                expected[at] += layout.largest_share * len(np.unique(wanted))
            levels.append(room_level(max(expected)))
        return levels

    def _level(self, name: str, bags: Ragged, before: int, *, count: int, num_devices: int) -> int:
        values, num_rows = bags.values, self._num_rows[name]
        if len(values) and not 0 <= values.min() <= values.max() < num_rows:
            wrong = values[(values < 0) | (values >= num_rows)]
            raise InputError(
                f"Found id {wrong[0]} of feature '{name}'. Expected 0 to {num_rows - 1}, the rows of its table. Raise "
                "vocabulary_size, or set invalid_ids of the table."
            )
        if before == ONE_ID and np.diff(bags.row_splits).max(initial=0) <= 1:
            return ONE_ID
        largest = int(np.diff(_ends(bags, count, num_devices)).max())
        most = most_ids(count) // num_devices
        if largest > most:
            raise InputError(
                f"Found {largest} ids of feature '{name}' in a device's part of a batch. Expected at most {most}, "
                "since its table lies on devices. Leave place out, which keeps the table on the hosts, or make batches "
                "smaller."
            )
        return before if before != ONE_ID and rows_of_room(before) >= largest else room_level(largest)


def _part(bags: Ragged, at: int, num_parts: int) -> np.ndarray:
    """About the ids of one device."""
    begin, end = at * len(bags.values) // num_parts, (at + 1) * len(bags.values) // num_parts
    return bags.values[begin:end]


def _ends(bags: Ragged, num_bags: int, num_devices: int) -> np.ndarray:
    """int64 `[num_devices + 1]`: where the ids of each device begin among the ids, and where the last one's end."""
    firsts = np.minimum(np.arange(num_devices + 1) * (num_bags // num_devices), bags.num_samples)
    return bags.row_splits[firsts] - bags.row_splits[0]


def write_bags(out: BagArrays, bags: Ragged, num_bags: int, num_devices: int) -> None:
    """Writes the ids of a feature as devices read them. Bags behind those that there are become empty.

    Args:
      num_bags: number of bags of all devices, with padding.
    """
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
