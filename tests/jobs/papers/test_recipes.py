"""Recipes of `docs/models.md` and `docs/optimizers.md` that a job says in another way than a paper, beside plain JAX: a
softmax over all items with tied vectors, gradients summed over several small batches, a moving average of dense
parameters, a validation and a test set, L2 on looked-up vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed import (
    CheckpointConfig,
    FeatureConfig,
    IntegerColumn,
    JobConfig,
    ParquetData,
    TableConfig,
    WithState,
    evaluate,
)
from podembed.embedding import Adagrad, Constant
from tests.long_tests import is_long
from tests.training import fit_job

ITEMS, USERS, WIDTH = 7, 5, 3
STEPS, RATE, USER_RATE, ACCUMULATOR, KEPT, PENALTY = 6, 2.0, 0.5, 0.1, 0.6, 0.05
SIZES = {"train": 32, "validation": 16, "test": 24}
SMALL_BATCHES = 4


def first_items() -> jax.Array:
    return jnp.sin(jnp.arange(ITEMS * WIDTH, dtype=jnp.float32)).reshape(ITEMS, WIDTH)


class Tied:
    """The softmax over all items, whose vectors are those of the input as well. Evaluations read averaged ones."""

    def init(self, key: jax.Array, spec: Any) -> WithState:
        return WithState({"items": first_items()}, {"items": first_items()})

    def apply(self, params: Any, batch: Any, context: Any) -> WithState:
        kept = KEPT * context.state["items"] + (1 - KEPT) * params["items"]
        items = params["items"] if context.training else context.state["items"]
        user = batch.activations["user"]
        scores = jax.nn.log_softmax((user + items[batch.columns["seen"]]) @ items.T)
        chosen = jnp.take_along_axis(scores, batch.columns["next"][:, None], axis=1)[:, 0]
        return WithState({"scores": chosen, "penalty": PENALTY / 2 * jnp.square(user).sum(axis=1)}, {"items": kept})

    def loss(self, outputs: Any, batch: Any, context: Any) -> jax.Array:
        return outputs["penalty"] - outputs["scores"]


@dataclass(frozen=True)
class Surprise:
    """What the softmax alone loses, mean over the samples."""

    name: str = "surprise_loss"
    group_by: None = None

    def of(self, scores: Any) -> float:
        return float(-np.mean(scores.logits))


def plain_losses(
    items: jax.Array, users: jax.Array, data: dict[str, np.ndarray], penalty: float = PENALTY
) -> jax.Array:
    """One a sample."""
    user = users[data["user"]]
    scores = (user + items[data["seen"]]) @ items.T
    chosen = jax.nn.log_softmax(scores)[np.arange(len(scores)), data["next"]]
    return penalty / 2 * jnp.square(user).sum(axis=1) - chosen


@pytest.fixture(scope="module")
def columns() -> dict[str, dict[str, np.ndarray]]:
    random = np.random.default_rng(4)
    sizes = {"user": USERS, "seen": ITEMS, "next": ITEMS, "label": 2}
    return {
        name: {column: random.integers(0, size, count) for column, size in sizes.items()}
        for name, count in SIZES.items()
    }


@is_long
def test_a_job_of_these_recipes_has_the_losses_of_plain_jax(
    columns: dict[str, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    for name, one in columns.items():
        pq.write_table(pa.table(one), tmp_path / f"{name}.parquet")
    users = TableConfig(
        USERS, WIDTH, name="users", initializer=Constant(0.2), optimizer=Adagrad(USER_RATE, ACCUMULATOR), combiner="sum"
    )
    job = JobConfig(
        name="recipes",
        features={"user": FeatureConfig(users)},
        model=Tied(),
        data=ParquetData(
            f"{tmp_path}/train.parquet",
            eval_paths=f"{tmp_path}/validation.parquet",
            extra=(IntegerColumn("seen"), IntegerColumn("next")),
        ),
        # Of all small batches, so that rows take one step with the sum of their gradients.
        batch_size=SIZES["train"],
        num_epochs=STEPS,
        dense_optimizer=optax.sgd(RATE),
        metrics=(Surprise(),),
    )
    result = fit_job(
        job,
        tmp_path,
        eval_every_steps=1,
        checkpoint_config=CheckpointConfig(every_steps=1, keep_best=1, metric="surprise_loss", num_to_keep=2),
    )
    # A small batch is a quarter of a large one.
    step_of = jax.jit(jax.value_and_grad(lambda *given: plain_losses(*given).mean() / SMALL_BATCHES, argnums=(0, 1)))
    judge = jax.jit(lambda items, rows, data: plain_losses(items, rows, data, 0.0).mean())
    items, rows = first_items(), jnp.full((USERS, WIDTH), 0.2)
    averaged, accumulators = items, jnp.full((USERS, WIDTH), ACCUMULATOR)
    validation, test = [], []
    for step in range(STEPS):
        sums = [jnp.zeros_like(items), jnp.zeros_like(rows)]
        loss = 0.0
        for part in range(SMALL_BATCHES):
            small = {name: values[part::SMALL_BATCHES] for name, values in columns["train"].items()}
            of_part, gradients = step_of(items, rows, small)
            sums = [one + more for one, more in zip(sums, gradients, strict=True)]
            loss += float(of_part)
        np.testing.assert_allclose(result.losses[step], loss, rtol=2e-5)
        averaged = KEPT * averaged + (1 - KEPT) * items
        items = items - RATE * sums[0]
        accumulators = accumulators + sums[1] ** 2
        rows = rows - USER_RATE * sums[1] / jnp.sqrt(accumulators)
        validation.append(float(judge(averaged, rows, columns["validation"])))
        test.append(float(judge(averaged, rows, columns["test"])))
    on_the_way = {one.step: one.metrics["surprise_loss"] for one in result.evaluations}
    np.testing.assert_allclose([on_the_way[step + 1] for step in range(STEPS)], validation, rtol=2e-5)
    # Training goes on past the best of the validation set, so its commit is not the newest one.
    best = int(np.argmin(validation[:-1])) + 1
    assert best <= STEPS - 2
    judged = evaluate(f"{tmp_path}/run", commit=str(best), data=f"{tmp_path}/test.parquet", job=job)
    np.testing.assert_allclose(judged.evaluation.metrics["surprise_loss"], test[best - 1], rtol=2e-5)
