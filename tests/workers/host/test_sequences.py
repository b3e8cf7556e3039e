"""Sequences on their way to the model: vectors, lengths, and the table that they share with another feature."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant, TruncatedNormal
from podembed.embedding.optimizers import Adagrad
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig
from podembed.workers.model.batch import Losses, ModelBatch
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from tests.training import fit_job
from tests.workers.host.test_host import pod

NUM_ITEMS, DIM, LENGTH, BATCH_SIZE = 50, 8, 5, 12


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


class Reading:
    """Scores from a history and its item, read in one form or another. What they are does not depend on the form."""

    def __init__(self, form: str) -> None:
        self.form = form

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, jax.Array]:
        return {"w": jnp.linspace(-1.0, 1.0, DIM), "decay": jnp.full((), 0.7)}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        item, history = batch.activations["item"], batch.sequences["history"]
        if self.form == "rows":
            # Everything by row, without any padding.
            scores = (history.values * params["w"] * history.of_samples(item)).sum(axis=1)
            weighted = scores * jnp.where(history.mask, params["decay"] ** history.positions, 0.0)
            return jnp.tanh(history.with_values(weighted).sum()) + item @ params["w"]
        vectors = history.padded() if self.form == "longest" else batch.activations["history"]
        scores = (vectors * params["w"] * item[:, None]).sum(axis=2)
        weighted = jnp.where(
            jnp.arange(scores.shape[1]) < batch.lengths["history"][:, None],
            scores * params["decay"] ** jnp.arange(scores.shape[1]),
            0.0,
        )
        return jnp.tanh(weighted.sum(axis=1)) + item @ params["w"]


def write_histories(folder: Path, *, num_rows: int, longest: int) -> list[list[int]]:
    random = np.random.default_rng(2)
    histories = [random.integers(0, NUM_ITEMS, random.integers(0, longest + 1)).tolist() for _ in range(num_rows)]
    columns = {
        "label": (np.arange(num_rows) % 3 == 0).astype(np.float32),
        "item": random.integers(0, NUM_ITEMS, num_rows),
        "history": pa.array(histories, pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=16)
    return histories


def sequence_job(folder: Path, model: Any) -> JobConfig:
    initializer = Constant(1.0) if isinstance(model, Counting) else TruncatedNormal(stddev=0.5)
    items = TableConfig(NUM_ITEMS, DIM, initializer, name="items")
    return JobConfig(
        name="sequences",
        features={"item": FeatureConfig(items), "history": FeatureConfig(items, max_sequence_length=LENGTH)},
        model=model,
        data=ParquetData(f"{folder}/*.parquet", label="label", order="files", eval_paths=f"{folder}/*.parquet"),
        optimizer=Adagrad(0.3),
        batch_size=BATCH_SIZE,
        num_lanes=4,
    )


def trained(job: JobConfig, folder: Path, reporter: SilentReporter | None = None) -> list[float]:
    """The losses of all steps, and that of the evaluation if the model has no loss of its own."""
    result = fit_job(job, folder, reporter=reporter)
    evaluated = [one.loss for one in result.evaluations if not math.isnan(one.loss)]
    return [result.losses[step] for step in sorted(result.losses)] + evaluated


def test_a_model_gets_the_lengths_of_its_sequences(tmp_path: Path) -> None:
    """Also those of the last batch, which padding fills up."""
    histories = write_histories(tmp_path, num_rows=3 * BATCH_SIZE - 5, longest=LENGTH + 3)
    losses = trained(sequence_job(tmp_path, Counting()), tmp_path)
    lengths = [min(len(history), LENGTH) for history in histories]
    assert max(lengths) == LENGTH
    expected = [np.mean(lengths[first : first + BATCH_SIZE]) for first in range(0, len(lengths), BATCH_SIZE)]
    assert losses == pytest.approx(expected)


def test_a_history_and_its_target_are_looked_up_once(tmp_path: Path) -> None:
    """The rows that all hosts ask of all owners are the distinct ids of both features on each host."""
    histories = write_histories(tmp_path, num_rows=BATCH_SIZE, longest=LENGTH + 3)
    items = pq.read_table(tmp_path / "rows.parquet")["item"].to_pylist()
    job = sequence_job(tmp_path, Counting())
    with pod(job, tmp_path / "run", 2, buckets=(4,)) as hosts:
        hosts.all("restore", [(None,)] * 2)
        asked = sum(sum(window.rows_asked) for window in hosts.train(0, 1))
    halves = [range(BATCH_SIZE // 2), range(BATCH_SIZE // 2, BATCH_SIZE)]
    assert asked == sum(
        len({items[at] for at in half} | {item for at in half for item in histories[at][:LENGTH]}) for half in halves
    )


def test_the_room_of_a_step_changes_no_number(tmp_path: Path) -> None:
    """Padded to the maximum, to the longest sample, or by row; with one program, and with several over two devices."""
    write_histories(tmp_path, num_rows=10 * BATCH_SIZE - 5, longest=LENGTH + 3)
    forms = {form: trained(sequence_job(tmp_path, Reading(form)), tmp_path / form) for form in ("full", "longest")}
    found = subprocess.run(
        [sys.executable, "-m", "tests.workers.host.sequences_process", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    over_two = json.loads(found.stdout)
    compiled = over_two["compiled"]
    assert compiled[-1]["total"] == sum(one["num_programs"] for one in compiled) > 1
    assert all(one["seconds"] > 0 for one in compiled)
    for losses in (forms["longest"], over_two["losses"]):
        np.testing.assert_allclose(losses, forms["full"], rtol=2e-6)
    assert len(forms["full"]) == 11
    assert forms["full"][-1] < forms["full"][0]
