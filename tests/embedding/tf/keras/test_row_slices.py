"""`RowSlices`: dense form, merging, checks, behaviour under tracing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.tf.keras.row_slices import RowSlices
from tests.long_tests import examples


def dense_of(rows, values, shape):
    table = np.zeros(shape, np.float64)
    np.add.at(table, rows, values)
    return table


@settings(deadline=None, max_examples=examples(20))
@given(rows=st.lists(st.integers(0, 5), min_size=4, max_size=4), seed=st.integers(0, 1000))
def test_merging_keeps_the_dense_form_and_leaves_each_row_once(rows, seed):
    values = np.random.default_rng(seed).normal(size=(4, 2)).astype(np.float32)
    slices, expected = RowSlices(rows, values, (6, 2)), dense_of(rows, values, (6, 2))
    merged = slices.merged()
    assert merged.indices.tolist() == sorted(set(rows))
    np.testing.assert_allclose(merged.dense(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slices.dense(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(_merged_in_a_program(slices).dense(), expected, rtol=1e-5, atol=1e-6)


@jax.jit
def _merged_in_a_program(slices):
    return slices.merged()


def test_merging_under_tracing_pads_with_a_row_that_is_dropped():
    merged = _merged_in_a_program(RowSlices([3, 1, 3], np.ones((3, 2)), (4, 2)))
    assert merged.indices.tolist() == [1, 3, 4]
    np.testing.assert_array_equal(merged.values, [[1, 1], [2, 2], [0, 0]])


def test_rows_that_are_rising_already_are_kept():
    slices = RowSlices([0, 2], np.ones((2, 1)), (3, 1))
    assert slices.merged() is slices


def test_arithmetic_works_on_the_dense_form():
    slices = RowSlices([1, 1], [[1.0], [2.0]], (3, 1))
    np.testing.assert_array_equal(-slices * 2, [[0], [-6], [0]])
    np.testing.assert_array_equal(np.asarray(slices), [[0], [3], [0]])
    assert (slices.shape, slices.dtype) == ((3, 1), np.float32)
    assert "indices" in repr(slices)


def test_no_rows_and_a_vector_of_scalars():
    np.testing.assert_array_equal(RowSlices([], np.zeros((0, 2)), (3, 2)).merged().dense(), np.zeros((3, 2)))
    np.testing.assert_array_equal(RowSlices([2, 2], [1.0, 1.0], (3,)).dense(), [0, 0, 2])


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_outside_the_table(row):
    with pytest.raises(IndexError, match=f"Found row {row}. Expected rows 0 to 2"):
        RowSlices([0, row], np.ones((2, 1)), (3, 1))


def test_parts_that_do_not_fit():
    with pytest.raises(TypeError, match="Expected integers"):
        RowSlices([0.5], np.ones((1, 1)), (3, 1))
    for indices, values in (([0, 1], np.ones((1, 1))), ([0], np.ones((1, 2))), ([[0]], np.ones((1, 1)))):
        with pytest.raises(ValueError, match="one row of values for each index"):
            RowSlices(indices, values, (3, 1))


def test_the_shape_may_come_later():
    slices = RowSlices([3, 1, 3], np.ones((3, 2)))
    np.testing.assert_array_equal(slices.of_shape((4, 2)).merged().indices, [1, 3])
    whole = RowSlices([0], np.ones((1, 2)), (9, 2))
    assert whole.of_shape((4, 2)) is whole
    for use in (slices.dense, slices.merged, lambda: slices.shape, lambda: slices * 2):
        with pytest.raises(ValueError, match="without a dense shape"):
            use()
    with pytest.raises(IndexError, match=r"Found row 3\. Expected rows 0 to 2"):
        slices.of_shape((3, 2))
    with pytest.raises(IndexError, match="Found row -1"):
        RowSlices([-1], np.ones((1, 2)))
    with pytest.raises(ValueError, match="one row of values"):
        slices.of_shape((4, 3))
    with pytest.raises(ValueError, match="one row of values"):
        RowSlices([0, 1], np.ones((1, 2)))


def test_it_is_a_pytree_with_the_shape_as_structure():
    slices = RowSlices([0, 1], jnp.ones((2, 1)), (3, 1))
    leaves, structure = jax.tree.flatten(slices)
    assert len(leaves) == 2
    assert jax.tree.unflatten(structure, leaves).dense_shape == (3, 1)
    doubled = jax.jit(lambda one: one.with_values(one.values * 2))(slices)
    np.testing.assert_array_equal(doubled.dense(), [[2], [2], [0]])
