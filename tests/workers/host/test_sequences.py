"""Sequences on their way to the model: vectors, lengths, and the table that they share with another feature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.trainer import Trainer
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig
from podembed.workers.model.batch import Losses, ModelBatch
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from tests.workers.host.test_host import pod

NUM_ITEMS, DIM, LENGTH, BATCH_SIZE = 50, 4, 5, 12


class Counting:
    """A loss that is the mean length, if every position below it has a vector of ones and every other one zeros."""

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, jax.Array]:
        assert spec.sequences == {"history": LENGTH}
        return {"unused": jnp.zeros(())}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        return 0.0 * batch.activations["item"].sum(axis=1)

    def loss(self, outputs: jax.Array, batch: ModelBatch, context: StepContext) -> Losses:
        lengths, vectors = batch.lengths["history"], batch.activations["history"]
        mask = jnp.arange(vectors.shape[1]) < lengths[:, None]
        as_expected = (vectors == mask[:, :, None]).all(axis=(1, 2))
        return Losses(per_sample=jnp.where(as_expected, lengths, jnp.nan) + outputs)


def write_histories(folder: Path, *, num_rows: int, longest: int) -> list[list[int]]:
    random = np.random.default_rng(2)
    histories = [random.integers(0, NUM_ITEMS, random.integers(0, longest + 1)).tolist() for _ in range(num_rows)]
    columns = {
        "label": np.zeros(num_rows, np.float32),
        "item": random.integers(0, NUM_ITEMS, num_rows),
        "history": pa.array(histories, pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=16)
    return histories


def sequence_job(folder: Path) -> JobConfig:
    items = TableConfig(NUM_ITEMS, DIM, Constant(1.0), name="items")
    return JobConfig(
        name="sequences",
        features={"item": FeatureConfig(items), "history": FeatureConfig(items, max_sequence_length=LENGTH)},
        model=Counting(),
        data=ParquetData(f"{folder}/*.parquet", label="label", order="files"),
        batch_size=BATCH_SIZE,
        num_lanes=4,
    )


def test_a_model_gets_the_lengths_of_its_sequences(tmp_path: Path) -> None:
    """Also those of the last batch, which padding fills up."""
    histories = write_histories(tmp_path, num_rows=3 * BATCH_SIZE - 5, longest=LENGTH + 3)
    result = Trainer(
        sequence_job(tmp_path),
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(storage_path=str(tmp_path / "runs"), name="run"),
        reporter=SilentReporter(),
    ).fit()
    lengths = [min(len(history), LENGTH) for history in histories]
    assert max(lengths) == LENGTH
    expected = [np.mean(lengths[first : first + BATCH_SIZE]) for first in range(0, len(lengths), BATCH_SIZE)]
    assert [result.losses[step] for step in sorted(result.losses)] == pytest.approx(expected)


def test_a_history_and_its_target_are_looked_up_once(tmp_path: Path) -> None:
    """The rows that all hosts ask of all owners are the distinct ids of both features on each host."""
    histories = write_histories(tmp_path, num_rows=BATCH_SIZE, longest=LENGTH + 3)
    items = pq.read_table(tmp_path / "rows.parquet")["item"].to_pylist()
    job = sequence_job(tmp_path)
    with pod(job, tmp_path / "run", 2, buckets=(4,)) as hosts:
        hosts.all("restore", [(None,)] * 2)
        asked = sum(sum(window.rows_asked) for window in hosts.train(0, 1))
    halves = [range(BATCH_SIZE // 2), range(BATCH_SIZE // 2, BATCH_SIZE)]
    assert asked == sum(
        len({items[at] for at in half} | {item for at in half for item in histories[at][:LENGTH]}) for half in halves
    )
