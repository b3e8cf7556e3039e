"""Rows as values in numba: the pieces that the kernels' own tests do not show by themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.kernels.arrays import matrix_of, plain, row_addresses
from podembed.embedding.kernels.row_vectors import clip, jit, load, power, splat, store, total, width_of
from tests.long_tests import examples


@pytest.mark.parametrize(
    ("dim", "columns"), [(1, 1), (3, 3), (17, 17), (128, 128), (129, 43), (200, 100), (256, 128), (257, 1)]
)
def test_width_divides_the_row(dim, columns):
    assert width_of(dim).columns == columns
    assert width_of(dim) is width_of(dim)


@jit
def _sum_and_power(width, matrix, exponent, out):
    row = load(width, matrix, 0, 0)
    store(out, 0, 0, power(row, exponent))
    return total(row)


@given(st.sampled_from([1, 3, 17]), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(40), deadline=None)
def test_total_has_one_fixed_order(dim, seed):
    row = np.random.default_rng(seed).random((1, dim), dtype=np.float32)
    out = np.empty_like(row)
    found = _sum_and_power(width_of(dim), matrix_of(row), np.float32(0.7), matrix_of(out))
    halves = np.zeros(1 << (dim - 1).bit_length(), np.float32)
    halves[:dim] = row
    while len(halves) > 1:
        halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
    assert found == halves[0]
    assert np.allclose(out, row ** np.float32(0.7), rtol=1e-6)


@jit
def _clip(width, matrix, low, high):
    store(matrix, 0, 0, clip(load(width, matrix, 0, 0), splat(width, low), splat(width, high)))


def test_clip_keeps_what_is_not_a_number():
    row = np.array([[-5.0, 0.5, 7.0, np.nan, np.inf, -np.inf, -0.0, 1.0]], np.float32)
    _clip(width_of(8), matrix_of(row), np.float32(-1.0), np.float32(2.0))
    assert np.array_equal(row[0], np.array([-1.0, 0.5, 2.0, np.nan, 2.0, -1.0, -0.0, 1.0], np.float32), equal_nan=True)


def test_matrices_are_checked():
    matrix = np.zeros((4, 6), np.float32)
    assert matrix_of(matrix[:, 2:4]) == (matrix.ctypes.data + 8, 24)
    assert matrix_of(matrix[:, 2:3][:, :1]) == (matrix.ctypes.data + 8, 24)
    for wrong in (matrix.astype(np.float64), matrix[:, ::2], matrix.T, matrix[0]):
        with pytest.raises(ValueError, match="ascontiguousarray"):
            matrix_of(wrong)
    with pytest.raises(ValueError, match="Expected 5 columns"):
        matrix_of(matrix, 5)


def test_addresses_of_rows_of_several_matrices():
    one, other = np.zeros((2, 4), np.float32), np.zeros((3, 2, 4), np.float32)[:, 1, :]
    addresses = row_addresses([one, other, one[:0]], 4)
    assert addresses.dtype == np.int64
    start = other.ctypes.data
    assert addresses.tolist() == [one.ctypes.data, one.ctypes.data + 16, start, start + 32, start + 64]
    assert row_addresses([], 4).tolist() == []


def test_plain_arrays_share_memory_and_look_writable():
    array = np.arange(5)
    array.flags.writeable = False
    alias = plain(array, np.int64)
    assert alias.flags.writeable
    assert alias.ctypes.data == array.ctypes.data
    assert alias.tolist() == [0, 1, 2, 3, 4]
    own = np.arange(5)
    assert plain(own, np.int64) is own
    empty = np.arange(0)
    empty.flags.writeable = False
    assert plain(empty, np.int64).flags.writeable
    for wrong in (own.astype(np.int32), own[::2], own[None]):
        with pytest.raises(ValueError, match="Expected int64"):
            plain(wrong, np.int64)
