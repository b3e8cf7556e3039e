"""Cutting an array into pieces of its columns, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.kernels.arrays import STREAMING_FLOATS, aligned_zeros
from podembed.embedding.kernels.cut import Pieces, cut_columns

FACTOR = np.float32(0.3)


def joined_of(num_rows: int, widths: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(widths)).standard_normal((num_rows, sum(widths)), dtype=np.float32)


def expected_of(joined: np.ndarray, widths: tuple[int, ...]) -> list[np.ndarray]:
    return [piece * FACTOR for piece in np.split(joined, np.cumsum(widths)[:-1], axis=1)]


@pytest.mark.parametrize("num_rows", [1, 7, 8, 21, 1024])
@pytest.mark.parametrize("widths", [(8,), (16, 3, 24, 1, 100, 7, 64), (128, 8, 16, 32) * 8], ids=["one", "odd", "many"])
def test_the_bits_are_those_of_numpy(num_rows: int, widths: tuple[int, ...]) -> None:
    joined = joined_of(num_rows, widths)
    blocks = [aligned_zeros((num_rows, width)) for width in widths]
    cut_columns(joined, Pieces.of(blocks), FACTOR)
    for block, expected in zip(blocks, expected_of(joined, widths), strict=True):
        np.testing.assert_array_equal(block, expected)


def test_pieces_that_are_not_aligned_are_not_streamed_to() -> None:
    num_rows, widths = 1024, (128, 128, 64)
    assert num_rows * sum(widths) >= STREAMING_FLOATS
    joined = joined_of(num_rows, widths)
    memory = aligned_zeros((num_rows * sum(widths) + 1,))[1:]
    blocks = [part.reshape(num_rows, -1) for part in np.split(memory, num_rows * np.cumsum(widths)[:-1])]
    cut_columns(joined, Pieces.of(blocks), FACTOR)
    for block, expected in zip(blocks, expected_of(joined, widths), strict=True):
        np.testing.assert_array_equal(block, expected)


def test_parts_of_the_rows_go_where_they_belong() -> None:
    widths = (16, 5)
    joined = joined_of(30, widths)
    blocks = [aligned_zeros((30, width)) for width in widths]
    pieces = Pieces.of(blocks)
    for rows in (slice(0, 11), slice(11, 12), slice(20, 30)):
        cut_columns(joined[rows], pieces, FACTOR, first=rows.start)
    for block, expected in zip(blocks, expected_of(joined, widths), strict=True):
        expected[12:20] = 0
        np.testing.assert_array_equal(block, expected)


def test_pieces_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected equal rows"):
        Pieces.of([np.zeros((3, 2), np.float32), np.zeros((4, 2), np.float32)])
    with pytest.raises(ValueError, match="Expected equal rows"):
        Pieces.of([np.zeros((3, 4), np.float32)[:, :2]])
    with pytest.raises(ValueError, match="Expected float32"):
        Pieces.of([np.zeros((3, 4))])
    pieces = Pieces.of([np.zeros((3, 2), np.float32)])
    with pytest.raises(ValueError, match="Expected 2 columns"):
        cut_columns(np.zeros((3, 3), np.float32), pieces, FACTOR)
    for first, rows in ((2, 2), (-1, 1)):
        with pytest.raises(ValueError, match="Expected rows within them"):
            cut_columns(np.zeros((rows, 2), np.float32), pieces, FACTOR, first=first)
