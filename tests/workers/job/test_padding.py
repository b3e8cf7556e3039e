"""Levels of room: that every batch fits, that they are few, and where the positions go."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.ragged import Ragged
from podembed.workers.job.padding import LARGEST_LEVELS, LEAST_LENGTH, LEAST_VECTORS, SequencePadding, cut_to


@pytest.mark.parametrize("longest", [1, 16, 50, 200, 4096])
@pytest.mark.parametrize("num_samples", [1, 7, 256])
def test_every_batch_fits_and_the_next_level_would_not_do(num_samples: int, longest: int) -> None:
    padding = SequencePadding({"history": longest, "short": 3}, num_samples)
    random = np.random.default_rng(0)
    vectors, lengths = padding.most_levels
    assert vectors <= 2 * np.log2(max(1, num_samples * longest / LEAST_VECTORS)) + 1
    assert lengths <= np.log2(max(1, longest / LEAST_LENGTH)) + 1
    for most in {1, longest // 10, longest // 3, longest} - {0}:
        batch = {"history": random.integers(0, most + 1, 2 * num_samples), "short": np.full(2 * num_samples, 3)}
        levels = padding.levels_for(batch)
        fits = [
            all(padding.vectors(name, at) >= column.reshape(2, -1).sum(axis=1).max() for name, column in batch.items())
            and all(padding.longest(name, at) >= column.max() for name, column in batch.items())
            for at in (levels, (levels[0] + 1, levels[1]), (levels[0], levels[1] + 1))
        ]
        # A higher level does not fit, or is no smaller.
        assert fits[0]
        assert not fits[1] or levels[0] == vectors
        assert not fits[2] or levels[1] == lengths


def test_level_0_has_room_for_the_maximum_and_levels_are_apart_by_the_root_of_two() -> None:
    padding = SequencePadding({"history": 4096}, 256)
    assert padding.vectors("history", LARGEST_LEVELS) == 256 * 4096
    assert padding.longest("history", LARGEST_LEVELS) == 4096
    sizes = [padding.vectors("history", (level, 0)) for level in range(padding.most_levels[0] + 1)]
    # Sizes are multiples of 64, which shows in the smallest.
    np.testing.assert_allclose(np.divide(sizes[1:], sizes[:-1]), 0.5**0.5, rtol=0.01)
    assert not any(size % 64 for size in sizes)
    assert sizes[-1] == LEAST_VECTORS
    assert [padding.longest("history", (0, level)) for level in (1, 2, 8)] == [2048, 1024, 16]


def test_a_job_without_sequences_has_one_level() -> None:
    assert SequencePadding({}, 64).most_levels == LARGEST_LEVELS


def test_positions_of_each_device_begin_its_room() -> None:
    """Three samples a device; an id was dropped from the second sample, and the last device has padding."""
    padding = SequencePadding({"history": 4}, 3)
    lengths = np.array([2, 1, 0, 3, 0, 0])
    bags = Ragged.of([5, 6, 7, 8, 9], [0, 1, 2, 2, 3, 4, 5])
    found = padding.laid_out("history", bags, lengths, LARGEST_LEVELS)
    assert found.to_lists() == [[5], [6], [], *[[]] * 9, [7], [8], [9], *[[]] * 9]


def test_samples_keep_their_first_ids() -> None:
    rows = Ragged.of([1, 2, 3, 4, 5, 6], [0, 4, 4, 6], [1, 2, 3, 4, 5, 6])
    cut = cut_to(rows, 3)
    assert cut.to_lists() == [[1], [2], [3], [5], [6]]
    assert cut.weights is not None
    assert cut.weights.tolist() == [1, 2, 3, 5, 6]
    assert cut_to(rows, 4).values is rows.values


def test_few_programs_are_compiled_unless_a_device_has_few_samples_of_very_different_lengths() -> None:
    """The numbers of `docs/write-a-job.md`."""
    random = np.random.default_rng(0)
    found = {}
    for num_samples in (64, 256):
        padding = SequencePadding({"history": 1000}, num_samples)
        lengths = np.exp(random.normal(np.log(100), 1.0, (1000, num_samples))).astype(np.int64).clip(1, 1000)
        found[num_samples] = len({padding.levels_for({"history": batch}) for batch in lengths})
    assert 2 <= found[256] <= 3
    assert 5 <= found[64] <= 6
