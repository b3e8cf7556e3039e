"""A run with several tasks and extra columns, judged and scored without hosts."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.serving.figures.of_samples import Accuracy
from podembed.serving.predict.evaluate import evaluate
from podembed.serving.predict.predict import predict
from podembed.workers.data.columns import Label
from podembed.workers.data.config import ParquetData
from podembed.workers.data.extra_columns import IntegerColumn, ListColumn, VectorColumn
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tasks import Task
from tests.training import fit_job

NUM_ROWS = 200


class Model:
    """Scores of two tasks from everything that a batch has."""

    def init(self, key: jax.Array, spec: Any) -> Any:
        return {"w": jax.random.normal(key, (spec.widths["item"] + 2, 4))}

    def apply(self, params: Any, batch: Any, context: Any) -> Any:
        times = batch.columns["times"].sum(axis=1) / jnp.maximum(batch.lengths["times"], 1)
        named = [batch.columns["image"].sum(axis=1) + batch.columns["id"][:, 0] / 1000.0, times / 10.0]
        out = jnp.concatenate([batch.activations["item"], jnp.stack(named, axis=1)], axis=1) @ params["w"]
        return {"scores": {"click": out[:, 0], "genre": out[:, 1:]}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    folder = tmp_path_factory.mktemp("tasks")
    random = np.random.default_rng(0)
    columns = {
        "item": random.integers(0, 50, NUM_ROWS),
        "click": random.integers(0, 2, NUM_ROWS),
        "genre": pa.array(random.integers(0, 3, NUM_ROWS), mask=random.random(NUM_ROWS) < 0.3),
        "id": np.arange(NUM_ROWS),
        "image": random.random((NUM_ROWS, 2)).tolist(),
        "times": [[row] * (row % 4) for row in range(NUM_ROWS)],
    }
    pq.write_table(pa.table(columns), folder / "part.parquet")
    path = str(folder / "part.parquet")
    return JobConfig(
        name="tasks",
        features={"item": FeatureConfig(TableConfig(50, 4, combiner="sum"))},
        model=Model(),
        data=ParquetData(
            path,
            eval_paths=path,
            labels=("click", Label("genre", missing="mask")),
            extra=(IntegerColumn("id", "int64"), VectorColumn("image", 2), ListColumn("times", 3, "int32")),
        ),
        tasks=(Task("click"), Task("genre", "multi_class", num_classes=3)),
        metrics=(Accuracy(task="genre"),),
        batch_size=64,
    )


def test_figures_and_scores_are_those_of_the_run(job: JobConfig, tmp_path: Path) -> None:
    result = fit_job(job, tmp_path)
    found = evaluate(result.path, job=job).evaluation
    assert astuple(found) == astuple(result.evaluations[-1])
    assert set(found.values) == {"click/auc", "click/log_loss", "genre/loss", "genre/accuracy", "loss"}
    # The data has no labels now.
    rows = pq.read_table(job.data.paths[0])
    pq.write_table(rows.drop_columns(["click", "genre"]), tmp_path / "new.parquet")
    predict(result.path, data=[str(tmp_path / "new.parquet")], out=str(tmp_path / "scores.parquet"), job=job)
    scores = pq.read_table(tmp_path / "scores.parquet")
    genre = np.array(scores["scores/genre"].to_pylist())
    assert genre.shape == (NUM_ROWS, 3)
    labels = rows["genre"].to_pylist()
    right = [bool(best == label) for best, label in zip(genre.argmax(axis=1), labels, strict=True) if label is not None]
    assert np.mean(right) == pytest.approx(found.metrics["genre/accuracy"])
    assert scores["scores/click"].type == pa.float32()
