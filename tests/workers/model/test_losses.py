"""Losses over candidates, against numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.flax_models import spec_of
from podembed.workers.model.losses import bpr, in_batch_softmax, pointwise, sampled_softmax

N, C = 6, 4
SCORES = np.random.default_rng(0).normal(0, 2, (N, C)).astype(np.float32)
SPEC = ModelSpec(num_dense=0, activation_shapes={}, batch_size=N)


def softmax_loss(logits: np.ndarray, at: int) -> float:
    return float(np.log(np.exp(logits.astype(np.float64)).sum()) - logits[at])


def test_pointwise_judges_each_candidate() -> None:
    labels = np.zeros((N, C))
    labels[:, 0] = label = np.array([1, 1, 0, 1, 0.5, 1])
    expected = np.logaddexp(0, SCORES) - labels * SCORES
    np.testing.assert_allclose(pointwise(jnp.asarray(SCORES), jnp.asarray(label)), expected.mean(axis=1), rtol=1e-5)
    ones = pointwise(jnp.asarray(SCORES), loss=optax.squared_error)
    np.testing.assert_allclose(ones, ((SCORES - np.eye(C)[0]) ** 2).mean(axis=1), rtol=1e-5)


def test_bpr_compares_the_positive_with_each_negative() -> None:
    expected = np.log1p(np.exp(-(SCORES[:, :1] - SCORES[:, 1:]).astype(np.float64))).mean(axis=1)
    np.testing.assert_allclose(bpr(jnp.asarray(SCORES)), expected, rtol=1e-5)


def test_sampled_softmax_takes_off_how_likely_each_is_drawn() -> None:
    log_q = np.log(np.random.default_rng(1).random((N, C))).astype(np.float32)
    for given, logits in ((None, SCORES), (jnp.asarray(log_q), SCORES - log_q)):
        expected = [softmax_loss(row, 0) for row in logits]
        np.testing.assert_allclose(sampled_softmax(jnp.asarray(SCORES), log_q=given), expected, rtol=1e-5)


def test_in_batch_softmax_leaves_out_padding_and_the_same_item() -> None:
    random = np.random.default_rng(2)
    user, item = random.normal(0, 1, (2, N, 3)).astype(np.float32)
    log_q, ids = np.log(random.random(N)).astype(np.float32), np.array([1, 2, 1, 3, 4, 2])
    weights = np.array([1, 1, 2, 0, 1, 1], np.float32)
    batch = replace(SPEC.example(N), weights=jnp.asarray(weights))
    context = replace(StepContext.alone(N), weights=jnp.asarray(weights))
    found = in_batch_softmax(
        jnp.asarray(user),
        jnp.asarray(item),
        context,
        batch,
        log_q=jnp.asarray(log_q),
        ids=jnp.asarray(ids),
        temperature=0.5,
    )
    logits = user @ item.T / 0.5 - log_q
    for at in range(N):
        others = [j for j in range(N) if weights[j] > 0 and (j == at or ids[j] != ids[at])]
        expected = softmax_loss(logits[at][others], others.index(at)) if weights[at] else 0.0
        np.testing.assert_allclose(found[at], expected, rtol=1e-4, err_msg=str(at))
    # Nothing counts where nothing has weight, and its gradient is a number.
    empty = replace(batch, weights=jnp.zeros(N))
    idle = replace(context, weights=empty.weights)
    gradient = jax.grad(lambda user: in_batch_softmax(user, jnp.asarray(item), idle, empty).sum())(jnp.asarray(user))
    np.testing.assert_array_equal(gradient, np.zeros_like(user))


def test_what_negatives_do_not_declare_is_named() -> None:
    """In the batch of an example, in one that JAX made, and while JAX traces."""
    spec = ModelSpec(num_dense=0, activation_shapes={"item": (C, 2), "bias": (C, 1)}, batch_size=N, log_q=("item",))
    batch = jax.tree.map(lambda leaf: leaf, spec.example(N))
    assert batch.log_q["item"].shape == (N, C)
    made = spec_of(batch, StepContext.alone(N))
    assert (made.log_q, made.log_frequency) == (("item",), ())
    with pytest.raises(KeyError, match=r"no batch.log_frequency\['item'\].*Negatives\(..., log_frequency=True\)"):
        batch.log_frequency["item"]
    with pytest.raises(KeyError, match=r"no batch.log_q\['bias'\]. Expected one of \['item'\]"):
        jax.jit(lambda given: given.log_q["bias"])(batch)
