"""Gather, pooling and its gradient: the same bits as numpy at every width, layout and alignment; the definitions in
float64.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.kernels.arrays import aligned_empty, aligned_zeros
from podembed.embedding.kernels.pool import gather, pool, sum_gradients
from tests.embedding import reference
from tests.long_tests import examples

DIMS = [1, 3, 8, 16, 17, 64, 256]
COMBINERS = ["sum", "mean", "sqrtn"]


@st.composite
def bags(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_rows = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, 5), max_size=8))
    row_splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(row_splits[-1])
    index = rng.integers(0, num_rows, count).astype(np.int32)
    kind = draw(st.sampled_from(["none", "any", "zeros", "cancel"]))
    weights = {
        "none": None,
        "any": rng.standard_normal(count).astype(np.float32),
        "zeros": np.zeros(count, np.float32),
        "cancel": np.where(np.arange(count) % 2, -1, 1).astype(np.float32),
    }[kind]
    dim = draw(st.sampled_from(DIMS))
    rows = rng.standard_normal((num_rows, dim)).astype(np.float32)
    return rows, index, row_splits, weights, rng


def strided(num_rows, dim):
    """A feature's place in activations `[B, 3, dim]`."""
    return np.full((num_rows, 3, dim), 77.0, np.float32)[:, 1, :]


@given(bags(), st.sampled_from(COMBINERS))
@settings(max_examples=examples(200), deadline=None)
def test_pool_gives_the_bits_of_numpy(parts, combiner):
    rows, index, row_splits, weights, _ = parts
    out = strided(len(row_splits) - 1, rows.shape[1])
    pool(rows, index, row_splits, weights, combiner, out)
    assert np.array_equal(out, reference.pool(rows, index, row_splits, weights, combiner))
    assert out.base is not None
    assert (out.base[:, [0, 2], :] == 77.0).all()


@given(bags(), st.sampled_from(COMBINERS))
@settings(max_examples=examples(200), deadline=None)
def test_sum_gradients_gives_the_bits_of_numpy_and_adds(parts, combiner):
    rows, index, row_splits, weights, rng = parts
    gradient = strided(len(row_splits) - 1, rows.shape[1])
    gradient[...] = rng.standard_normal(gradient.shape)
    out = rows.copy()
    sum_gradients(gradient, index, row_splits, weights, combiner, out)
    assert np.array_equal(out, reference.sum_gradients(gradient, index, row_splits, weights, combiner, rows))


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_gradient_is_that_of_the_pooling(combiner, is_weighted):
    """Pooling is linear in the rows, so `<gradient, pool(rows)> = <sum_gradients(gradient), rows>` for any rows."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, 16)).astype(np.float32)
    row_splits = np.array([0, 3, 3, 4, 9])
    index = rng.integers(0, 5, 9).astype(np.int32)
    weights = rng.uniform(0.5, 2.0, 9).astype(np.float32) if is_weighted else None
    pooled, gradient, out = (
        aligned_empty((4, 16)),
        rng.standard_normal((4, 16)).astype(np.float32),
        np.zeros((5, 16), np.float32),
    )
    pool(rows, index, row_splits, weights, combiner, pooled)
    sum_gradients(gradient, index, row_splits, weights, combiner, out)
    assert np.vdot(gradient, pooled) == pytest.approx(np.vdot(out, rows), rel=1e-5)


def test_combiners_by_hand():
    rows = np.array([[1.0], [10.0]], np.float32)
    index, splits = np.array([0, 0, 1], np.int32), np.array([0, 3, 3])
    weights = np.array([1.0, 2.0, 3.0], np.float32)
    found = {}
    for combiner in COMBINERS:
        out = np.empty((2, 1), np.float32)
        pool(rows, index, splits, weights, combiner, out)
        found[combiner] = out[:, 0].tolist()
    # The repeated id counts once per occurrence: 1 + 4 + 9 under the root, not 3² + 9.
    assert found["sum"] == [33.0, 0.0]
    assert found["mean"] == [5.5, 0.0]
    assert found["sqrtn"] == pytest.approx([33.0 / 14.0**0.5, 0.0])


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_zero_denominator_gives_zeros_both_ways(combiner):
    rows, index, splits = np.ones((1, 8), np.float32), np.zeros(2, np.int32), np.array([0, 2])
    weights = np.array([1.0, -1.0] if combiner == "mean" else [0.0, 0.0], np.float32)
    out, sums = np.full((1, 8), 5.0, np.float32), np.zeros((1, 8), np.float32)
    pool(rows, index, splits, weights, combiner, out)
    sum_gradients(np.ones((1, 8), np.float32), index, splits, weights, combiner, sums)
    assert not out.any()
    assert not sums.any()


@pytest.mark.parametrize("dim", [16, 24, 64, 144])
def test_large_outputs_take_the_streaming_stores_and_stay_right(dim):
    rng = np.random.default_rng(1)
    count = (1 << 18) // dim + 1
    table = rng.standard_normal((50, dim)).astype(np.float32)
    rows = rng.integers(0, 50, count)
    for out in (
        aligned_empty((count, dim)),
        aligned_empty((count, 2, dim))[:, 1, :],
        np.empty(count * dim + 1, np.float32)[1:].reshape(count, dim),
    ):
        out[...] = np.nan
        gather(table, rows, out)
        assert np.array_equal(out, table[rows])
        out[...] = np.nan
        pool(table, rows.astype(np.int32), np.arange(count + 1), None, "mean", out)
        assert np.array_equal(out, table[rows])


@given(st.sampled_from(DIMS), st.lists(st.integers(0, 8), max_size=40))
@settings(max_examples=examples(50), deadline=None)
def test_gather(dim, rows):
    table = np.arange(9 * dim, dtype=np.float32).reshape(9, dim)
    out = np.full((len(rows) + 1, dim), -1.0, np.float32)
    gather(table, np.array(rows, np.int64), out)
    assert np.array_equal(out[:-1], table[rows])
    assert (out[-1] == -1.0).all()


@pytest.mark.parametrize("bad", [-1, 9, 2**60])
def test_gather_refuses_rows_outside_the_table(bad):
    with pytest.raises(ValueError, match=f"Found local row {bad}"):
        gather(np.zeros((9, 4), np.float32), np.array([3, bad]), np.zeros((2, 4), np.float32))


def test_read_only_inputs_are_taken():
    rows, index, splits, weights = (
        np.ones((2, 4), np.float32),
        np.array([0, 1], np.int32),
        np.array([0, 2]),
        np.ones(2, np.float32),
    )
    for array in (rows, index, splits, weights):
        array.flags.writeable = False
    out = np.empty((1, 4), np.float32)
    pool(rows, index, splits, weights, "sum", out)
    assert out.tolist() == [[2.0] * 4]
    sums = np.zeros((2, 4), np.float32)
    sum_gradients(rows[:1], index, splits, None, "sum", sums)
    assert sums.tolist() == [[1.0] * 4] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"row_splits": np.array([0, 1, 2])},
        {"row_splits": np.array([0, 3])},
        {"weights": np.ones(3, np.float32)},
        {"weights": np.ones(2, np.float64)},
        {"combiner": "max"},
        {"index": np.zeros(2, np.int64)},
        {"out": np.zeros((1, 5), np.float32)},
        {"out": np.zeros((1, 4), np.float64)},
        {"out": np.zeros((1, 8), np.float32)[:, ::2]},
        {"out": np.zeros(4, np.float32)},
    ],
)
def test_what_does_not_fit_is_refused(change):
    arguments = {
        "rows": np.ones((2, 4), np.float32),
        "index": np.zeros(2, np.int32),
        "row_splits": np.array([0, 2]),
        "weights": None,
        "combiner": "sum",
        "out": np.zeros((1, 4), np.float32),
    } | change
    with pytest.raises(ValueError, match=r"Found .*Expected"):
        pool(*arguments.values())
    arguments["rows"], arguments["out"] = arguments["out"], arguments["rows"]
    with pytest.raises(ValueError, match=r"Found .*Expected"):
        sum_gradients(*arguments.values())


def test_gather_needs_room():
    with pytest.raises(ValueError, match="room"):
        gather(np.zeros((2, 4), np.float32), np.array([0, 1]), np.zeros((1, 4), np.float32))


def test_aligned_arrays_start_on_a_cache_line():
    for shape in ((1, 1), (7, 3), (300, 64)):
        for array in (aligned_empty(shape), aligned_zeros(shape)):
            assert array.ctypes.data % 64 == 0
            assert array.shape == shape
            assert array.dtype == np.float32
        assert not aligned_zeros(shape).any()
