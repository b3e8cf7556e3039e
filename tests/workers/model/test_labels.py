"""Several labels on their way from the files to the model and its loss, also where some are missing."""

from __future__ import annotations

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
    RMSE,
    FeatureConfig,
    JobConfig,
    JobError,
    Label,
    ModelBatch,
    ModelSpec,
    ParquetData,
    StepContext,
    TableConfig,
    Task,
)
from tests.training import fit_job

NUM_ROWS, BATCH_SIZE = 70, 16


class TwoLines:
    """A line for each of two labels; the second counts where it is there."""

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, jax.Array]:
        assert spec.labels == ("click", "buy")
        assert set(spec.example(3).label_masks) == {"click", "buy"}
        return {"click": jnp.zeros(spec.num_dense), "buy": jnp.zeros(spec.num_dense)}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        return {"scores": batch.dense @ params["click"], "buy": batch.dense @ params["buy"]}

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        click = (outputs["scores"] - batch.labels["click"]) ** 2
        return click + jnp.where(batch.label_masks["buy"], (outputs["buy"] - batch.labels["buy"]) ** 2, 0.0)


def job_on(folder: Path, **changed: Any) -> JobConfig:
    given: dict[str, Any] = {
        "name": "labels",
        "features": {"item": FeatureConfig(TableConfig(10, 4))},
        "model": TwoLines(),
        "data": ParquetData(
            str(folder / "part.parquet"),
            labels=("click", Label("buy", missing="mask")),
            dense=("x", "y"),
            eval_paths=str(folder / "part.parquet"),
            order="files",
        ),
        "batch_size": BATCH_SIZE,
        "dense_optimizer": optax.sgd(0.1),
    }
    return JobConfig(**given | changed)


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    buy = np.where(random.random(NUM_ROWS) < 0.4, np.nan, random.random(NUM_ROWS))
    return {
        "click": random.integers(0, 2, NUM_ROWS),
        "buy": buy,
        "x": random.random(NUM_ROWS, np.float32),
        "y": random.random(NUM_ROWS, np.float32),
        "item": random.integers(0, 10, NUM_ROWS),
    }


class ByTask:
    """The same, with the job's loss of its tasks."""

    init = TwoLines.init

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        return {name: batch.dense @ params[name] for name in ("buy", "click")}


TASKS = (Task("click", "regression"), Task("buy", "regression"))
BY_TASK = {"model": ByTask(), "tasks": TASKS, "metrics": (RMSE(task="click"), RMSE(task="buy"))}


@pytest.mark.parametrize("changed", [{"metrics": (RMSE(),)}, BY_TASK], ids=["own loss", "tasks"])
def test_a_model_sees_all_labels_and_which_are_missing(
    rows: dict[str, np.ndarray], tmp_path: Path, changed: dict[str, Any]
) -> None:
    """The losses are those of numpy, also of the last step, which has padding."""
    columns = {name: pa.array(values, from_pandas=True) for name, values in rows.items()}
    pq.write_table(pa.table(columns), tmp_path / "part.parquet")
    result = fit_job(job_on(tmp_path, **changed), tmp_path)
    params = {"click": np.zeros(2), "buy": np.zeros(2)}
    expected = []
    for first in range(0, NUM_ROWS, BATCH_SIZE):
        part = slice(first, first + BATCH_SIZE)
        x = np.stack([rows["x"][part], rows["y"][part]], axis=1).astype(np.float64)
        count, loss = len(x), 0.0
        for name in params:
            labels = rows[name][part]
            errors = np.where(np.isnan(labels), 0.0, x @ params[name] - labels)
            loss += (errors**2).sum() / count
            params[name] = params[name] - 0.1 * 2 * (errors @ x) / count
        expected.append(loss)
    np.testing.assert_allclose([result.losses[step] for step in range(len(expected))], expected, rtol=1e-5)
    x = np.stack([rows["x"], rows["y"]], axis=1)
    rmse = {name: np.sqrt(np.nanmean((x @ params[name] - rows[name]) ** 2)) for name in params}
    figures = result.evaluations[-1].metrics
    if "tasks" in changed:
        assert figures == pytest.approx(
            {f"{name}/rmse": value for name, value in rmse.items()}
            | {f"{name}/loss": value**2 for name, value in rmse.items()},
            rel=1e-5,
        )
    else:
        assert figures == pytest.approx({"rmse": rmse["click"]}, rel=1e-5)


class OneLine:
    """A line for the second label alone."""

    def init(self, key: jax.Array, spec: ModelSpec) -> jax.Array:
        return jnp.zeros(spec.num_dense)

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        return batch.dense @ params


def test_a_sample_without_its_one_label_counts_for_nothing(rows: dict[str, np.ndarray], tmp_path: Path) -> None:
    """In training as in evaluation: the mean is over the samples that have the label. The loss is no number where a
    label is 0, which stands for one that is missing. Of the second batch no sample has it, and nothing moves.
    """
    weights = 1.0 + np.arange(NUM_ROWS) % 3
    buy = np.where(np.arange(NUM_ROWS) // BATCH_SIZE == 1, np.nan, rows["buy"] + 1)
    columns = {name: pa.array(values, from_pandas=True) for name, values in rows.items()}
    columns |= {"buy": pa.array(buy, from_pandas=True), "weight": pa.array(weights)}
    pq.write_table(pa.table(columns), tmp_path / "part.parquet")
    data = ParquetData(
        str(tmp_path / "part.parquet"),
        labels=(Label("buy", missing="mask"),),
        dense=("x", "y"),
        sample_weight="weight",
        eval_paths=str(tmp_path / "part.parquet"),
        order="files",
    )
    result = fit_job(
        job_on(tmp_path, model=OneLine(), data=data, loss=lambda scores, labels: (scores - jnp.log(labels)) ** 2),
        tmp_path,
    )
    params, expected, x = np.zeros(2), [], np.stack([rows["x"], rows["y"]], axis=1).astype(np.float64)
    counts = np.where(np.isnan(buy), 0.0, weights)
    wanted = np.nan_to_num(np.log(buy))
    for first in range(0, NUM_ROWS, BATCH_SIZE):
        part = slice(first, first + BATCH_SIZE)
        errors, total = x[part] @ params - wanted[part], max(counts[part].sum(), 1e-9)
        expected.append((counts[part] * errors**2).sum() / total)
        params = params - 0.1 * 2 * (counts[part] * errors) @ x[part] / total
    assert expected[1] == 0
    np.testing.assert_allclose([result.losses[step] for step in range(len(expected))], expected, rtol=1e-5)
    judged = (counts * (x @ params - wanted) ** 2).sum() / counts.sum()
    assert result.evaluations[-1].loss == pytest.approx(judged, rel=1e-5)


def test_several_labels_need_a_loss_that_sees_them(tmp_path: Path) -> None:
    class Plain:
        init, apply = TwoLines.init, TwoLines.apply

    with pytest.raises(
        JobError, match=r"labels \['click', 'buy'\] and a loss of one label. Expected tasks, or a model with a loss"
    ):
        job_on(tmp_path, model=Plain())
