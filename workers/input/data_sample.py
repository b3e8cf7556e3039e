"""`Sampler`: histograms of some samples of a window, by which a driver sees that its data changed.

A host looks at the batches that it trains on anyway. So nothing is read for it, and no number depends on it. Of a
feature it takes one id a sample, hashed into bins that are the same on all hosts. Of a column of numbers it takes bins
of a third of an octave. Histograms of hosts and of windows are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.hashing import mix64
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.job.job import JobConfig

MOST_SAMPLES = 1024
"""Most samples of all hosts together, in a window."""
MOST_NUMBERS = 65_536
"""Samples times columns. It bounds the time of a look, also for hundreds of columns."""
LEAST_SAMPLES = 16
"""Fewest samples of a host."""
MOST_HOSTS = 8
"""Most hosts whose batches are sampled. All lanes are cut from one order, so other hosts' are alike."""
MOST_COLUMNS = 256
MOST_OF_VECTOR = 32
"""Dense numbers of one column; of longer vectors every second, third and so on."""

NUM_BINS = 256
NOTHING = NUM_BINS
"""The bin of samples without an id, and of numbers that are none."""
_SHIFT = np.uint64(64 - 8)
_SMALLEST, _STEPS_AN_OCTAVE, _MOST_STEPS = -10, 3, 126
"""Numbers below 2^-10 share the bin of zero, those from 2^32 on the last one."""
_ZERO = 128
_GOLDEN = 0.6180339887498949
MOST_FREQUENT = 32
"""Ids of a feature that a host names with their counts. Far more than ten, since hosts need not agree on the order."""
FEATURE_SHIFT = np.uint64(56)


@dataclass(frozen=True, slots=True, eq=False)
class FrequentIds:
    """Some ids of all features, feature by feature.

    Attributes:
      keys: uint64 `[n]`: the number of the feature in the first byte, and behind it 56 bits of the id's hash.
      counts: int64 `[n]`.
    """

    keys: np.ndarray
    counts: np.ndarray

    @staticmethod
    def of(keys: np.ndarray, counts: np.ndarray | None = None, *, least: int, most: int) -> FrequentIds:
        """The ids of each feature that come `least` times or more, at most `most`, the most frequent first.

        Args:
          keys: uint64 `[n]`, in any order. One sort of all costs a fraction of one for each feature.
          counts: int64 `[n]`, of each; one by default.
        """
        order = None if counts is None else np.argsort(keys)
        keys = np.sort(keys) if order is None else keys[order]
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.zeros(0, np.intp)
        if order is None or counts is None:
            total = np.diff(starts, append=len(keys))
        else:
            total = np.add.reduceat(counts[order], starts) if len(keys) else counts
        is_enough = total >= least
        keys, total = keys[starts][is_enough], total[is_enough]
        order = np.lexsort((-total, keys >> FEATURE_SHIFT))
        keys, total = keys[order], total[order]
        feature = keys >> FEATURE_SHIFT
        chosen = np.arange(len(keys)) - np.searchsorted(feature, feature) < most
        return FrequentIds(keys[chosen], total[chosen])

    @property
    def features(self) -> np.ndarray:
        """int64 `[n]`: number of the feature of each."""
        return (self.keys >> FEATURE_SHIFT).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataSample:
    """Histograms of a host's samples in a window.

    Attributes:
      names: names of the columns: features, then the label, then columns of numbers.
      num_features: how many of them are features with ids.
      counts: uint16 `[2, len(names), NUM_BINS + 1]`. Samples of a batch are halved: halves come from different places
        in the data. The last bin is `NOTHING`.
      frequent: ids that came twice or more, the most frequent of each feature, and how often they came.
    """

    names: tuple[str, ...]
    num_features: int
    counts: np.ndarray
    frequent: FrequentIds

    @property
    def num_samples(self) -> int:
        return int(self.counts[:, 0].sum(dtype=np.int64)) if self.names else 0


class Sampler:
    """Takes the samples of a window of one host, and then of the next. Mutated: what was taken of this one."""

    def __init__(self, job: JobConfig, *, num_hosts: int) -> None:
        self._names, self._features = _names(job), [*job.features][:MOST_COLUMNS]
        self._has_label = bool(job.data.label) and len(self._names) > len(self._features)
        self._dense, self._named = _dense_places(job), _plain_columns(job)
        share = min(MOST_SAMPLES, MOST_NUMBERS // max(1, len(self._names))) // min(num_hosts, MOST_HOSTS)
        self._wanted = self._missing = max(LEAST_SAMPLES, share)
        # Where in a bag the id of each sample is taken: evenly, and without a period that bags may have too.
        self._places = np.arange(self._wanted) * _GOLDEN % 1.0
        self._counts = np.zeros((2, len(self._names), NUM_BINS + 1), np.int64)
        # Of each batch, as `FrequentIds` has them.
        self._keys: list[np.ndarray] = []

    def take(self, batch: Batch) -> None:
        """Looks at a batch, unless there are enough samples. Reads it and keeps nothing of it."""
        if self._missing <= 0:
            return
        rows = np.flatnonzero(~batch.is_padding)
        count = min(len(rows), self._missing)
        if not count or not self._names:
            return
        self._missing -= count
        # All over the batch, since its lanes lie one behind the other.
        rows = rows[np.arange(count) * len(rows) // count]
        bins = np.concatenate([self._of_ids(batch, rows), self._of_numbers(batch, rows)])[: len(self._names)]
        columns = np.arange(len(bins))[:, None] * (NUM_BINS + 1)
        size = self._counts[0].size
        for half, part in enumerate((bins[:, : count // 2], bins[:, count // 2 :])):
            found = np.bincount((part + columns).ravel(), minlength=size)
            self._counts[half] += found.reshape(self._counts[half].shape)

    def finish(self) -> DataSample:
        """What was taken. The next window begins."""
        counts = self._counts.astype(np.uint16)
        self._counts[:] = 0
        self._missing = self._wanted
        return DataSample(
            names=self._names, num_features=len(self._features), counts=counts, frequent=self._take_frequent()
        )

    def _take_frequent(self) -> FrequentIds:
        keys = np.concatenate(self._keys) if self._keys else np.zeros(0, np.uint64)
        self._keys = []
        return FrequentIds.of(keys, least=2, most=MOST_FREQUENT)

    def _of_ids(self, batch: Batch, rows: np.ndarray) -> np.ndarray:
        """int64 `[features, rows]`."""
        picked = np.zeros((len(self._features), len(rows)), np.int64)
        where = self._places[: len(rows)]
        is_empty = np.zeros(picked.shape, bool)
        places: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for at, name in enumerate(self._features):
            ragged = batch.features[name]
            # Features with one id a sample share their offsets.
            key = id(ragged.row_splits)
            if key not in places:
                places[key] = _one_of_each(ragged, rows, where)
            chosen, is_empty[at] = places[key]
            if len(ragged.values):
                picked[at] = ragged.values[chosen]
        hashes = mix64(picked)
        feature = np.arange(len(picked), dtype=np.uint64)[:, None] << FEATURE_SHIFT
        self._keys.append((feature | hashes >> np.uint64(8))[~is_empty])
        bins = (hashes >> _SHIFT).astype(np.int64)
        bins[is_empty] = NOTHING
        return bins

    def _of_numbers(self, batch: Batch, rows: np.ndarray) -> np.ndarray:
        """int64 `[columns of numbers, rows]`."""
        parts = [batch.labels[rows][None]] if self._has_label else []
        parts.append(batch.dense[rows][:, self._dense].T)
        parts += [batch.columns[name][rows][None].astype(np.float32) for name in self._named]
        return bins_of_numbers(np.concatenate(parts))


def bins_of_numbers(numbers: np.ndarray) -> np.ndarray:
    """int64 of the shape of float32 numbers: 0 to 255 in their order, and `NOTHING` of those that are none."""
    sizes = np.abs(numbers)
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.log2(sizes)
    steps = np.clip(np.floor((octaves - _SMALLEST) * _STEPS_AN_OCTAVE), -1, _MOST_STEPS)
    # One step below the smallest is the bin of zero, for both signs.
    bins = np.nan_to_num(_ZERO + np.sign(numbers) * (steps + 1)).astype(np.int64)
    bins[np.isnan(numbers)] = NOTHING
    return bins


def _one_of_each(ragged: Ragged, rows: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The position of one id of each sample, and which samples have none. `where` is 0 for the first id, up to 1."""
    starts = ragged.row_splits[rows]
    lengths = ragged.row_splits[rows + 1] - starts
    places = starts + (where * lengths).astype(np.int64)
    return np.minimum(places, max(0, ragged.num_ids - 1)), lengths == 0


def _names(job: JobConfig) -> tuple[str, ...]:
    names = [*job.features, *([job.data.label] if job.data.label else []), *_dense_names(job), *_plain_columns(job)]
    seen: dict[str, None] = {}
    for name in names:
        # A column may be an input twice, as ids and as a number.
        while name in seen:
            name += " as a number"
        seen[name] = None
    return tuple(seen)[:MOST_COLUMNS]


def _dense_names(job: JobConfig) -> list[str]:
    names = []
    for column in job.data.dense_columns:
        size = column.shape.size
        names += [column.name] if size == 1 else [f"{column.name}[{at}]" for at in _some_of(size)]
    return names


def _dense_places(job: JobConfig) -> np.ndarray:
    """int64: places of those in `Batch.dense`."""
    places, first = [], 0
    for column in job.data.dense_columns:
        places += [first + at for at in _some_of(column.shape.size)]
        first += column.shape.size
    return np.array(places, np.int64)


def _some_of(size: int) -> Sequence[int]:
    return range(0, size, -(-size // MOST_OF_VECTOR))


def _plain_columns(job: JobConfig) -> list[str]:
    """Named columns with one number a sample."""
    return [name for name, shape in job.data.column_shapes.items() if not shape.inner]
