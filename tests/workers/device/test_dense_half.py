"""Models of the long form: over several devices as in one process of plain JAX, and what is refused before the first
step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.workers.device.dense_half import OtherPrecision
from podembed.workers.device.dense_leaves import replaced
from podembed.workers.device.model_step import DenseStateError, DeviceWorker
from podembed.workers.device.programs import Inputs
from podembed.workers.device.transfers.ways import HostArrays
from podembed.workers.model import sample_keys
from podembed.workers.model.batch import Losses, ModelBatch, WithState
from podembed.workers.model.context import Shares, StepContext
from tests.long_tests import is_long
from tests.small_job import small_job
from tests.workers.device.models import EveryPart


def test_a_step_over_devices_has_the_numbers_of_one_process_in_plain_jax(small_data: str) -> None:
    """In-batch softmax, normalization, dropout, a penalty and mutable state, with padding on some devices."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.workers.device.devices_process", small_data],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    results = json.loads(found.stdout)
    plain = results["plain"]
    assert len(results["shares"]) == 3
    for one in results["shares"]:
        np.testing.assert_allclose(one["loss"], plain["loss"], rtol=1e-6)
        for part in ("params", "state"):
            for name, values in plain[part].items():
                np.testing.assert_allclose(one[part][name], values, rtol=1e-5, atol=1e-7, err_msg=f"{part}/{name}")
        for values, expected in zip(one["gradients"], plain["gradients"], strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-7)


@is_long
def test_corrected_softmaxes_over_devices_have_the_numbers_of_one_process_in_plain_jax() -> None:
    """`batch.log_q` and `batch.log_frequency` come to the losses of the samples that they belong to."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.workers.device.corrected_losses_process"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    results = json.loads(found.stdout)
    assert len(results["shares"]) == 4
    for one in results["shares"]:
        np.testing.assert_allclose(one["loss"], results["plain"]["loss"], rtol=1e-6)
        for values, expected in zip(one["arrays"], results["plain"]["arrays"], strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)


def test_positions_follow_the_lanes_and_padding_comes_behind_them() -> None:
    shares = Shares(num_samples=4, real=(4, 2, 3))
    assert shares.batch_size == 9
    assert shares.positions.tolist() == [0, 1, 2, 3, 4, 5, 15, 16, 6, 7, 8, 20]
    assert shares.order.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10]


def test_a_random_number_of_a_sample_depends_on_its_place_in_the_batch_alone() -> None:
    """Also after `split` and `fold_in`; an array without an axis of samples is that of a usual key."""
    key = jax.random.key(3)
    whole = sample_keys.with_positions(key, jnp.arange(12))
    parts = [sample_keys.with_positions(key, jnp.arange(12)[at]) for at in (slice(0, 5), slice(5, 12))]

    def drawn(key: jax.Array, n: int) -> list[jax.Array]:
        left, right = jax.random.split(jax.random.fold_in(key, 7))
        return [
            jax.random.normal(left, (n, 3)),
            jax.random.bernoulli(right, 0.5, (n,)),
            jax.random.uniform(key, (n, 2)),
        ]

    for of_whole, *of_parts in zip(drawn(whole, 12), drawn(parts[0], 5), drawn(parts[1], 7), strict=True):
        np.testing.assert_array_equal(of_whole, np.concatenate(of_parts))
    np.testing.assert_array_equal(jax.random.normal(whole, (3, 3)), jax.random.normal(key, (3, 3)))


class Refused(EveryPart):
    """`EveryPart` with one thing changed."""

    def __init__(self, **changed: Any) -> None:
        self.changed = changed

    def init(self, key: jax.Array, spec: Any) -> Any:
        made = super().init(key, spec)
        return self.changed["init"](made) if "init" in self.changed else made

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> Any:
        made = super().apply(params, batch, context)
        return self.changed["apply"](made) if "apply" in self.changed else made

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> Any:
        if "loss" in self.changed:
            return self.changed["loss"](outputs)
        return Losses(per_sample=jnp.zeros(len(batch.weights)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"init": lambda made: {"w": jnp.arange(3)}}, r"parameter \['w'\] of type int32.*WithState\(params, state\)"),
        (
            {"init": lambda made: {"deep": {"w": "text"}}},
            r"Found the text 'text' as the parameter \['deep'\]\['w'\] that model.init returned",
        ),
        ({"init": lambda made: {"act": jax.nn.relu}}, r"as the parameter \['act'\] that model.init"),
        ({"init": lambda made: {"w": np.array("x")}}, r"an array of <U1 as the parameter \['w'\]"),
        (
            {"init": lambda made: WithState(made.value, {"rule": len})},
            r"Found builtin_function_or_method as the state \['rule'\] that model.init returned",
        ),
        (
            {"apply": lambda made: WithState(made.value, {**made.state, "mean": "x"})},
            r"the text 'x' as the state \['mean'\] that model.apply returned",
        ),
        ({"apply": lambda made: made.value["scores"]}, r"returning shape \[8\], of a model that has state.*WithState"),
        ({"apply": lambda made: made.value}, "returning dict, of a model that has state.*WithState"),
        (
            {"apply": lambda made: WithState(made.value, {"mean": made.state["mean"]})},
            r"returning the state \{'mean': 'float32\[\d+\]'\}. Expected \{'mean'.*'variance'",
        ),
        (
            {"apply": lambda made: WithState({"logits": made.value["scores"]}, made.state)},
            "returning .'logits'.*scores",
        ),
        (
            {"apply": lambda made: WithState({"scores": made.value["scores"][:, None]}, made.state)},
            r"returning shape \[8, 1\] for 8 samples",
        ),
        ({"apply": lambda made: None}, "model.apply returning None.*`return`"),
        ({"apply": lambda made: WithState(None, made.state)}, "model.apply returning None.*`return`"),
        ({"loss": lambda outputs: jnp.zeros(8, jnp.int32)}, "model.loss returning numbers of type int32.*astype"),
        ({"loss": lambda outputs: Losses(batch=jnp.zeros((), jnp.int32))}, "numbers of type int32"),
        ({"loss": lambda outputs: jnp.zeros((8, 2))}, r"model.loss returning the shape \[8, 2\] for samples"),
        ({"loss": lambda outputs: "text"}, "model.loss returning the text 'text'. Expected an array of numbers"),
        ({"loss": lambda outputs: [0.0] * 8}, "model.loss returning list. Expected an array of numbers"),
        (
            {"loss": lambda outputs: Losses(per_sample=len)},  # type: ignore[arg-type]
            "model.loss, as per_sample of Losses, returning builtin_function",
        ),
        ({"loss": lambda outputs: None}, "model.loss returning NoneType. Expected one number"),
        ({"loss": lambda outputs: (outputs["scores"], 1.0)}, "model.loss returning tuple. Expected one number"),
        ({"loss": lambda outputs: Losses(batch=jnp.zeros(8))}, r"\[\] for samples and \[8\] for the batch"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(small_data: str, changed: Any, message: str) -> None:
    job = replace(small_job(folder=small_data, audit=False), model=Refused(**changed))
    with pytest.raises(DenseStateError, match=message):
        DeviceWorker(job=job, num_samples=8).build()


class Scores:
    """A model without a loss of its own.

    Args:
      change: what becomes of float32 scores `[n]`.
    """

    def __init__(self, change: Any) -> None:
        self.change = change

    def init(self, key: jax.Array, spec: Any) -> Any:
        return {"w": jnp.ones(spec.num_dense)}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> Any:
        return self.change(batch.dense @ params["w"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scores: None, "model.apply returning None.*may lack a `return`"),
        (lambda scores: scores.astype(jnp.int32), r"returning numbers of type int32.*\.astype\(jnp.float32\)"),
        (lambda scores: "text", "returning the text 'text' for 8 samples"),
        (lambda scores: {"scores": jnp.tanh}, "model.apply returning .* for 8 samples"),
        (lambda scores: scores > 0, "returning numbers of type bool"),
        (lambda scores: scores[:, None], r"shape \[8, 1\].*Drop the last axis with \[:, 0\]\.\n"),
        (lambda scores: scores.mean(), r"shape \[\].*Leave out the mean"),
        (lambda scores: scores[:4], r"shape \[4\].*Return one number a sample\."),
    ],
)
def test_scores_that_are_none_are_refused_with_the_remedy_that_fits(small_data: str, change: Any, message: str) -> None:
    job = replace(small_job(folder=small_data, audit=False), model=Scores(change))
    with pytest.raises(DenseStateError, match=message):
        DeviceWorker(job=job, num_samples=8).build()


class Weighted:
    """A model of one parameter, with what it returns given by the test."""

    def __init__(self, *, dtype: Any = jnp.float32, batch_loss: Any = 0.0, state: Any = None) -> None:
        self.dtype, self.batch_loss, self.state = dtype, batch_loss, state

    def init(self, key: jax.Array, spec: Any = None) -> WithState:
        return WithState({"w": jnp.ones((), self.dtype)}, {"kept": [jnp.zeros(())]})

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        return WithState(batch.dense[:, 0] * params["w"], self.state or context.state)

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> Losses:
        return Losses(per_sample=0 * outputs, batch=self.batch_loss)


class ShortWithLoss:
    """The short form, with a loss that knows the step."""

    def init(self, key: jax.Array, num_dense: int, widths: Any) -> dict[str, jax.Array]:
        return {"w": jnp.ones(())}

    def apply(self, params: Any, dense: jax.Array, activations: Any) -> jax.Array:
        return dense[:, 0] * params["w"]

    def loss(self, outputs: jax.Array, batch: ModelBatch, context: StepContext) -> jax.Array:
        return 0 * outputs + 3.0 * (context.step >= 0)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (ShortWithLoss(), 3.0),
        # A plain number is part of the loss like an array.
        (Weighted(batch_loss=1.5), 1.5),
        (Weighted(batch_loss=np.float64(2.5)), 2.5),
        # Gradients come back in the type of the parameters.
        (Weighted(dtype=jnp.bfloat16), 0.0),
        # The state has the form that `init` gave it.
        (Weighted(state={"kept": (1.0,)}), 0.0),
    ],
)
def test_models_keep_their_types_and_forms_from_step_to_step(small_data: str, model: Any, loss: float) -> None:
    job = replace(small_job(folder=small_data, audit=False), model=model)
    worker = DeviceWorker(job=job, num_samples=8)
    worker.build()
    before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), worker.dense_arrays())
    blocks = [np.zeros((8, *shape), np.float32) for shape in job.activation_shapes.values()]
    column: Any = np.ones(8, np.float32)
    rows: Any = [np.ones((8, job.data.num_dense), np.float32), tuple(blocks)]
    inputs = Inputs(dense=rows[0], activations=rows[1], labels=column, weights=column)
    share = HostArrays(inputs, tuple(np.zeros_like(block) for block in blocks), np.zeros(8, np.float32))
    for step in range(2):
        begun = worker.begin_training(share, weight_sum=8.0, step=step)
        begun.finish()
        assert begun.is_training
        assert float(begun.last) == pytest.approx(loss)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), worker.dense_arrays()) == before


@pytest.mark.parametrize("method", ["all_gather", "sum", "mean"])
def test_a_context_takes_only_rows_of_samples(method: str) -> None:
    """With another number of rows, `all_gather` would give rows that are not there."""
    context = StepContext.alone(8)
    for wrong in (jnp.ones(3), jnp.ones(())):
        with pytest.raises(ValueError, match=r"Expected \[8, ...\], one row"):
            getattr(context, method)(wrong)


def test_arrays_of_another_precision_name_the_setting_and_blame_no_job() -> None:
    def restore(found: Any, expected: Any) -> None:
        replaced({"params": jax.ShapeDtypeStruct((3,), expected)}, {"params": np.zeros(3, found)}, parts=("params",))

    with pytest.raises(OtherPrecision, match="as float64.* in the commit. Expected float32.*Set JAX_ENABLE_X64=1 here"):
        restore(np.float64, np.float32)
    with pytest.raises(DenseStateError, match=r"as float16\[3\]. Expected float32\[3\], as in the job"):
        restore(np.float16, np.float32)
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(OtherPrecision, match="as int32.* in the commit. Expected int64.*Unset it here"):
            restore(np.int32, np.int64)
        with pytest.raises(DenseStateError, match=r"as float64\[3\]. Expected float32\[3\], as in the job"):
            restore(np.float64, np.float32)
    finally:
        jax.config.update("jax_enable_x64", False)
