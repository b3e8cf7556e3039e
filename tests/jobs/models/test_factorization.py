"""FM and DeepFM against their formulas, and the normalization of DeepFM against the batch without padding."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed import ModelBatch, ModelSpec, StepContext
from podembed.embedding import Activations
from podembed.jobs.models import FM, DeepFM

WIDTH, NUM_DENSE, N = 4, 2, 6
SPEC = ModelSpec(num_dense=NUM_DENSE, activation_shapes={"a": (WIDTH,), "b": (WIDTH,), "c": (WIDTH,)}, batch_size=N)


def batch_of(seed: int = 0, *, padding: int = 0) -> ModelBatch:
    """Six samples; the last ones are padding, of which a model must not learn."""
    random = np.random.default_rng(seed)
    activations = {name: jnp.asarray(random.normal(size=(N, WIDTH)), jnp.float32) for name in "abc"}
    weights = jnp.where(jnp.arange(N) < N - padding, 1.0, 0.0)
    dense = jnp.asarray(random.normal(size=(N, NUM_DENSE)), jnp.float32)
    return replace(SPEC.example(N), dense=dense, activations=Activations(activations), weights=weights)


def context_of(batch: ModelBatch, state: Any, *, training: bool) -> StepContext:
    return replace(StepContext.alone(N, training=training, state=state), weights=batch.weights)


def machine(params: Any, batch: ModelBatch) -> np.ndarray:
    """Pair by pair."""
    found = []
    for at in range(N):
        terms = [np.asarray(rows[at], np.float64) for rows in batch.activations.values()]
        terms += [float(x) * np.asarray(v) for x, v in zip(batch.dense[at], params["dense"], strict=True)]
        pairs = sum(one[:-1] @ other[:-1] for one, other in combinations(terms, 2))
        found.append(float(params["bias"]) + sum(one[-1] for one in terms) + pairs)
    return np.array(found)


def test_a_machine_has_all_pairs() -> None:
    batch, model = batch_of(), FM(bias=3.5)
    params = model.init(jax.random.key(0), SPEC)
    scores = model.apply(params, batch, StepContext.alone(N))
    np.testing.assert_allclose(scores, machine(params, batch), rtol=2e-4, atol=1e-4)


def layers(params: Any, batch: ModelBatch, norm: Any) -> np.ndarray:
    factors = [np.asarray(rows)[:, :-1] for rows in batch.activations.values()]
    values = np.concatenate([*factors, np.asarray(batch.dense)], axis=1).astype(np.float64)
    *hidden, last = params["layers"]
    for at, layer in enumerate(hidden):
        values = values @ np.asarray(layer["weight"]) + np.asarray(layer["bias"])
        values = np.maximum(norm(at, values), 0)
    return (values @ np.asarray(last["weight"]) + np.asarray(last["bias"]))[:, 0]


@pytest.mark.parametrize("padding", [0, 2])
def test_layers_are_normalized_by_the_batch_and_later_by_running_means(padding: int) -> None:
    batch, model = batch_of(padding=padding), DeepFM(layers=(5, 3), dropout=0.0, momentum=0.5)
    made = model.init(jax.random.key(0), SPEC)
    real, seen = N - padding, []

    def by_batch(at: int, values: np.ndarray) -> np.ndarray:
        mean, variance = values[:real].mean(axis=0), values[:real].var(axis=0)
        seen.append((mean, variance))
        return (values - mean) / np.sqrt(variance + 1e-5)

    trained = model.apply(made.value, batch, context_of(batch, made.state, training=True))
    expected = machine(made.value["machine"], batch) + layers(made.value, batch, by_batch)
    np.testing.assert_allclose(trained.value[:real], expected[:real], rtol=1e-3, atol=1e-3)
    for kept, (mean, variance) in zip(trained.state, seen, strict=True):
        np.testing.assert_allclose(kept["mean"], 0.5 * mean, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(kept["variance"], 0.5 + 0.5 * variance, rtol=1e-3, atol=1e-4)

    def by_state(at: int, values: np.ndarray) -> np.ndarray:
        mean, variance = (np.asarray(trained.state[at][name]) for name in ("mean", "variance"))
        return (values - mean) / np.sqrt(variance + 1e-5)

    judged = model.apply(made.value, batch, context_of(batch, trained.state, training=False))
    expected = machine(made.value["machine"], batch) + layers(made.value, batch, by_state)
    np.testing.assert_allclose(judged.value, expected, rtol=1e-3, atol=1e-3)
    assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), judged.state, trained.state))


def test_dropout_is_of_training_alone_and_another_one_each_step() -> None:
    batch, model = batch_of(), DeepFM(layers=(16,), dropout=0.5, is_normalized=False)
    made = model.init(jax.random.key(0), SPEC)
    assert made.state == {}

    def scores(step: int, *, training: bool) -> np.ndarray:
        context = replace(context_of(batch, {}, training=training), key=jax.random.key(step))
        return np.asarray(model.apply(made.value, batch, context).value)

    np.testing.assert_array_equal(scores(0, training=False), scores(1, training=False))
    assert (scores(0, training=True) != scores(1, training=True)).any()


def test_features_of_several_widths_are_refused() -> None:
    other = replace(SPEC, activation_shapes={"a": (4,), "b": (3,)})
    with pytest.raises(ValueError, match=r"shapes \{'a': \(4,\), 'b': \(3,\)\}. Expected one vector a sample"):
        FM().init(jax.random.key(0), other)
