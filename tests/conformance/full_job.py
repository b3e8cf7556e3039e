"""Jobs that use all that a model is given: several labels of which some are missing, sequences, extra columns, batch
losses, state, dropout, tasks, a table that is not trained, and a schedule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad
from podembed.serving.figures.of_groups import GroupedAUC
from podembed.serving.figures.of_samples import RMSE
from podembed.workers.data.columns import Label
from podembed.workers.data.config import ParquetData
from podembed.workers.data.extra_columns import IntegerColumn, ListColumn, VectorColumn
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tasks import Task
from podembed.workers.model.batch import Losses, ModelBatch, WithState
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.losses import in_batch_softmax

NUM_ROWS, BATCH_SIZE, NUM_LANES = 230, 24, 12
# Table `users` is large enough to be cut over two hosts.
NUM_USERS, NUM_ITEMS, DIM, LENGTH, HIDDEN = 100_000, 40, 8, 5, 16


def write_full_data(folder: Path) -> None:
    """Two files of uneven row groups."""
    random = np.random.default_rng(4)

    def lists(most: int, top: int) -> list[list[int]]:
        return [random.integers(0, top, random.integers(0, most + 1)).tolist() for _ in range(NUM_ROWS)]

    table = pa.table(
        {
            "click": random.integers(0, 2, NUM_ROWS),
            "buy": pa.array(random.integers(0, 2, NUM_ROWS), mask=random.random(NUM_ROWS) < 0.4),
            "stars": pa.array(random.integers(0, 4, NUM_ROWS), mask=random.random(NUM_ROWS) < 0.5),
            "price": random.normal(size=NUM_ROWS),
            "x": random.normal(size=NUM_ROWS),
            "user": random.integers(0, NUM_USERS, NUM_ROWS),
            "group": random.integers(0, 9, NUM_ROWS),
            "item": random.integers(0, NUM_ITEMS, NUM_ROWS),
            "history": pa.array(lists(LENGTH + 2, NUM_ITEMS), pa.list_(pa.int64())),
            "image": random.normal(size=(NUM_ROWS, 3)).tolist(),
            "times": pa.array(lists(6, 100), pa.list_(pa.int32())),
            "item_id": random.integers(0, NUM_ITEMS, NUM_ROWS),
        }
    )
    pq.write_table(table.slice(0, 150), folder / "part-0.parquet", row_group_size=31)
    pq.write_table(table.slice(150), folder / "part-1.parquet", row_group_size=17)


class Inputs:
    """Parameters and inputs of both models; vectors of the batch less their means, thinned by dropout."""

    num_scores = 1

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        width = spec.num_dense + 4 * DIM + 3 + 1
        first, second = jax.random.split(key)
        params = {
            "hidden": jax.random.normal(first, (width, HIDDEN)) / np.sqrt(width),
            "out": jax.random.normal(second, (HIDDEN, self.num_scores)) / 4,
        }
        return WithState(params, {"mean": jnp.zeros(width)})

    def hidden(self, params: Any, batch: ModelBatch, context: StepContext) -> tuple[jax.Array, Any]:
        history = batch.sequences["history"]
        masked = history.with_values(jnp.where(history.mask[:, None], jnp.tanh(history.values), 0.0)).sum()
        inner = jnp.arange(batch.columns["times"].shape[1]) < batch.lengths["times"][:, None]
        late = jnp.sum(jnp.where(inner, batch.columns["times"], 0), axis=1, dtype=jnp.float32)[:, None] / 100
        pooled = [batch.activations[name] for name in ("user", "group", "item")]
        values = jnp.concatenate([batch.dense, *pooled, masked, batch.columns["image"], late], axis=1)
        kept = context.state["mean"]
        mean = context.mean(values) if context.training else kept
        hidden = jnp.tanh((values - mean) @ params["hidden"])
        if context.training:
            hidden = jnp.where(jax.random.bernoulli(context.key, 0.8, hidden.shape), hidden / 0.8, 0.0)
        return hidden, {"mean": 0.9 * kept + 0.1 * mean}


class Towers(Inputs):
    """Two labels, a softmax over the items of the batch, and a penalty."""

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        hidden, state = self.hidden(params, batch, context)
        scores = (hidden @ params["out"])[:, 0]
        return WithState({"scores": scores, "user": hidden[:, :DIM], "item": batch.activations["item"]}, state)

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> Losses:
        ids = batch.columns["item_id"]
        softmax = in_batch_softmax(outputs["user"], outputs["item"], context, batch, ids=ids)
        found = 0.1 * softmax
        for name in ("click", "buy"):
            label = batch.labels[name]
            cross_entropy = jnp.logaddexp(0.0, outputs["scores"]) - label * outputs["scores"]
            found += jnp.where(batch.label_masks[name], cross_entropy, 0.0)
        return Losses(per_sample=found, batch=0.01 * jnp.sum(context.params["out"] ** 2))


class ByTask(Inputs):
    """A line for each score of the tasks."""

    num_scores = 6

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        hidden, state = self.hidden(params, batch, context)
        click, buy, price, stars = jnp.split(hidden @ params["out"], [1, 2, 3], axis=1)
        return WithState({"click": click[:, 0], "buy": buy[:, 0], "price": price[:, 0], "stars": stars}, state)


_TASKS = (
    Task("click"),
    Task("buy", weight=0.5),
    Task("price", "regression"),
    Task("stars", "ordinal", num_classes=4),
)


def full_job(*, folder: str, kind: str, compute_dtype: str = "float32") -> JobConfig:
    """Of one of the two models: `towers`, or `tasks`."""
    items = TableConfig(NUM_ITEMS, DIM, name="items", combiner="sum", optimizer=Adagrad(0.1))
    given = np.random.default_rng(1).normal(size=(9, DIM))
    groups = TableConfig(9, DIM, name="groups", combiner="sum", initial_rows=given, trainable=False)
    labels: tuple[str | Label, ...] = ("click", Label("buy", missing="mask"))
    if kind == "tasks":
        labels = (*labels, "price", Label("stars", missing="mask"))
    return JobConfig(
        name="full",
        features={
            "user": FeatureConfig(TableConfig(NUM_USERS, DIM, name="users", combiner="sum")),
            "group": FeatureConfig(groups),
            "item": FeatureConfig(items),
            "history": FeatureConfig(items, max_sequence_length=LENGTH),
        },
        model=ByTask() if kind == "tasks" else Towers(),
        data=ParquetData(
            f"{folder}/part-*.parquet",
            eval_paths=f"{folder}/part-1.parquet",
            labels=labels,
            dense=("x",),
            extra=(VectorColumn("image", 3), ListColumn("times", 6, "int32"), IntegerColumn("item_id")),
        ),
        batch_size=BATCH_SIZE,
        num_lanes=NUM_LANES,
        num_epochs=2,
        dense_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        schedule=optax.linear_schedule(1.0, 0.1, 20),
        tasks=_TASKS if kind == "tasks" else (),
        metrics=(RMSE(task="price"),) if kind == "tasks" else (RMSE(), GroupedAUC(group_by="group")),
        compute_dtype=compute_dtype,
    )
