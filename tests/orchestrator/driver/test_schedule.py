"""One schedule for the rows of the tables and for the dense parameters, at the same steps, also after a restore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podembed.embedding.optimizers import SGD
from podembed.workers.device.dense_half import DenseStateError
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.tables import learning_rates, table_specs
from tests.orchestrator.driver.test_equality import PlainJax
from tests.run_state import committed_state
from tests.small_job import small_job
from tests.training import fit_job

NUM_STEPS, CUT = 9, 4


def warm_up_and_decay(step: Any) -> Any:
    return jnp.where(step < 3, (step + 1) / 3, 0.5 ** (step - 3))


def plain_run(job: JobConfig, num_steps: int) -> tuple[list[float], PlainJax]:
    """In plain JAX: rates of the rows times the schedule, and `optax.scale_by_schedule` behind the dense optimizer."""
    index = build_index(job.resolved_data)
    plan = training_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed)
    reader = InputReader(job.resolved_data, index, plan, range(job.num_lanes))
    assert job.dense_optimizer is not None
    plain = PlainJax(
        replace(job, dense_optimizer=optax.chain(job.dense_optimizer, optax.scale_by_schedule(warm_up_and_decay)))
    )
    specs, losses = plain.specs, []
    for step in range(num_steps):
        plain.specs = tuple(
            replace(
                spec,
                optimizer=replace(
                    spec.optimizer, learning_rate=spec.optimizer.learning_rate * float(warm_up_and_decay(step))
                ),
            )
            for spec in specs
        )
        losses.append(plain.step(reader.read(step)))
    return losses, plain


def test_both_halves_follow_the_schedule_as_in_plain_jax(small_data: str, tmp_path: Path) -> None:
    """With accumulation, whose own count of steps is another one. Cut and resumed on the way, where a schedule that
    began anew would give other numbers.
    """
    dense_optimizer = optax.MultiSteps(optax.adamw(1e-2, weight_decay=0.1), 3).gradient_transformation()
    job = replace(small_job(folder=small_data, audit=False), dense_optimizer=dense_optimizer)
    losses = {}
    for stop in (CUT, NUM_STEPS):
        result = fit_job(replace(job, schedule=warm_up_and_decay), tmp_path, max_steps=stop)
        losses |= result.losses
    expected, plain = plain_run(job, NUM_STEPS)
    np.testing.assert_allclose([losses[step] for step in range(NUM_STEPS)], expected, rtol=1e-5)
    state = committed_state(str(tmp_path / "run"))
    for spec, table in zip(plain.specs, plain.tables, strict=True):
        np.testing.assert_allclose(state[f"{spec.name}/rows"], table, rtol=2e-4, atol=2e-5)
    for name, values in plain.params.items():
        np.testing.assert_allclose(state[f"dense/params/{name}"], values, rtol=2e-4, atol=2e-5)


def test_a_table_with_a_schedule_of_its_own_has_the_product(small_data: str) -> None:
    job = replace(small_job(folder=small_data, audit=False), optimizer=SGD(optax.linear_schedule(1.0, 0.0, 10)))
    features = {name: replace_optimizer(feature) for name, feature in job.features.items()}
    job = replace(job, features=features)
    specs = table_specs(job, (None,) * len(job.tables))
    assert learning_rates(specs, 5, optax.constant_schedule(0.5)) == pytest.approx([0.25] * len(specs))
    assert learning_rates(specs, 5) == pytest.approx([0.5] * len(specs))
    with pytest.raises(ValueError, match="Found -1.0 from the learning rate .* at step 5"):
        learning_rates(specs, 5, lambda step: -1.0)


def replace_optimizer(feature: Any) -> Any:
    feature.table.optimizer = None
    return feature


def test_what_is_no_schedule_is_refused(small_data: str) -> None:
    job = small_job(folder=small_data, audit=False)
    with pytest.raises(JobError, match=r"Found schedule=0.5. Expected a function of the step"):
        replace(job, schedule=0.5)
    for schedule, message in (
        (lambda step: 1.0 if step < 3 else 0.1, "asks for the value of a step while it is traced.*jnp.where"),
        (lambda step: jnp.ones(2), r"returning shape \[2\]. Expected one number"),
    ):
        with pytest.raises(DenseStateError, match=message):
            DeviceWorker(job=replace(job, schedule=schedule), num_samples=8).build()
