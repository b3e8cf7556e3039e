"""Frames of what a host asks: read back as they were made, and refused wherever a kernel would read outside of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.lookup.pooled_frames import BagRows, frame_of, read_frame
from tests.long_tests import examples

NUM_ROWS = 50
LIMITS = np.full(3, NUM_ROWS)


def draw(random: np.random.Generator) -> BagRows:
    lengths = random.integers(0, 4, random.integers(0, 6))
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(splits[-1])
    weights = random.random(count).astype(np.float32) if random.random() < 0.5 else None
    divisors = random.random(len(lengths)).astype(np.float32) if random.random() < 0.5 else None
    return BagRows(random.integers(0, NUM_ROWS, count).astype(np.int32), splits, weights, divisors)


def as_lists(bags: BagRows) -> list[object]:
    parts = bags.rows, bags.row_splits, bags.weights, bags.divisors
    return [None if part is None else part.tolist() for part in parts]


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 99_999))
def test_a_frame_carries_all_features(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [draw(random) for _ in range(3)]
    found = read_frame(frame_of(parts), limits=LIMITS, host=1)
    assert [as_lists(one) for one in found.values()] == [as_lists(one) for one in parts]


@settings(deadline=None, max_examples=examples(200))
@given(seed=st.integers(0, 99_999), word=st.sampled_from([-1, 0, 1, 2, 7, 1 << 20, 1 << 31, 1 << 62, -(1 << 63)]))
def test_a_frame_with_another_word_is_refused_or_stays_within_itself(seed: int, word: int) -> None:
    random = np.random.default_rng(seed)
    frame = frame_of([draw(random) for _ in range(3)]).copy()
    frame[random.integers(len(frame))] = word
    if random.random() < 0.3:
        frame = frame[: random.integers(len(frame) + 1)].copy()
    try:
        found = read_frame(frame, limits=LIMITS, host=1)
    except ValueError:
        return
    for one in found.values():
        assert one.row_splits[0] == 0
        assert (np.diff(one.row_splits) >= 0).all()
        assert one.row_splits[-1] == len(one.rows)
        assert ((one.rows >= 0) & (one.rows < NUM_ROWS)).all()
        assert one.weights is None or len(one.weights) == len(one.rows)
        assert one.divisors is None or len(one.divisors) == one.num_bags


def test_rows_that_are_known_need_no_look_and_others_are_named() -> None:
    frame = frame_of([BagRows(np.array([3, -2], np.int32), np.array([0, 2]), None)])
    (found,) = read_frame(frame, limits=np.array([-1]), host=0).values()
    assert found.rows.tolist() == [3, -2]
    with pytest.raises(ValueError, match="Found local row -2 on a host that holds 50 rows"):
        read_frame(frame, limits=np.array([50]), host=0)


def test_an_owner_of_nothing_takes_an_empty_frame_only() -> None:
    assert not read_frame(np.empty(0, np.int64), limits=LIMITS[:0], host=2)
    with pytest.raises(ValueError, match="Found a request of 1 words from host 2"):
        read_frame(np.zeros(1, np.int64), limits=LIMITS[:0], host=2)
