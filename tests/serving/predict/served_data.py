"""Data with every kind of column, and jobs of both forms on it: for what reads raw columns in two places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.jobs.models.dlrm import DLRM
from podembed.workers.data.columns import DenseColumn, IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.data.extra_columns import IntegerColumn, ListColumn, VectorColumn
from podembed.workers.job.job import JobConfig
from podembed.workers.model.batch import ModelBatch
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.flax_models import FlaxModel

NUM_ROWS = 300
BATCH_SIZE = 64
WORDS = ["", "é", "tool", "a word of nineteen", None, *(f"w{at}" for at in range(20))]


def write_data(folder: Path) -> None:
    """Two files of uneven row groups, and a vocabulary of some of the words."""
    random = np.random.default_rng(3)

    def maybe(values: list[Any], share: float = 0.1) -> list[Any]:
        return [None if random.random() < share else value for value in values]

    def bags(values: list[Any], most: int) -> list[Any]:
        sizes = random.integers(0, most + 1, NUM_ROWS)
        return maybe([[values[at] for at in random.integers(0, len(values), size)] for size in sizes])

    brands = bags(WORDS, 4)
    table = pa.table(
        {
            "click": (random.random(NUM_ROWS) < 0.4).astype(np.int8),
            "price": pa.array(maybe(random.normal(size=NUM_ROWS).tolist())),
            "visits": random.integers(-2, 100, NUM_ROWS),
            "seen": pa.array(random.integers(-(10**12), 10**15, NUM_ROWS), pa.timestamp("us")),
            "user": pa.array([WORDS[at] for at in random.integers(0, len(WORDS), NUM_ROWS)]),
            "word": pa.array([WORDS[at] for at in random.integers(0, len(WORDS), NUM_ROWS)]),
            "item": random.integers(0, 40, NUM_ROWS),
            "wild": random.integers(-(10**17), 10**17, NUM_ROWS),
            "history": pa.array(bags(list(range(40)), 9), pa.list_(pa.int64())),
            "tags": pa.array(bags(WORDS, 4), pa.list_(pa.string())),
            "brands": pa.array(brands, pa.list_(pa.string())),
            "shares": pa.array([one and random.normal(size=len(one)).tolist() for one in brands]),
        }
    )
    more = {
        "rank": pa.array(maybe(random.integers(-50, 50, NUM_ROWS).tolist()), pa.int16()),
        "serial": pa.array(maybe(random.integers(-(1 << 62), 1 << 62, NUM_ROWS).tolist())),
        "opened": pa.array(maybe(random.integers(0, 10**9, NUM_ROWS).tolist()), pa.timestamp("s")),
        "image": pa.array(maybe([[*random.normal(size=2).tolist(), None] for _ in range(NUM_ROWS)])),
        "marks": pa.array(maybe([random.normal(size=at % 6).tolist() for at in range(NUM_ROWS)])),
        "serials": pa.array(bags([None, 1 << 60, -3, 7], 5), pa.list_(pa.int64())),
        "times": pa.array(bags([None, 10**9, 3 * 10**6], 6), pa.list_(pa.timestamp("s"))),
    }
    for name, column in more.items():
        table = table.append_column(name, column)
    pq.write_table(table.slice(0, 170), folder / "part-0.parquet", row_group_size=70)
    pq.write_table(table.slice(170), folder / "part-1.parquet", row_group_size=90)
    (folder / "words.txt").write_text("tool\né\nw3\nw7\n", encoding="utf-8")


def data_of(folder: str) -> ParquetData:
    return ParquetData(
        f"{folder}/part-*.parquet",
        label="click",
        dense=(
            "price",
            VectorColumn("image", 3),
            DenseColumn("visits", "log1p"),
            DenseColumn("seen", unit="d", since="2001-01-01"),
        ),
    )


def pooled_job(folder: str) -> JobConfig:
    """DLRM in the short form: every mode of ids, every combiner, rounded rows, ids outside their table."""
    items = TableConfig(40, 8, combiner="sqrtn", name="items")
    columns = {
        "user": IdColumn("user", mode="hash", salt=5),
        "word": IdColumn("word", vocabulary=f"{folder}/words.txt", num_reserved=2),
        "hour": IdColumn("seen", mode="hash", unit="h", since="monday"),
        "history": IdColumn("history", missing="zero", last=2),
        "tags": IdColumn("tags", mode="hash", missing="empty", last=1),
        "age": IdColumn("price", boundaries=(-1.0, 0.0, 0.5), missing="zero"),
        "crossed": IdColumn("user", salt=2, crossed_with=("tags", IdColumn("seen", unit="h", since="midnight"))),
        "part_of_day": IdColumn("seen", "hash", boundaries=(6, 12, 18), unit="h", since="midnight"),
        "brands": IdColumn("brands", "hash", weights="shares"),
        "root": IdColumn("brands", "hash", weights="shares", missing="empty", last=2),
        "clipped": IdColumn("wild"),
        "hashed": IdColumn("wild"),
    }
    features = {
        "user": FeatureConfig(TableConfig(64, 8, name="users")),
        "word": FeatureConfig(TableConfig(6, 8, name="words")),
        "hour": FeatureConfig(TableConfig(170, 8, name="hours")),
        "item": FeatureConfig(items),
        "history": FeatureConfig(items, combiner="mean"),
        "tags": FeatureConfig(
            TableConfig(50, 8, combiner="sum", name="tags", quantization_config=QuantizationConfig(8, -1.0, 1.0))
        ),
        "age": FeatureConfig(TableConfig(5, 8, name="ages")),
        "crossed": FeatureConfig(TableConfig(90, 8, name="crossed")),
        "part_of_day": FeatureConfig(TableConfig(9, 8, name="part_of_day")),
        "brands": FeatureConfig(TableConfig(40, 8, combiner="mean", name="brands")),
        "root": FeatureConfig(TableConfig(40, 8, combiner="sqrtn", name="root")),
        "clipped": FeatureConfig(TableConfig(9, 8, name="clipped", invalid_ids="clip")),
        "hashed": FeatureConfig(TableConfig(9, 8, name="hashed", invalid_ids="hash")),
    }
    data = data_of(folder)
    return JobConfig(
        name="pooled",
        features=features,
        model=DLRM(bottom=(16,), top=(16,)),
        data=ParquetData(data.paths, label="click", dense=data.dense, features=columns, eval_paths=data.paths),
        batch_size=BATCH_SIZE,
    )


class Attention(nn.Module):
    """With statistics, dropout, lengths, and outputs beside the scores."""

    @nn.compact
    def __call__(self, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        history, item = batch.activations["history"], batch.activations["item"]
        is_there = jnp.arange(history.shape[1]) < batch.lengths["history"][:, None]
        weights = jax.nn.softmax(jnp.where(is_there, jnp.einsum("nld,nd->nl", history, item), -1e9), axis=1)
        user = jnp.einsum("nl,nld->nd", weights, history) + batch.sequences["history"].sum()
        x = jnp.concatenate([batch.dense / 100, user, item], axis=1)
        x = nn.BatchNorm(use_running_average=not context.training, axis_name=context.axis)(nn.Dense(16)(x))
        x = nn.Dropout(0.3, deterministic=not context.training)(nn.relu(x))
        return {"scores": nn.Dense(1)(x)[:, 0], "user": user, "table": jnp.ones((3, 2))}


def sequence_job(folder: str) -> JobConfig:
    """A flax model with state, of a sequence and the item beside it, which share a table that drops ids."""
    items = TableConfig(36, 4, name="items", invalid_ids="drop")
    data = data_of(folder)
    return JobConfig(
        name="sequences",
        features={"item": FeatureConfig(items), "history": FeatureConfig(items, max_sequence_length=5)},
        model=FlaxModel(Attention()),
        data=ParquetData(data.paths, label="click", dense=data.dense),
        batch_size=BATCH_SIZE,
    )


EXTRA = (
    "price",
    DenseColumn("visits", "log1p"),
    DenseColumn("seen", unit="h", since="midnight"),
    IntegerColumn("rank", missing=-7),
    IntegerColumn("serial", "int64", missing=1 << 50),
    IntegerColumn("opened", missing=-1, unit="s", since="2001-01-01"),
    VectorColumn("image", 3),
    ListColumn("marks", 4),
    ListColumn("serials", 3, "int64"),
    ListColumn("times", 2, "int32", unit="m", since="1999-06-01", keep="last"),
    IntegerColumn("click"),
)


class ReadsColumns:
    """Scores and outputs that are nothing but extra columns. One more is read by the loss alone."""

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, jax.Array]:
        return {"w": jnp.ones(3)}

    def apply(self, params: dict[str, jax.Array], batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        columns = {name: batch.columns[name] for name in batch.columns if name != "click"}
        words = {name: jax.lax.bitcast_convert_type(one, jnp.uint32) for name, one in columns.items()}
        halves = {name: jnp.stack([one & 0xFFFF, one >> 16], axis=-1) for name, one in words.items()}
        halves = {name: one.astype(jnp.float32) for name, one in halves.items()}
        counts = {f"{name}/length": batch.lengths[name] for name in ("marks", "serials", "times")}
        return {"scores": batch.columns["image"] @ params["w"] + batch.columns["price"]} | halves | counts

    def loss(self, outputs: dict[str, jax.Array], batch: ModelBatch, context: StepContext) -> jax.Array:
        return (outputs["scores"] - batch.columns["click"]) ** 2


def columns_job(folder: str) -> JobConfig:
    """A model that hands on every kind of extra column, bit by bit."""
    data = data_of(folder)
    return JobConfig(
        name="columns",
        features={"item": FeatureConfig(TableConfig(40, 4, combiner="sum", name="items"))},
        model=ReadsColumns(),
        data=ParquetData(data.paths, label="item", extra=EXTRA),
        batch_size=BATCH_SIZE,
    )
