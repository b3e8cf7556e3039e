"""Mixed precision: the model computes with bfloat16, all that is kept and committed stays float32."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podembed.jobs.models.interaction import with_products
from podembed.serving.predict.portable_forward import export_forward
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.device.programs import Inputs
from podembed.workers.device.transfers.ways import HostArrays
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.padding import LARGEST_LEVELS
from podembed.workers.model.batch import ModelBatch, WithState
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.equinox_model import EquinoxModel
from podembed.workers.model.flax_models import NnxModel
from tests.long_tests import long_case
from tests.small_job import SmallModel, small_job
from tests.workers.model.framework_models import THINNED, joined

NUM_SAMPLES = 8
_PRODUCT = re.compile(r"dot_general.*\(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\) -> tensor<[^>]*x(\w+)>")


class Centred:
    """Vectors less the means of the batch, which it keeps; it notes the types that it is given."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        width = spec.num_dense + sum(spec.widths.values())
        return WithState({"w": jax.random.normal(key, (width,)) / 8}, {"mean": jnp.zeros(width), "steps": 0})

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        values = jnp.concatenate([batch.dense, *batch.activations.values()], axis=1)
        mean = context.mean(values)
        self.seen["apply"] = (params["w"].dtype, values.dtype, mean.dtype, batch.label.dtype)
        return WithState((values - mean) @ params["w"], {"mean": mean, "steps": context.state["steps"] + 1})

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        first = next(iter(batch.activations.values()))
        self.seen["loss"] = (outputs.dtype, first.dtype, context.params["w"].dtype, batch.label.dtype)
        return jnp.logaddexp(0.0, outputs) - batch.label * outputs


def trained(job: JobConfig) -> tuple[list[float], dict[str, np.ndarray], list[np.ndarray], np.ndarray]:
    """Losses, dense arrays, gradients of the activations and scores, of some steps on the same samples."""
    random = np.random.default_rng(0)
    worker = DeviceWorker(job=job, num_samples=NUM_SAMPLES)
    worker.build()
    inputs = Inputs(
        dense=random.random((NUM_SAMPLES, job.data.num_dense), np.float32),
        activations=tuple(random.random((NUM_SAMPLES, *shape), np.float32) for shape in job.activation_shapes.values()),
        labels=np.arange(NUM_SAMPLES, dtype=np.float32) % 2,
        weights=np.ones(NUM_SAMPLES, np.float32),
    )
    gradients = [np.zeros((NUM_SAMPLES, *shape), np.float32) for shape in job.activation_shapes.values()]
    share = HostArrays(inputs, tuple(gradients), np.zeros(NUM_SAMPLES, np.float32))
    begun = [worker.begin_training(share, weight_sum=NUM_SAMPLES, step=step) for step in range(3)]
    for step in (*begun, worker.begin_evaluation(share)):
        step.finish()
    losses = [float(step.last) for step in begun]
    return losses, worker.dense_arrays(), gradients, share.scores


def test_what_is_kept_is_float32_and_the_numbers_are_near_those_of_float32(small_data: str) -> None:
    model = Centred()
    job = replace(small_job(folder=small_data, audit=False), model=model)
    expected = trained(job)
    losses, arrays, gradients, scores = trained(replace(job, compute_dtype="bfloat16"))
    assert {key: values.dtype for key, values in arrays.items()} == {
        key: values.dtype for key, values in expected[1].items()
    }
    assert arrays["params/w"].dtype == arrays["state/mean"].dtype == np.float32
    # Rounded to 8 bits on the way, so near and not the same.
    np.testing.assert_allclose(losses, expected[0], rtol=2e-2)
    np.testing.assert_allclose(scores, expected[3], atol=5e-2)
    assert scores.tolist() != expected[3].tolist()
    for found, wanted in zip(gradients, expected[2], strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-2 * np.abs(wanted).max() + 1e-6)
    narrow, wide = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    assert model.seen == {"apply": (narrow, narrow, narrow, wide), "loss": (wide, wide, wide, wide)}


class NnxLine(nnx.Module):
    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        self.last = nnx.Linear(spec.num_dense + sum(spec.widths.values()), 1, rngs=rngs)

    def __call__(self, batch: ModelBatch, context: StepContext) -> jax.Array:
        return self.last(joined(batch))[:, 0]


class EquinoxLine(eqx.Module):
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array, spec: ModelSpec) -> None:
        self.last = eqx.nn.Linear(spec.num_dense + sum(spec.widths.values()), "scalar", key=key)

    def __call__(self, batch: ModelBatch, context: StepContext) -> jax.Array:
        return jax.vmap(self.last)(joined(batch))


MODELS: dict[str, Any] = {
    "short": SmallModel(),
    # With batch normalization and dropout. Those of the other two return the type of their statistics.
    "flax.linen": THINNED["flax.linen"],
    "haiku": THINNED["haiku"],
    "flax.nnx": NnxModel(lambda rngs, spec: NnxLine(spec, rngs)),
    "equinox": EquinoxModel(lambda key, spec: EquinoxLine(key, spec)),
}


@pytest.mark.parametrize("name", ["short", "flax.nnx", *map(long_case, ["flax.linen", "equinox", "haiku"])])
def test_all_products_of_a_step_and_of_an_evaluation_are_of_bfloat16(small_data: str, name: str) -> None:
    job = replace(small_job(folder=small_data, audit=False), model=MODELS[name], compute_dtype="bfloat16")
    worker = DeviceWorker(job=job, num_samples=NUM_SAMPLES)
    worker.build(is_rehearsal=True)
    assert all(values.dtype == np.float32 for key, values in worker.dense_arrays().items() if key.startswith("params"))
    for lowered in worker.programs.lower(LARGEST_LEVELS):
        products = _PRODUCT.findall(lowered.as_text())
        assert products
        assert {types[:2] for types in products} == {("bf16", "bf16")}


def test_exports_compute_as_the_training_did(small_data: str) -> None:
    job = replace(small_job(folder=small_data, audit=False), compute_dtype="bfloat16")
    exported = export_forward(job, step=0)
    assert {types[:2] for types in _PRODUCT.findall(exported.mlir_module())} == {("bf16", "bf16")}
    assert {aval.dtype for aval in exported.out_avals} == {jnp.dtype(jnp.float32)}


def test_a_sum_over_samples_of_16_bits_is_made_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""
    context = StepContext.alone(1000)
    values = jnp.ones((1000, 2), jnp.bfloat16) * 3
    assert context.mean(values).dtype == jnp.bfloat16
    np.testing.assert_array_equal(context.mean(values), [3.0, 3.0])
    np.testing.assert_array_equal(context.sum(values), [3008.0, 3008.0])


def test_products_of_pairs_take_vectors_of_bfloat16() -> None:
    """Their kernel for the processor reads float32 alone."""
    vectors = [jnp.full((4, 8), value, jnp.bfloat16) for value in (0.5, 1.0, 2.0)]
    found = jax.jit(with_products)(vectors)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[:, 8:].astype(jnp.float32), np.tile([4.0, 8.0, 16.0], (4, 1)))


@pytest.mark.parametrize("wrong", ["float16", "bf16", ""])
def test_another_type_is_refused(small_data: str, wrong: str) -> None:
    with pytest.raises(JobError, match=f"Found compute_dtype='{wrong}'. Expected 'float32', or 'bfloat16'"):
        replace(small_job(folder=small_data), compute_dtype=wrong)
