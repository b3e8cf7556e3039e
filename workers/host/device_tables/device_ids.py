"""`DeviceIds`: the ids of the features whose tables live on devices, from a batch into the memory of the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec
from podembed.workers.data.input_errors import InputError
from podembed.workers.device.shared_memory import BagArrays, ChannelEnd, IdsLayout
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import LARGEST_LEVELS, MOST_IDS, PaddingLevels, padding_level, smallest_levels
from podembed.workers.job.tables import device_tables, weighted_features


def ids_layout(job: JobConfig, specs: Sequence[TableSpec], *, num_samples: int) -> IdsLayout:
    """The arrays for the tables on devices.

    Args:
      specs: specs of all tables.
      num_samples: number of samples of this host's share of a batch, with padding.
    """
    held = device_tables(job)
    if not held:
        return IdsLayout()
    return IdsLayout(
        num_bags={name: num_samples * math.prod(job.activation_shapes[name][:-1]) for name in job.device_features},
        weighted=weighted_features(job),
        num_tables=len(held),
        bucket_floats=max(specs[one.at].bucket_bytes for one in held) // 4,
    )


class DeviceIds:
    """The ids of one host in one generation. Mutated: the padding levels that hosts agreed on, and the shared
    memory.

    Args:
      device: the end of the memory that is shared with the device process.
    """

    def __init__(self, job: JobConfig, device: ChannelEnd) -> None:
        self._device, self._layout = device, device.layout.on_devices
        self._num_rows = {name: feature.table.vocabulary_size for name, feature in job.device_features.items()}
        self._levels = smallest_levels(len(self._num_rows))
        self._tables = [table.at for table in device_tables(job)]

    def levels(self, bags: Mapping[str, Ragged], others: PaddingLevels) -> PaddingLevels:
        """The room that a batch needs: `others` of its sequences, and behind them one level a feature.

        Raises:
          InputError: an id lies outside its table, or a bag has too many of them.
        """
        if not self._levels:
            return others
        own = [self._level(name, bags[name]) for name in self._num_rows]
        return (*(others or LARGEST_LEVELS), *map(min, own, self._levels))

    def _level(self, name: str, bags: Ragged) -> int:
        values, num_rows = bags.values, self._num_rows[name]
        if len(values) and not 0 <= values.min() <= values.max() < num_rows:
            wrong = values[(values < 0) | (values >= num_rows)]
            raise InputError(
                f"Found id {wrong[0]} of feature '{name}'. Expected 0 to {num_rows - 1}, the rows of its table. Raise "
                "vocabulary_size, or set invalid_ids of the table."
            )
        longest = int(np.diff(bags.row_splits).max(initial=0))
        if longest > MOST_IDS:
            raise InputError(
                f"Found a bag of {longest} ids of feature '{name}', whose table has place='device'. Expected at most "
                f"{MOST_IDS}. Leave place out, which keeps the table on the hosts."
            )
        return padding_level(longest)

    def agreed(self, levels: PaddingLevels) -> None:
        """Takes the levels of all hosts. A room never becomes smaller."""
        self._levels = levels[len(LARGEST_LEVELS) :]

    def write(self, buffer: int, bags: Mapping[str, Ragged], levels: PaddingLevels) -> None:
        """Into the memory of a batch."""
        arrays, own = self._device.buffers[buffer], levels[len(LARGEST_LEVELS) :]
        self._layout.say_levels(arrays, own)
        for name, out in self._layout.bags_in(arrays, own).items():
            _fill(out, bags[name])

    def say_rates(self, buffer: int, rates: Sequence[float]) -> None:
        """The learning rates of a step.

        Args:
          rates: rates of all tables of the job.
        """
        self._layout.rates_in(self._device.buffers[buffer])[:] = [rates[at] for at in self._tables]


def _fill(out: BagArrays, bags: Ragged) -> None:
    """Bags behind those that there are become empty."""
    count, lengths = bags.num_samples, np.diff(bags.row_splits)
    out.rows[count:] = -1
    if out.rows.shape[1] == 1 and bags.num_ids == count and (lengths == 1).all():
        places = np.s_[:count, 0]
    else:
        out.rows[:count] = -1
        found = np.zeros(out.rows.shape, bool)
        found[:count] = np.arange(out.rows.shape[1]) < lengths[:, None]
        places = found
    out.rows[places] = bags.values
    if out.weights is not None:
        # Sums of weights go over the whole room.
        out.weights[...] = 0
        out.weights[places] = 1.0 if bags.weights is None else bags.weights
