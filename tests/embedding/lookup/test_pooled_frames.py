"""Frames of what a host asks: read back as they were made, and refused wherever a kernel would read outside of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.lookup.pooled_frames import AskedBags, BagKeys, frame_of, read_frame
from tests.long_tests import examples

NUM_FEATURES = 3


def draw(random: np.random.Generator) -> BagKeys:
    lengths = random.integers(0, 4, random.integers(0, 6))
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(splits[-1])
    weights = random.random(count).astype(np.float32) if random.random() < 0.5 else None
    divisors = random.random(len(lengths)).astype(np.float32) if random.random() < 0.5 else None
    dtype = random.choice([np.int32, np.int64])
    keys = random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype=dtype)
    return BagKeys(keys, splits, weights, divisors)


def read(frame: np.ndarray, *, host: int = 1) -> AskedBags:
    return read_frame(frame, num_features=NUM_FEATURES, host=host)


def as_lists(*parts: np.ndarray | None) -> list[object]:
    return [None if part is None else part.tolist() for part in parts]


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 99_999))
def test_a_frame_carries_all_features(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [draw(random) for _ in range(NUM_FEATURES)]
    found = read(frame_of(parts))
    keys = [keys for keys, _ in found.keys_and_rows()]
    assert [one.dtype for one in keys] == [part.keys.dtype for part in parts]
    asked = [
        as_lists(own, bags.row_splits, bags.weights, bags.divisors)
        for own, bags in zip(keys, found.values(), strict=True)
    ]
    assert asked == [as_lists(part.keys, part.row_splits, part.weights, part.divisors) for part in parts]


@settings(deadline=None, max_examples=examples(30))
@given(seed=st.integers(0, 99_999))
def test_rows_take_the_place_of_keys(seed: int) -> None:
    random = np.random.default_rng(seed)
    found = read(frame_of([draw(random) for _ in range(NUM_FEATURES)]))
    rows = [random.integers(0, 1 << 31, len(keys), dtype=np.int32) for keys, _ in found.keys_and_rows()]
    for (_, place), own in zip(found.keys_and_rows(), rows, strict=True):
        place[:] = own
    assert [bags.rows.tolist() for bags in found.values()] == [own.tolist() for own in rows]


@settings(deadline=None, max_examples=examples(200))
@given(seed=st.integers(0, 99_999), word=st.sampled_from([-1, 0, 1, 2, 7, 1 << 20, 1 << 31, 1 << 62, -(1 << 63)]))
def test_a_frame_with_another_word_is_refused_or_stays_within_itself(seed: int, word: int) -> None:
    random = np.random.default_rng(seed)
    frame = frame_of([draw(random) for _ in range(NUM_FEATURES)]).copy()
    frame[random.integers(len(frame))] = word
    if random.random() < 0.3:
        frame = frame[: random.integers(len(frame) + 1)].copy()
    try:
        found = read(frame)
    except ValueError:
        return
    first, behind = frame.ctypes.data, frame.ctypes.data + frame.nbytes
    for (keys, _), one in zip(found.keys_and_rows(), found.values(), strict=True):
        for part in (keys, one.rows, one.row_splits, one.weights, one.divisors):
            assert part is None or not part.size or first <= part.ctypes.data <= behind - part.nbytes
        assert one.row_splits[0] == 0
        assert (np.diff(one.row_splits) >= 0).all()
        assert one.row_splits[-1] == len(one.rows)
        assert one.weights is None or len(one.weights) == len(one.rows)
        assert one.divisors is None or len(one.divisors) == one.num_bags


def test_an_owner_of_nothing_takes_an_empty_frame_only() -> None:
    assert not read_frame(np.empty(0, np.int64), num_features=0, host=2)
    with pytest.raises(ValueError, match="Found a request of 1 words from host 2"):
        read_frame(np.zeros(1, np.int64), num_features=0, host=2)
