"""`Variable`: values, assignment, arithmetic, and the blocks that look through it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.tf.keras.variable import Variable, assignments_refused, bound, reads_recorded


def test_dtypes_are_those_of_jax_and_64_bit_integers_stay_exact():
    assert Variable(1.0).dtype == np.float32
    assert Variable(np.ones(2)).dtype == np.float32
    assert Variable([1, 2]).dtype == np.int32
    assert Variable(1, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    counter = Variable(2**40, dtype=np.int64)
    counter.assign_add(1)
    assert counter.dtype == np.int64
    assert counter.numpy() == 2**40 + 1
    with pytest.raises(ValueError, match="jax_enable_x64"):
        Variable(1.0, dtype=np.float64)


def test_python_numbers_do_not_stay_weakly_typed():
    assert not Variable(1.0).value.weak_type
    assert not Variable(0.0).assign(jnp.asarray(2.0)).value.weak_type


def test_attributes():
    variable = Variable(lambda: jnp.ones((2, 3)), trainable=False, name="kernel", shape=(2, 3))
    assert (variable.name, variable.trainable, variable.shape, variable.ndim, variable.size) == (
        "kernel",
        False,
        (2, 3),
        2,
        6,
    )
    assert len(variable) == 2
    assert [row.shape for row in variable] == [(3,), (3,)]
    assert Variable(1.0).name == "Variable"
    assert repr(Variable(1.5, name="w")).startswith("<Variable 'w' shape=() dtype=float32")


def test_a_variable_is_a_copy_of_its_initial_value():
    array = np.ones(2, np.float32)
    variable, other = Variable(array), Variable(Variable(array))
    array[0] = 5.0
    np.testing.assert_array_equal(variable.numpy(), [1.0, 1.0])
    variable.assign([2.0, 3.0])
    np.testing.assert_array_equal(other.numpy(), [1.0, 1.0])


def test_assignments_return_the_variable_and_keep_the_dtype():
    variable = Variable([1.0, 2.0])
    assert variable.assign([3, 4]) is variable
    assert variable.assign_add(np.float64(1.0)) is variable
    assert variable.assign_sub(Variable([0.5, 0.5])) is variable
    assert variable.dtype == np.float32
    np.testing.assert_array_equal(variable.numpy(), [3.5, 4.5])


def test_bad_assignments():
    with pytest.raises(ValueError, match=r"shape \(3,\).*shape \(2,\)"):
        Variable([1.0, 2.0]).assign(np.ones(3))
    with pytest.raises(TypeError, match="float32 for variable 'n' of dtype int32"):
        Variable(1, name="n").assign(1.5)
    with pytest.raises(ValueError, match="no initial value"):
        Variable(None)
    with pytest.raises(ValueError, match="Expected \\(3,\\)"):
        Variable([1.0], shape=(3,))


def test_arithmetic_gives_arrays():
    a, b = Variable([1.0, 2.0]), Variable([4.0, 8.0])
    np.testing.assert_array_equal(3 * a * a + 2 * b - 1, [10.0, 27.0])
    np.testing.assert_array_equal(b / a, [4.0, 4.0])
    np.testing.assert_array_equal(1 / a, [1.0, 0.5])
    np.testing.assert_array_equal(b // 3, [1.0, 2.0])
    np.testing.assert_array_equal(9 // b, [2.0, 1.0])
    np.testing.assert_array_equal(b % 3, [1.0, 2.0])
    np.testing.assert_array_equal(9 % b, [1.0, 1.0])
    np.testing.assert_array_equal(a**2, [1.0, 4.0])
    np.testing.assert_array_equal(2**a, [2.0, 4.0])
    np.testing.assert_array_equal(5 - a, [4.0, 3.0])
    np.testing.assert_array_equal(1 + a, [2.0, 3.0])
    np.testing.assert_array_equal(abs(-a), [1.0, 2.0])
    assert a @ b == 20.0
    assert np.array([1.0, 1.0]) @ a == 3.0
    np.testing.assert_array_equal(np.array([1.0, 1.0]) * a, [1.0, 2.0])
    np.testing.assert_array_equal(jnp.ones(2) * a, [1.0, 2.0])
    assert isinstance(a + a, jax.Array)
    assert a[1] == 2.0


def test_comparison_is_by_element_and_the_hash_by_object():
    a, b = Variable([1.0, 2.0]), Variable([1.0, 3.0])
    for comparison, expected in [
        (a == b, [True, False]),
        (a != b, [False, True]),
        (a < b, [False, True]),
        (a <= b, [True, True]),
        (a > b, [False, False]),
        (a >= 2, [False, True]),
    ]:
        np.testing.assert_array_equal(comparison, expected)
    assert (a == None) is False  # noqa: E711
    assert (a != None) is True  # noqa: E711
    assert {a: 1, b: 2}[b] == 2


def test_conversions():
    variable = Variable(3)
    assert (int(variable), float(variable), bool(variable), [10, 20, 30, 40][variable]) == (3, 3.0, True, 40)
    np.testing.assert_array_equal(np.asarray(Variable([1.0, 2.0])), [1.0, 2.0])
    np.testing.assert_array_equal(jnp.asarray(Variable([1.0, 2.0])), [1.0, 2.0])
    assert isinstance(Variable(1.5).numpy(), np.float32)


def test_clone_is_independent():
    variable = Variable(1.0, name="w", trainable=False)
    twin = variable.clone()
    variable.assign(2.0)
    assert (float(twin), twin.name, twin.trainable) == (1.0, "w", False)


def test_bound_puts_values_back_also_for_a_variable_named_twice():
    variable = Variable(1.0)
    with bound([variable, variable], [2.0, 3.0]):
        assert variable == 3.0
    assert variable == 1.0


def test_reads_are_recorded_inside_the_block_only():
    a, b, read = Variable(1.0), Variable(2.0), []
    with reads_recorded(read.append):
        assert a * 2 == 2.0
    assert b == 2.0
    assert len(read) == 1
    assert read[0] is a


def test_assignments_can_be_refused():
    variable = Variable(1.0, name="w")
    with assignments_refused(), pytest.raises(RuntimeError, match="'w' inside a loss"):
        variable.assign_add(1.0)
    variable.assign(2.0)
