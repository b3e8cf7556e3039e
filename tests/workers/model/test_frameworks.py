"""Models of flax, equinox and haiku: the same numbers as ours, and runs that train, evaluate and go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podembed.embedding.features.activations import Activations
from podembed.embedding.features.column_shape import ColumnShape
from podembed.jobs.models.dlrm import DLRM
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.workers.device.dense_half import cast_batch
from podembed.workers.job.job import JobError
from podembed.workers.model.batch import ModelBatch
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.flax_models import NnxModel, spec_of
from tests.long_tests import long_case
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import small_job
from tests.training import fit_job
from tests.workers.model.framework_models import BOTTOM, DLRMS, THINNED, TOP, LinenDLRM

NAMES = ("a", "b", "c")
WIDTH = 8
NUM_SAMPLES = 20


def test_a_dlrm_in_each_framework_has_the_loss_and_the_gradients_of_ours() -> None:
    """With the same weights, which are matched by their shapes."""
    random = np.random.default_rng(0)
    values = [jnp.asarray(random.normal(size=(NUM_SAMPLES, WIDTH)), jnp.float32) for _ in NAMES]
    batch = ModelBatch(
        dense=jnp.asarray(random.normal(size=(NUM_SAMPLES, 4)), jnp.float32),
        activations=Activations(zip(NAMES, values, strict=True)),
        labels={"click": jnp.asarray(random.random(NUM_SAMPLES) < 0.5, jnp.float32)},
        weights=jnp.ones(NUM_SAMPLES),
    )
    spec = ModelSpec(num_dense=4, activation_shapes=dict.fromkeys(NAMES, (WIDTH,)), batch_size=NUM_SAMPLES)
    ours = DLRM(bottom=BOTTOM, top=TOP)
    # Initial values are traced and not computed: to compile what draws them takes longer than all the rest.
    shapes = jax.eval_shape(lambda key: ours.init(key, 4, dict.fromkeys(NAMES, WIDTH)), jax.random.key(1))
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), shapes)
    expected = loss_and_gradients(lambda params, batch: ours.apply(params, batch.dense, batch.activations))(
        params, batch
    )
    by_shape = {tuple(leaf.shape): np.asarray(leaf) for leaf in jax.tree.leaves(params)}
    assert len(by_shape) == len(jax.tree.leaves(params))
    context = StepContext.alone(NUM_SAMPLES)
    for name, make in DLRMS.items():
        model = make(WIDTH)
        first = jax.eval_shape(lambda key, model=model: model.init(key, spec).value, jax.random.key(0))

        def same(leaf: Any) -> Any:
            # equinox lays a matrix the other way round.
            shape = tuple(leaf.shape)
            return jnp.asarray(by_shape[shape] if shape in by_shape else by_shape[shape[::-1]].T)

        def scores(params: Any, batch: ModelBatch, model: Any = model) -> Any:
            return model.apply(params, batch, replace(context, state=model.init(context.key, spec).state)).value

        found = loss_and_gradients(scores)(jax.tree.map(same, first), batch)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, err_msg=name)
        for feature in NAMES:
            np.testing.assert_allclose(found[1][feature], expected[1][feature], atol=1e-6, err_msg=name)


def loss_and_gradients(scores: Any) -> Any:
    def loss(params: Any, batch: ModelBatch) -> Any:
        found = scores(params, batch)
        return (jnp.logaddexp(0.0, found) - batch.label * found).mean()

    def both(params: Any, batch: ModelBatch) -> Any:
        of_activations = jax.grad(lambda values: loss(params, replace(batch, activations=values)))
        return loss(params, batch), of_activations(batch.activations)

    return jax.jit(both)


@pytest.mark.parametrize("name", [name if name == "flax.nnx" else long_case(name) for name in THINNED])
def test_a_model_with_dropout_and_batch_normalization_goes_on_where_it_was(
    small_data: str, tmp_path: Path, name: str
) -> None:
    """A run in one piece and a run in two end with the same bytes; so statistics are committed and come back."""
    job = replace(small_job(folder=small_data, audit=False, evaluate=True), model=THINNED[name])
    states = {}
    for folder, stops in {"one": (20,), "two": (10, 20)}.items():
        for stop in stops:
            result = fit_job(
                job, tmp_path, name=folder, max_steps=stop, checkpoint_config=CheckpointConfig(every_steps=10)
            )
            assert result.step == stop
            assert len(result.evaluations) == 1
        states[folder] = committed_state(str(tmp_path / folder))
    assert any(key.startswith("dense/state/") for key in states["one"])
    assert_same_bytes(states["one"], states["two"])


class Cached(nnx.Module):
    """With a plain array, and state of other types than floating point."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.factors = jnp.arange(1.0, 5.0)
        self.linear = nnx.Linear(4, 1, rngs=rngs)
        self.steps = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, batch: ModelBatch, context: StepContext) -> jax.Array:
        self.steps[...] += 1
        return self.linear(batch.dense * self.factors)[:, 0]


def test_a_module_of_nnx_may_hold_plain_arrays() -> None:
    model, spec = NnxModel(lambda rngs, spec: Cached(rngs)), ModelSpec(num_dense=4, activation_shapes={}, batch_size=2)
    first = jax.jit(lambda key: model.init(key, spec))(jax.random.key(0))
    batch, context = replace(spec.example(2), dense=jnp.ones((2, 4))), StepContext.alone(2, state=first.state)
    found = jax.jit(lambda params: model.apply(params, batch, context))(first.value)
    kernel = np.asarray(first.value["linear"]["kernel"])[:, 0]
    np.testing.assert_allclose(found.value, np.full(2, kernel @ np.arange(1.0, 5.0)), rtol=1e-6)
    assert int(found.state["steps"]) == 1


def test_a_module_is_made_in_a_step_with_the_spec_that_it_was_made_with_at_first() -> None:
    spec = ModelSpec(
        num_dense=4,
        activation_shapes={"item": (8,), "history": (5, 8)},
        batch_size=3,
        label="click",
        labels=("click", "buy"),
        sequences={"times": 7, "history": 5},
        columns={"times": ColumnShape((7,), "int32"), "image": ColumnShape((6,)), "age": ColumnShape()},
    )
    batch = spec.example(3)
    assert spec_of(batch, StepContext.alone(3)) == spec
    assert spec_of(cast_batch(batch, "bfloat16"), StepContext.alone(3)) == spec


@pytest.mark.parametrize(
    ("module", "adapter"),
    [(LinenDLRM(WIDTH), r"FlaxModel\(module\)"), (Cached(nnx.Rngs(0)), r"NnxModel\(lambda rngs, spec")],
)
def test_a_module_in_the_place_of_a_model_is_refused_with_its_adapter(
    small_data: str, module: Any, adapter: str
) -> None:
    with pytest.raises(JobError, match=f"module of a framework: write model={adapter}"):
        replace(small_job(folder=small_data, audit=False), model=module)
