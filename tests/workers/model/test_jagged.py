"""`Jagged` against lists: what it gives of each sample, and the gradients that come back."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.workers.model.jagged import Jagged

LENGTHS, WIDTH, CAPACITY, LONGEST = [2, 0, 3, 1, 0], 2, 9, 4


def histories() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.random((length, WIDTH)).astype(np.float32) for length in LENGTHS]


def padded_by_hand(length: int) -> np.ndarray:
    rows = [np.pad(one, ((0, LONGEST), (0, 0)))[:length] for one in histories()]
    return np.stack(rows)


def compact() -> Jagged:
    """With filling that is no zeros, as a model may have made it."""
    filling = np.full((CAPACITY - sum(LENGTHS), WIDTH), 7.0, np.float32)
    values = jnp.asarray(np.concatenate([*histories(), filling]))
    return Jagged.of(values, jnp.asarray(LENGTHS, jnp.int32), longest=LONGEST)


def of_padded() -> Jagged:
    return Jagged.of_padded(jnp.asarray(padded_by_hand(LONGEST)), jnp.asarray(LENGTHS, jnp.int32))


@pytest.mark.parametrize("made", [compact, of_padded])
def test_each_row_knows_its_sample_and_its_position(made: Callable[[], Jagged]) -> None:
    jagged = made()
    expected = [(sample, position) for sample, length in enumerate(LENGTHS) for position in range(length)]
    found = np.flatnonzero(jagged.mask)
    samples, positions = np.asarray(jagged.samples), np.asarray(jagged.positions)
    assert [(int(samples[row]), int(positions[row])) for row in found] == expected
    np.testing.assert_array_equal(np.asarray(jagged.values)[found], np.concatenate(histories()))


@pytest.mark.parametrize("made", [compact, of_padded])
@pytest.mark.parametrize("length", [None, 1, 4, 6])
def test_padded_puts_positions_side_by_side(made: Callable[[], Jagged], length: int | None) -> None:
    shown = LONGEST if length is None else length
    expected = np.pad(padded_by_hand(LONGEST), ((0, 0), (0, 2), (0, 0)))[:, :shown]
    np.testing.assert_array_equal(made().padded(length), expected)
    mask = np.arange(shown) < np.array(LENGTHS)[:, None]
    np.testing.assert_array_equal(made().mask_padded(length), mask)


@pytest.mark.parametrize("made", [compact, of_padded])
def test_what_lies_side_by_side_is_rows_again(made: Callable[[], Jagged]) -> None:
    jagged = made()
    mask = np.asarray(jagged.mask)
    found = np.asarray(jagged.rows_of(jagged.padded()))
    np.testing.assert_array_equal(found[mask], np.asarray(jagged.values)[mask])
    assert not found[~mask].any()
    cut = np.asarray(jagged.rows_of(jagged.padded(2)))
    is_early = mask & (np.asarray(jagged.positions) < 2)
    np.testing.assert_array_equal(cut[is_early], np.asarray(jagged.values)[is_early])
    assert not cut[~is_early].any()


@pytest.mark.parametrize("made", [compact, of_padded])
def test_sums_and_values_of_samples(made: Callable[[], Jagged]) -> None:
    jagged = made()
    np.testing.assert_allclose(jagged.sum(), [one.sum(axis=0) for one in histories()], rtol=1e-6)
    of_samples = np.asarray(jagged.of_samples(jnp.arange(5.0)))
    mask = np.asarray(jagged.mask)
    np.testing.assert_array_equal(of_samples[mask], np.repeat(np.arange(5.0), LENGTHS))
    np.testing.assert_array_equal(of_samples[~mask], 0.0)


@pytest.mark.parametrize("made", [compact, of_padded])
def test_gradients_are_those_of_scattered_rows(made: Callable[[], Jagged]) -> None:
    """Each function is linear in the values: its gradient against a vector is the transpose, found by differences."""
    jagged = made()
    random = np.random.default_rng(3)

    def check(function: Callable[[jax.Array], jax.Array], at: jax.Array) -> None:
        shape = jax.eval_shape(function, at).shape
        against = jnp.asarray(random.random(shape), jnp.float32)
        found = jax.grad(lambda values: jnp.vdot(function(values), against))(at)
        np.testing.assert_allclose(
            found.reshape(-1), columns(function, at) @ np.asarray(against).reshape(-1), rtol=1e-5, atol=1e-6
        )

    def columns(function: Callable[[jax.Array], jax.Array], at: jax.Array) -> np.ndarray:
        units = np.eye(at.size, dtype=np.float32).reshape(-1, *at.shape)
        return np.stack([np.asarray(function(jnp.asarray(unit))).reshape(-1) for unit in units])

    check(lambda values: jagged.with_values(values).padded(), jagged.values)
    check(lambda values: jagged.with_values(values).padded(2), jagged.values)
    check(lambda values: jagged.with_values(values).sum(), jagged.values)
    check(jagged.rows_of, jnp.ones((len(LENGTHS), LONGEST, WIDTH)))
    check(jagged.rows_of, jnp.ones((len(LENGTHS), 2, WIDTH)))
    check(jagged.of_samples, jnp.ones((len(LENGTHS), WIDTH)))
