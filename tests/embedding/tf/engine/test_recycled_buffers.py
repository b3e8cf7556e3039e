"""Buffers are used again when nobody holds them, and never before."""

import gc

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.tf.engine.host_engine import MAX_BUFFERS, RecycledBuffers


def address(array):
    return array.ctypes.data


def test_an_array_that_nobody_holds_is_used_again():
    buffers = RecycledBuffers()
    first = buffers.take((10, 4))
    assert (first.shape, first.dtype, address(first) % 64) == ((10, 4), np.float32, 0)
    where = address(first)
    del first
    assert address(buffers.take((10, 4))) == where
    assert address(buffers.take((10, 4))) == where


def test_views_keep_an_array():
    buffers = RecycledBuffers()
    row = buffers.take((10, 4))[3]
    row[...] = 7
    for _ in range(3):
        other = buffers.take((10, 4))
        other[...] = 0
    assert (row == 7).all()


def test_arrays_of_jax_keep_an_array():
    buffers = RecycledBuffers()
    taken = buffers.take((64, 16))
    taken[...] = 5
    array = jax.dlpack.from_dlpack(taken)
    where = address(taken)
    del taken
    for _ in range(3):
        buffers.take((64, 16))[...] = 0
    view = np.asarray(array)[2:4]
    assert (view == 5).all()
    del array
    assert address(buffers.take((64, 16))) != where
    assert (view == 5).all()
    del view
    gc.collect()
    assert address(buffers.take((64, 16))) in (where, *[address(one) for one in buffers._buffers])


def test_a_computation_that_still_runs_keeps_its_input():
    buffers = RecycledBuffers()

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ x.T @ x / 1e3), x)

    results, expected = [], []
    for step in range(6):
        taken = buffers.take((256, 256))
        taken[...] = np.random.default_rng(step).normal(size=(256, 256))
        expected.append(slow(np.array(taken)))
        array = jax.dlpack.from_dlpack(taken)
        del taken
        results.append(slow(array))
        del array
    for found, exact in zip(results, expected, strict=True):
        np.testing.assert_array_equal(found, exact)


def test_what_is_kept_for_long_is_left_to_its_owner_and_new_sizes_forget_old_ones():
    buffers = RecycledBuffers()
    kept = [buffers.take((10, 4)) for _ in range(3 * MAX_BUFFERS)]
    assert len({address(one) for one in kept}) == len(kept)
    assert len(buffers._buffers) == MAX_BUFFERS
    buffers.take((20, 4))
    assert len(buffers._buffers) == 1
    assert buffers.take((0, 4)).shape == (0, 4)
