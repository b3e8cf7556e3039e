"""Distances of histograms: what is chance is taken off, and what differs is measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podembed.tools.metrics import data
from podembed.tools.metrics.data import DataSeries, distance_beyond_chance
from podembed.workers.input.data_sample import MOST_FREQUENT, NUM_BINS, DataSample, FrequentIds

NAMED_NOTHING = FrequentIds(np.zeros(0, np.uint64), np.zeros(0, np.int64))


def drawn(chances: np.ndarray, count: int, *, inputs: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).multinomial(count, chances, size=inputs)


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.3, 3.0])
def test_chance_is_no_distance(skew: float) -> None:
    chances = np.arange(1, NUM_BINS + 2) ** -skew
    chances /= chances.sum()
    for few, many in ((4096, 32_768), (2048, 2048)):
        new, old = (drawn(chances, count, inputs=2000, seed=count) for count in (few, many))
        found = distance_beyond_chance(new, old)
        assert found.max() < 0.06
        assert found.mean() < 0.01


def test_a_part_that_differs_is_measured() -> None:
    even = np.full(NUM_BINS, 1 / NUM_BINS)
    for share in (0.3, 0.6, 1.0):
        chances = (1 - share) * even
        chances[7] += share
        new, old = drawn(chances, 4096, inputs=50, seed=1), drawn(even, 32_768, inputs=50, seed=2)
        found = distance_beyond_chance(new, old)
        # What is taken off for chance is at most 0.11 of even bins; a distance is never made larger.
        assert share - 0.13 < found.min() <= found.max() < share + 0.02


def sample(count: int, columns: int, *, seed: int) -> DataSample:
    chances = np.full(NUM_BINS + 1, 1 / (NUM_BINS + 1))
    halves = [drawn(chances, count // 2, inputs=columns, seed=seed + half) for half in range(2)]
    names = tuple(f"f{at}" for at in range(columns))
    return DataSample(names=names, num_features=columns, counts=np.array(halves, np.uint16), frequent=NAMED_NOTHING)


def test_of_many_inputs_the_worst_are_measured() -> None:
    series, odd = DataSeries(), np.zeros((2, 100, NUM_BINS + 1), np.uint16)
    for at in range(data.REFERENCE_CHUNKS * 4):
        found = series.take([sample(512, 100, seed=2 * at), sample(512, 100, seed=9000 + 2 * at)])
        assert bool(found) == (at % 4 == 3)
    by_name = [one for one in found if one.name == "feature_spread_ratio"]
    assert len(by_name) == 100
    odd[:, :, 5] = data.CHUNK_SAMPLES // 2
    usual = sample(data.CHUNK_SAMPLES, 100, seed=1)
    counts = np.where(np.arange(100)[:, None] % 10 == 0, odd, usual.counts)
    found = series.take([replace(usual, counts=counts)])
    distances = {one.labels["feature"]: one.value for one in found if one.name == "feature_distance_ratio"}
    assert len(distances) == data.MOST_FEATURES
    far = {name for name, distance in distances.items() if distance > 0.5}
    assert far == {f"f{at}" for at in range(0, 100, 10)}


def named(ids: np.ndarray, feature: int) -> np.ndarray:
    return ids.astype(np.uint64) | np.uint64(feature << 56)


def test_the_ten_most_frequent_ids_are_those_of_all_hosts() -> None:
    random = np.random.default_rng(3)
    # Zipf's law over far more ids than hosts name, so that hosts disagree on the order of the rarer ones. Then ids that
    # come once, and two ids.
    columns = [
        random.zipf(1.4, data.CHUNK_SAMPLES),
        np.arange(data.CHUNK_SAMPLES),
        random.integers(0, 2, data.CHUNK_SAMPLES),
    ]
    series, usual = DataSeries(), sample(data.CHUNK_SAMPLES // 8, 3, seed=1)
    full = np.zeros_like(usual.counts)
    full[:, :, 5] = data.CHUNK_SAMPLES // 16
    found = []
    for host in range(8):
        keys = np.concatenate([named(np.split(ids, 8)[host], at) for at, ids in enumerate(columns)])
        frequent = FrequentIds.of(keys, least=2, most=MOST_FREQUENT)
        found += series.take([replace(usual, counts=full, frequent=frequent)])
    ratios = [one.value for one in found if one.name == "feature_top_ten_ratio"]
    exact = [np.sort(np.unique(ids, return_counts=True)[1])[-10:].sum() / len(ids) for ids in columns]
    assert ratios == pytest.approx(exact, abs=0.003)
