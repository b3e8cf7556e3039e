"""How activations get to JAX: small ones through one program as copies, large ones where they lie."""

import jax
import numpy as np
import pytest

from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.tf.tpu_embedding.batches import all_to_jax


def arrays_of(count: int, *shape: int) -> list[np.ndarray]:
    found = []
    for at in range(count):
        array = aligned_empty(shape)
        array[...] = np.arange(array.size).reshape(shape) + at
        found.append(array)
    return found


@pytest.mark.parametrize(("count", "shape"), [(1, (2, 3)), (5, (4, 3)), (5, (4, 2, 3)), (4, (1024, 64)), (5, (0, 3))])
def test_all_arrive_with_their_values_and_shapes(count: int, shape: tuple[int, ...]) -> None:
    given = arrays_of(count, *shape)
    found = all_to_jax(given)
    assert all(isinstance(one, jax.Array) for one in found)
    assert [one.shape for one in found] == [shape] * count
    for one, array in zip(found, given, strict=True):
        np.testing.assert_array_equal(np.asarray(one), array)


def test_several_small_arrays_are_copies_that_do_not_hold_the_memory_they_came_from() -> None:
    given = arrays_of(5, 4, 3)
    before = [array.copy() for array in given]
    found = jax.block_until_ready(all_to_jax(given))
    for array in given:
        array[...] = -1.0
    for one, array in zip(found, before, strict=True):
        np.testing.assert_array_equal(np.asarray(one), array)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have their own memory")
def test_large_arrays_are_not_copied() -> None:
    given = arrays_of(4, 1024, 64)
    for one, array in zip(all_to_jax(given), given, strict=True):
        assert one.unsafe_buffer_pointer() == array.ctypes.data
