"""Products of layers and their gradients against numpy in float64, and where samples lie on several devices."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.jobs.models.layers import linear, linear_each, product

PROCESS = Path(__file__).with_name("layers_process.py")


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(len(shapes))
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def gradients(x: Any, weight: Any, g: Any) -> tuple[Any, Any]:
    return jax.jit(jax.grad(lambda x, w: (product(x, w) * g).sum(), argnums=(0, 1)))(x, weight)


# Rows, positions that are added up by sample, too few for that, and two axes of them.
@pytest.mark.parametrize(("shape", "width"), [((40,), 3), ((61, 50), 48), ((9, 2), 64), ((7, 4, 20), 30)])
def test_gradients_are_those_of_the_product(shape: tuple[int, ...], width: int) -> None:
    x, weight, g = drawn((*shape, 16), (16, width), (*shape, width))
    wide, flat = x.reshape(-1, 16).astype(np.float64), g.reshape(-1, width).astype(np.float64)
    expected = (flat @ weight.T.astype(np.float64)).reshape(x.shape), wide.T @ flat
    for found, right in zip(gradients(x, weight, g), expected, strict=True):
        assert np.abs(found - right).max() < 2e-6 * np.abs(right).max() * len(flat) ** 0.5


def test_gradients_of_products_under_vmap() -> None:
    x, weight, g = drawn((3, 20, 40, 8), (8, 5), (3, 20, 40, 5))
    found = jax.jit(jax.grad(lambda w: (jax.vmap(lambda one: product(one, w))(x) * g).sum()))(weight)
    right = np.einsum("anlk,anlw->kw", x.astype(np.float64), g.astype(np.float64))
    assert np.abs(np.asarray(found) - right).max() < 1e-5 * np.abs(right).max()


def test_gradients_in_bfloat16_are_added_up_in_float32() -> None:
    ones, weight = jnp.ones((512, 16, 4), jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16)
    g = jnp.abs(jnp.asarray(drawn((512, 16, 4))[0], jnp.bfloat16))
    _, found = gradients(ones, weight, g)
    right = np.asarray(g, np.float64).sum(axis=(0, 1))
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found[0], np.float64) - right).max() < 0.01 * right.max()


def test_samples_stay_on_their_devices() -> None:
    done = subprocess.run([sys.executable, str(PROCESS)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["positions", "rows", "attention"]


def test_layers_of_one_input_give_what_each_gives() -> None:
    x, *weights = drawn((30, 6), (6, 4), (6, 1), (6, 9))
    layers = [{"weight": jnp.asarray(one), "bias": jnp.full(one.shape[1], 0.5)} for one in weights]
    for found, one in zip(linear_each(layers, jnp.asarray(x)), weights, strict=True):
        np.testing.assert_allclose(found, x @ one + 0.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("of_inputs", "of_weight"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_arrays_of_two_types_have_gradients_of_their_own(of_inputs: str, of_weight: str) -> None:
    inputs = jnp.asarray(np.random.default_rng(0).standard_normal((6, 5, 4)), of_inputs)
    layer = {"weight": jnp.full((4, 3), 0.3, of_weight), "bias": jnp.ones(3, of_weight)}

    def loss(inputs: jax.Array, layer: dict[str, jax.Array], apply: Any) -> jax.Array:
        return (apply(layer, inputs).astype("float32") ** 2).sum()

    found = jax.jit(jax.grad(partial(loss, apply=linear), (0, 1)))(inputs, layer)
    plain = partial(loss, apply=lambda layer, inputs: inputs @ layer["weight"] + layer["bias"])
    for one, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.grad(plain, (0, 1))(inputs, layer)), strict=True
    ):
        assert one.dtype == expected.dtype
        np.testing.assert_allclose(one.astype("float32"), expected.astype("float32"), rtol=0.02, atol=0.1)
    empty = jax.grad(partial(loss, apply=linear), 1)(inputs[:0], layer)
    assert not np.any(empty["weight"])
