"""`DataSeries`: what the data of a run looks like, in numbers. Histograms of hosts are gathered and compared with those
of the first part.

Two histograms of n and m samples of one distribution p differ by chance. Their distance in total variation is half the
sum of |p1 - p2| over the bins. By chance it is sum(sqrt(p (1 - p) (1/n + 1/m))) / sqrt(2 pi) in the mean. A single
sample moves it by 1/n or 1/m. So it exceeds its mean by t with a chance of at most exp(-2 t^2 / (1/n + 1/m)). That is
the inequality of McDiarmid, "On the method of bounded differences", 1989.

Take 4,096 new samples, 32,768 old ones and 256 even bins. Their mean is 0.11, and one of 1e9 exceeds it by more than
0.06. The mean is taken off, and health wants 0.2 or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from podembed.tools.metrics.point import Measurement
from podembed.workers.input.data_sample import NOTHING, NUM_BINS, DataSample, FrequentIds

CHUNK_SAMPLES = 4096
REFERENCE_CHUNKS = 8
MOST_FEATURES = 64
"""Most inputs that are measured: those that differ most. While the reference grows, all are."""
LEAST_FILLED = 256
"""Samples with an id, below which the share of one id is mostly chance."""
LIKE_ANOTHER = 0.5
"""So much of the distance from its own reference another input's may be."""
LEAST_UNLIKE = 0.2
LEAST_USUAL = 3
"""Readings, before which nothing is judged."""
TEN = 10
CERTAINLY = 0.999
"""Samples that are empty, or alike, for an input that is."""
USUAL_AT_MOST = 0.9
"""An input that was nearly always empty or alike before may just have become rarer."""


class DataSeries:
    """See the module. Mutated by `take`: the open chunk and the reference."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._num_features = 0
        # int64 `[2, inputs, bins]`, and `[inputs, bins]`.
        self._open = self._reference = np.zeros(0, np.int64)
        # What hosts named for the open chunk.
        self._frequent: list[FrequentIds] = []
        self._num_chunks = 0
        # float64 `[2, inputs]`: the most that was empty, and alike, in a chunk of the reference; NaN where unknown.
        self._usual = np.zeros((2, 0))

    def take(self, samples: Sequence[DataSample]) -> list[Measurement]:
        """Takes those of the hosts in a window. Returns measurements when another `CHUNK_SAMPLES` are together."""
        for sample in samples:
            if sample.names != self._names:
                self._names, self._num_features = sample.names, sample.num_features
                self._open = np.zeros(sample.counts.shape, np.int64)
                self._reference = np.zeros(sample.counts.shape[1:], np.int64)
                self._frequent = []
                self._num_chunks = 0
                self._usual = np.full((2, len(sample.names)), np.nan)
            self._open += sample.counts
            self._frequent.append(sample.frequent)
        if not self._names or self._open[:, 0].sum() < CHUNK_SAMPLES:
            return []
        chunk, frequent = self._open, self._frequent
        self._open, self._frequent = np.zeros_like(chunk), []
        return [*self._measured(chunk, top_ten(frequent, self._num_features))]

    def _measured(self, halves: np.ndarray, ten: np.ndarray) -> Iterator[Measurement]:
        counts, before = halves.sum(axis=0), self._reference
        filled = counts[:, :NUM_BINS].sum(axis=1)
        empty = counts[:, NOTHING] / counts.sum(axis=1)
        top = counts[:, :NUM_BINS].max(axis=1) / np.maximum(filled, 1)
        is_growing = self._num_chunks < REFERENCE_CHUNKS
        if is_growing:
            self._grow(counts, np.array([empty, np.where(filled >= LEAST_FILLED, top, np.nan)]))
        yield Measurement("data_reference_samples", int(self._reference.sum(axis=1).max()))
        has_reference = bool(before[0].sum())
        distances = distance_beyond_chance(counts, before) if has_reference else np.zeros(len(counts))
        spreads = distance_beyond_chance(halves[0], halves[1])
        worst = range(len(counts)) if is_growing else sorted(np.argsort(-distances, kind="stable")[:MOST_FEATURES])
        for at in worst:
            by_name = {"feature": self._names[at]}
            if at < self._num_features:
                yield Measurement("feature_empty_ratio", float(empty[at]), by_name)
            if filled[at] >= LEAST_FILLED:
                yield Measurement("feature_top_ratio", float(top[at]), by_name)
                if at < self._num_features:
                    yield Measurement("feature_top_ten_ratio", min(1.0, int(ten[at]) / int(filled[at])), by_name)
            yield Measurement("feature_spread_ratio", float(spreads[at]), by_name)
            if not has_reference:
                continue
            yield Measurement("feature_distance_ratio", float(distances[at]), by_name)
            if distances[at] >= LEAST_UNLIKE and (found := self._like(int(at), counts[at], distances[at])):
                yield Measurement("feature_other_distance_ratio", found[1], by_name | {"other": found[0]})

    def _grow(self, counts: np.ndarray, empty_and_top: np.ndarray) -> None:
        """Adds a chunk to the reference, but not inputs that have just become empty or constant."""
        is_usual = np.full(len(counts), True)
        if self._num_chunks >= LEAST_USUAL:
            is_usual = ~became_certain(self._usual, empty_and_top).any(axis=0)
        self._reference = self._reference + counts * is_usual[:, None]
        self._usual = np.where(is_usual, np.fmax(self._usual, empty_and_top), self._usual)
        self._num_chunks += 1

    def _like(self, at: int, counts: np.ndarray, distance: float) -> tuple[str, float] | None:
        """The other input of its kind whose reference it is near to, and that distance."""
        first, last = (0, self._num_features) if at < self._num_features else (self._num_features, len(self._names))
        others = distance_beyond_chance(
            np.broadcast_to(counts, (last - first, len(counts))), self._reference[first:last]
        )
        others[at - first] = math.inf
        best = int(np.argmin(others))
        return (self._names[first + best], float(others[best])) if others[best] <= LIKE_ANOTHER * distance else None


def top_ten(frequent: Sequence[FrequentIds], num_features: int) -> np.ndarray:
    """int64 `[num_features]`: how many samples have one of the ten most frequent ids of a feature.

    Hosts do not name ids that came once. Each that is missing among the ten counts as one of these.
    """
    keys, counts = (np.concatenate([getattr(one, name) for one in frequent]) for name in ("keys", "counts"))
    ten = FrequentIds.of(keys, counts, least=1, most=TEN)
    known = np.bincount(ten.features, minlength=num_features)
    samples = np.bincount(ten.features, ten.counts, minlength=num_features).astype(np.int64)
    return samples + TEN - known


def became_certain(before: Any, now: Any) -> Any:
    """Whether all samples are empty, or alike, as they were not before; of shares, or arrays of them."""
    return (before <= USUAL_AT_MOST) & (now >= CERTAINLY)


def distance_beyond_chance(counts: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Distances in total variation, less what they are by chance; see the module.

    Args:
      counts, others: `[inputs, bins]`, with at least one sample each.

    Returns:
      float64 `[inputs]`, 0 to 1.
    """
    n, m = counts.sum(axis=1, keepdims=True), others.sum(axis=1, keepdims=True)
    joined = (counts + others) / (n + m)
    found = np.abs(counts / n - others / m).sum(axis=1) / 2
    by_chance = np.sqrt(joined * (1 - joined) * (1 / n + 1 / m)).sum(axis=1) / math.sqrt(2 * math.pi)
    return np.maximum(found - by_chance, 0.0)
