"""Ids with weights in a whole run: the rows and figures of plain JAX, on one host and on two."""

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
from podembed.embedding.initializers import RowId
from podembed.embedding.optimizers import SGD
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.result import Result
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.input.index import build_index
from podembed.workers.input.sources import job_plan, open_reader
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from tests.long_tests import is_long
from tests.run_state import committed_state
from tests.training import fit_job

NUM_ROWS, DIM, RATE = 64, 8, 0.5
COMBINERS = ("sum", "mean", "sqrtn")
# Large enough that two hosts share its rows.
SIZES = {"sum": 30, "mean": 30, "sqrtn": 30, "cut": 40_000}


class Sum:
    """The score is a hundredth of everything that is looked up."""

    def init(self, key: jax.Array, spec: Any) -> dict[str, jax.Array]:
        return {"scale": jnp.float32(0.01)}

    def apply(self, params: Any, batch: Any, context: Any) -> jax.Array:
        return params["scale"] * sum(values.sum(axis=1) for values in batch.activations.values())


def weighted_job(folder: str) -> JobConfig:
    features = {}
    for name, size in SIZES.items():
        combiner = "mean" if name == "cut" else name
        table = TableConfig(size, DIM, name=name, combiner=combiner, initializer=RowId(-3), optimizer=SGD(RATE))
        features[name] = FeatureConfig(table)
    columns = {name: IdColumn("tags", weights="shares") for name in COMBINERS}
    return JobConfig(
        name="weighted",
        features=features,
        model=Sum(),
        data=ParquetData(
            f"{folder}/part.parquet",
            label="y",
            features={**columns, "cut": IdColumn("wide", weights="shares")},
            eval_paths=f"{folder}/part.parquet",
        ),
        batch_size=32,
        num_lanes=4,
        num_epochs=1,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bags of 0 to 4 ids, some twice, with weights of both signs and 0."""
    folder, random = tmp_path_factory.mktemp("weighted"), np.random.default_rng(2)
    sizes = random.integers(0, 5, NUM_ROWS).tolist()
    table = pa.table(
        {
            "y": random.integers(0, 2, NUM_ROWS).astype(np.int8),
            "tags": pa.array([random.integers(0, 30, size).tolist() for size in sizes], pa.list_(pa.int64())),
            "wide": pa.array([random.integers(0, 40_000, size).tolist() for size in sizes], pa.list_(pa.int64())),
            "shares": pa.array([(random.integers(-2, 9, size) / 4).tolist() for size in sizes], pa.list_(pa.float64())),
        }
    )
    pq.write_table(table, folder / "part.parquet", row_group_size=16)
    return folder


def trained(folder: Path, storage: Path, *, num_hosts: int, max_steps: int) -> Result:
    return fit_job(
        JobReference(function=f"{__name__}:weighted_job", arguments={"folder": str(folder)}),
        storage,
        name=f"hosts-{num_hosts}-{max_steps}",
        num_hosts=num_hosts,
        max_steps=max_steps,
        eval_every_steps=max_steps,
        checkpoint_config=CheckpointConfig(every_steps=max_steps),
    )


def mean_loss(tables: dict[str, jax.Array], rows: pa.Table) -> Any:
    """By the formulas of docs/from-tpuembedding.md."""
    lengths = np.diff(rows.column("tags").combine_chunks().offsets)
    sample, num_rows = np.repeat(np.arange(len(lengths)), lengths), len(lengths)
    flat = {name: rows.column(name).combine_chunks().flatten().to_numpy() for name in ("tags", "wide", "shares")}
    shares = flat["shares"].astype(np.float32)
    amounts = {"sum": np.ones(num_rows), "mean": np.bincount(sample, shares, num_rows)}
    amounts["sqrtn"] = np.sqrt(np.bincount(sample, shares**2, num_rows))
    scores = jnp.zeros(num_rows)
    for name, table in tables.items():
        amount = amounts["mean" if name == "cut" else name]
        shown = table[flat["wide" if name == "cut" else "tags"]] * shares[:, None]
        total = jax.ops.segment_sum(shown, sample, num_rows).sum(axis=1)
        scores += 0.01 * jnp.where(amount == 0, 0.0, total / np.where(amount == 0, 1, amount))
    return (jax.nn.softplus(scores) - rows.column("y").to_numpy() * scores).mean()


@pytest.fixture(scope="module")
def one_host(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(folder, tmp_path_factory.mktemp("runs"), num_hosts=1, max_steps=2)


def test_rows_move_as_in_plain_jax(folder: Path, tmp_path: Path) -> None:
    result = trained(folder, tmp_path, num_hosts=1, max_steps=1)
    state, job = committed_state(result.path), weighted_job(str(folder))
    index = build_index(job.resolved_data)
    first = open_reader(job.resolved_data, index, job_plan(job, index), range(job.num_lanes)).read(0)
    rows = pq.read_table(folder / "part.parquet").take(first.sample_ids)
    before = {name: np.repeat(np.arange(size, dtype=np.float32)[:, None] - 3, DIM, 1) for name, size in SIZES.items()}
    gradients = jax.grad(mean_loss)({name: jnp.asarray(table) for name, table in before.items()}, rows)
    for name in SIZES:
        expected = before[name] - RATE * np.asarray(gradients[name])
        assert (expected != before[name]).any()
        np.testing.assert_allclose(state[f"{name}/rows"], expected, rtol=1e-6, atol=1e-6, err_msg=name)


def test_an_evaluation_has_the_loss_of_plain_jax(folder: Path, one_host: Result) -> None:
    state = committed_state(one_host.path)
    scale = state["dense/params/scale"].item() / 0.01
    tables = {name: jnp.asarray(state[f"{name}/rows"]) * scale for name in SIZES}
    expected = float(mean_loss(tables, pq.read_table(folder / "part.parquet")))
    assert one_host.evaluations[-1].loss == pytest.approx(expected, rel=1e-5)


@is_long
@pytest.mark.ray
def test_two_hosts_have_the_rows_of_one(folder: Path, one_host: Result, ray_cluster: None, tmp_path: Path) -> None:
    two = trained(folder, tmp_path, num_hosts=2, max_steps=2)
    one, other = committed_state(one_host.path), committed_state(two.path)
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_allclose(other[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
