"""Our row optimizers beside those of `jax-tpu-embedding`, whose updates run on the CPU: several steps, equal gradients.

Each starts from what it had itself before. So differences of rounding may add up, and those of a formula show.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from podembed.embedding.optimizers import FTRL, SGD, Adagrad, AdagradMomentum, Adam, Optimizer
from podembed.embedding.row_optimizers.base import learning_rate_at
from podembed.embedding.row_optimizers.row_step import TouchedRows
from tests.tools.sparsecore.package import embedding_spec
from tests.tools.sparsecore.updates import lowered_step, update_on_cpu

ROWS, DIM, STEPS = 33, 12, 20


def ours(optimizer: Optimizer, gradients: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Weights and slots after the steps, by our kernels."""
    weights, *slots = [value.copy() for value in values]
    touched = TouchedRows(rows=np.arange(ROWS), head=np.arange(ROWS + 1, dtype=np.int32), following=None)
    for step, gradient in enumerate(gradients):
        rate = learning_rate_at(optimizer.learning_rate, step)
        optimizer.apply(rows=weights, slots=slots, touched=touched, gradients=[gradient], learning_rate=rate)
    return [weights, *slots]


def theirs(optimizer, gradients: Sequence[np.ndarray], values: Sequence[np.ndarray], **settings) -> list[np.ndarray]:
    """The same by the package's update."""
    update = update_on_cpu(optimizer, num_values=ROWS * DIM, **settings)
    found = [value.reshape(-1) for value in values]
    for step, gradient in enumerate(gradients):
        found = update(gradient.reshape(-1), found, step)
    return [value.reshape(ROWS, DIM) for value in found]


def start(optimizer: Optimizer, *, scale: float = 1.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients of the steps, and first weights and slots."""
    rng = np.random.default_rng(3)
    gradients = [(scale * rng.standard_normal((ROWS, DIM))).astype(np.float32) for _ in range(STEPS)]
    slots = [np.full((ROWS, DIM), slot.initial_value, np.float32) for slot in optimizer.slots]
    return gradients, [rng.standard_normal((ROWS, DIM)).astype(np.float32), *slots]


FTRL_SETTINGS = {"learning_rate": 0.05, "l1_regularization_strength": 0.02, "l2_regularization_strength": 0.1}
PAIRS = {
    "SGD": (SGD(0.3), "SGDOptimizerSpec", {"learning_rate": 0.3}),
    "Adagrad": (Adagrad(0.3), "AdagradOptimizerSpec", {"learning_rate": 0.3}),
    "AdagradMomentum": (
        AdagradMomentum(0.3, momentum=0.8),
        "AdagradMomentumOptimizerSpec",
        {"learning_rate": 0.3, "momentum": 0.8},
    ),
    "AdagradMomentum, Nesterov and a mean": (
        AdagradMomentum(0.3, momentum=0.8, use_nesterov=True, beta2=0.9, exponent=3.0),
        "AdagradMomentumOptimizerSpec",
        {"learning_rate": 0.3, "momentum": 0.8, "use_nesterov": True, "beta2": 0.9, "exponent": 3.0},
    ),
    "FTRL": (FTRL(**FTRL_SETTINGS, beta=0.5), "FTRLOptimizerSpec", {**FTRL_SETTINGS, "beta": 0.5}),
    "FTRL, other power": (
        FTRL(**FTRL_SETTINGS, learning_rate_power=-0.7),
        "FTRLOptimizerSpec",
        {**FTRL_SETTINGS, "learning_rate_power": -0.7},
    ),
    "FTRL, linear times rate": (
        FTRL(**FTRL_SETTINGS, multiply_linear_by_learning_rate=True),
        "FTRLOptimizerSpec",
        {**FTRL_SETTINGS, "multiply_linear_by_learning_rate": True},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_formulas_are_the_same(name: str) -> None:
    optimizer, kind, arguments = PAIRS[name]
    other = getattr(embedding_spec, kind)(**arguments)
    named = type(other.slot_variables_initializers())._fields
    assert named == tuple(slot.name for slot in optimizer.slots)
    gradients, values = start(optimizer)
    settings = {"multiply_linear_by_learning_rate": other.multiply_linear_by_learning_rate} if "FTRL" in kind else {}
    found, expected = ours(optimizer, gradients, values), theirs(other, gradients, values, **settings)
    for array, one, two in zip(("rows", *named), found, expected, strict=True):
        assert not np.allclose(one, values[("rows", *named).index(array)], atol=1e-3), "it moved"
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-6, err_msg=array)


def adam_and_theirs(*, scale: float, epsilon: float = 1e-8) -> tuple[list[np.ndarray], list[np.ndarray]]:
    optimizer = Adam.corrected(0.1, epsilon=epsilon, lazy_adam=True)
    gradients, values = start(optimizer, scale=scale)
    other = embedding_spec.AdamOptimizerSpec(learning_rate=0.1, epsilon=epsilon)
    assert type(other.slot_variables_initializers())._fields == tuple(slot.name for slot in optimizer.slots)
    return ours(optimizer, gradients, values), theirs(other, gradients, values)


def test_adam_agrees_where_gradients_are_far_above_epsilon() -> None:
    found, expected = adam_and_theirs(scale=1.0)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_the_epsilon_of_adam_is_another_one() -> None:
    """Where gradients are as small as epsilon the first steps differ, as docs/sparsecore.md says; slots do not."""
    found, expected = adam_and_theirs(scale=1e-6, epsilon=1e-6)
    assert np.abs(found[0] - expected[0]).max() > 0.05
    for one, two in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-16)


def test_the_epsilon_of_each_step_makes_adam_the_same() -> None:
    """What differs is epsilon and nothing else: ours with that of the step goes their way."""
    gradients, values = start(Adam.corrected(0.1), scale=1e-6)
    found = values
    for step, gradient in enumerate(gradients):
        epsilon = 1e-6 * (1 - 0.999 ** (step + 1)) ** 0.5
        optimizer = Adam.corrected(0.1, epsilon=epsilon, lazy_adam=True)
        rate = learning_rate_at(optimizer.learning_rate, step)
        constant = Adam(rate, 0.9, 0.999, epsilon, lazy_adam=True, sum_inside_sqrt=False)
        found = ours(constant, [gradient], found)
    expected = theirs(embedding_spec.AdamOptimizerSpec(learning_rate=0.1, epsilon=1e-6), gradients, values)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["SGDOptimizerSpec", "AdagradOptimizerSpec", "AdamOptimizerSpec"])
def test_the_program_of_the_package_is_for_sparsecores(kind: str) -> None:
    """What is compared above is what its training step hands to the TPU's compiler."""
    text = lowered_step(getattr(embedding_spec, kind)(), width=16)
    assert "SparseDenseMatmulGradOpWithOptimizerUpdate" in text
    assert "called_computations = [@update]" in text
    assert jax.devices()[0].platform == "cpu"
