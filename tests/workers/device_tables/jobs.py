"""A job whose tables live on hosts or on devices, as its arguments say, and what its runs leave behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jax.sharding import PartitionSpec as P

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Lion,
    Momentum,
    RowWiseAdagrad,
    SlotSpec,
)
from podembed.jobs.fitting import fit
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig, WarmStart
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from tests.run_state import committed_state

NUM_ROWS, BATCH_SIZE, DIM = 400, 40, 8
SIZES = {"few": 12, "many": 5_000, "cut": 40_000}
"""Rows of each table: fewer than ids of a batch, more, and so many that hosts cut it into buckets."""
WIDTHS = {"few": 64}
"""Of tables that devices have row after row, whatever their compiler likes. The model adds up parts of DIM."""
PLAIN = {"few": SGD(0.5), "many": Adagrad(0.3, 0.1), "cut": Adagrad(0.3, 0.1)}


class Perceptron:
    """One hidden layer over the sums of all features' vectors and the dense columns. A mesh may cut it."""

    shardings = {"hidden": P(None, "model"), "out": P("model")}  # noqa: RUF012

    def init(self, key: jax.Array, spec: Any) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {"hidden": 0.3 * jax.random.normal(first, (DIM + 1, 16)), "out": jax.random.normal(second, (16,))}

    def apply(self, params: Any, batch: Any, context: Any) -> jax.Array:
        total = sum(values.reshape(values.shape[0], -1, DIM).sum(axis=1) for values in batch.activations.values())
        hidden = jnp.tanh(jnp.concatenate([batch.dense, total], axis=1) @ params["hidden"])
        return hidden @ params["out"]


def write_rows(folder: Path) -> None:
    """Single ids, bags of 0 to 5 ids that may name one twice, and weights of both signs and 0."""
    random = np.random.default_rng(7)
    lengths = random.integers(0, 6, NUM_ROWS).tolist()
    bags = {name: [random.integers(0, size, n).tolist() for n in lengths] for name, size in SIZES.items()}
    columns = {
        "label": random.integers(0, 2, NUM_ROWS).astype(np.float32),
        "x": random.standard_normal(NUM_ROWS, np.float32),
        "shares": pa.array([(random.integers(-2, 9, n) / 4).tolist() for n in lengths], pa.list_(pa.float64())),
        **{f"{name}_bag": pa.array(rows, pa.list_(pa.int64())) for name, rows in bags.items()},
        **{f"{name}_id": random.integers(0, size, NUM_ROWS) for name, size in SIZES.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=16)


def own_rule(gradient: Any, row: Any, slots: Any, learning_rate: Any, hyperparameters: Any) -> Any:
    """Of a user: two kinds of slots, numpy's functions, and numbers of the whole row."""
    norm, velocity = slots
    norm = norm + np.sqrt(np.sum(gradient * gradient))
    velocity = hyperparameters.momentum * velocity + gradient / norm
    return row - learning_rate * np.maximum(velocity, -2.0), (norm, velocity)


OWN = CustomRowOptimizer(
    own_rule,
    slots=(SlotSpec(name="norm", width="row", initial_value=0.1), SlotSpec(name="velocity", width="element")),
    hyperparameters={"momentum": 0.9},
    learning_rate=0.1,
    clip_weight_max=0.4,
)


def placed_job(
    folder: str, on_devices: Sequence[str] = (), sharded: Sequence[str] = (), auto: Sequence[str] = ()
) -> JobConfig:
    """Two features look up in each table: one of single ids, and one of bags.

    Args:
      on_devices: tables that live there whole.
      sharded: tables of which each device has a part.
      auto: tables that lie where there is room.
    """
    places = {
        **dict.fromkeys(on_devices, "replicated"),
        **dict.fromkeys(sharded, "sharded"),
        **dict.fromkeys(auto, "auto"),
    }
    features, columns = {}, {}
    for name, size in SIZES.items():
        table = TableConfig(
            size,
            WIDTHS.get(name, DIM),
            name=name,
            combiner="sum",
            optimizer=PLAIN[name],
            place=places.get(name, "host"),  # pyright: ignore[reportArgumentType]
        )
        for kind in ("id", "bag"):
            features[f"{name}_{kind}"] = FeatureConfig(table)
            columns[f"{name}_{kind}"] = IdColumn(f"{name}_{kind}")
    return JobConfig(
        name="placed",
        features=features,
        model=Perceptron(),
        data=ParquetData(
            f"{folder}/*.parquet", label="label", dense=["x"], features=columns, eval_paths=f"{folder}/*.parquet"
        ),
        batch_size=BATCH_SIZE,
        num_lanes=4,
        num_epochs=2,
        dense_optimizer=optax.sgd(0.05),
    )


def wide_job(folder: str, place: Any = "host") -> JobConfig:
    """All that a table may be: combiners, weights, each rule, limits and decay, rates that change, rounded lookups, a
    sequence that shares a table with its item, lists of bags, and a table that is only read.
    """
    few, many = (
        partial(TableConfig, SIZES["few"], DIM, place=place),
        partial(TableConfig, SIZES["many"], DIM, place=place),
    )
    first = np.random.default_rng(3).standard_normal((SIZES["many"], DIM)).astype(np.float32)
    limited = Adagrad(0.3, clipvalue=0.01, weight_decay_factor=0.01, clip_weight_min=-0.3, clip_weight_max=0.35)
    tables = {
        "mean": many(name="mean", combiner="mean", optimizer=limited),
        "sqrtn": many(name="sqrtn", combiner="sqrtn", optimizer=RowWiseAdagrad(lambda step: 0.1 / (1 + step))),
        "rounded": many(
            name="rounded",
            optimizer=FTRL(0.1, initial_accumulator_value=0.1),
            quantization_config=QuantizationConfig(255, -0.5, 0.5),
        ),
        "history": many(name="history", optimizer=Adam(0.01, epsilon=1e-3)),
        "read": many(name="read", initial_rows=first, trainable=False, combiner="sum"),
        "all": few(name="all", combiner="sum", optimizer=Adam(0.01, epsilon=1e-3, lazy_adam=False)),
        "momentum": few(name="momentum", optimizer=AdagradMomentum(0.1, momentum=0.9)),
        "ball": many(name="ball", optimizer=Momentum(0.1, use_nesterov=True)),
        "lion": many(name="lion", optimizer=Lion(0.01)),
        "own": many(name="own", optimizer=OWN),
    }
    features = {name: FeatureConfig(table) for name, table in tables.items() if name != "history"}
    features["item"] = FeatureConfig(tables["history"])
    features["history"] = FeatureConfig(tables["history"], max_sequence_length=4)
    features["lists"] = FeatureConfig(tables["momentum"], output_shape=(None, 3, 2))
    bags = {name: IdColumn(f"{'few' if name == 'all' else 'many'}_bag", weights="shares") for name in features}
    columns = {**bags, "item": IdColumn("many_id"), "momentum": IdColumn("few_id"), "history": IdColumn("many_bag")}
    return JobConfig(
        name="wide",
        features=features,
        model=Perceptron(),
        data=ParquetData(
            f"{folder}/*.parquet",
            label="label",
            dense=["x"],
            features={**columns, "lists": IdColumn("few_bag")},
            eval_paths=f"{folder}/*.parquet",
        ),
        batch_size=BATCH_SIZE,
        num_lanes=4,
        num_epochs=2,
        dense_optimizer=optax.sgd(0.05),
        schedule=optax.linear_schedule(1.0, 0.2, 20),
    )


def train(
    folder: Path,
    storage: Path,
    name: str,
    *,
    num_hosts: int = 1,
    max_steps: int = 20,
    reporter: SilentReporter | None = None,
    devices_per_host: int | None = None,
    mesh: Mapping[str, int] | None = None,
    sparse_cores: bool = False,
    in_process: bool | None = None,
    warm_start: WarmStart | None = None,
    checkpoints: CheckpointConfig = CheckpointConfig(every_steps=5),  # noqa: B008  # frozen
    job: str = "placed_job",
    **arguments: Any,
) -> Result:
    """A run, or more of one, which may have other arguments of the job than before."""
    scaling = ScalingConfig(
        num_hosts=num_hosts,
        threads_per_host=1,
        in_process=num_hosts == 1 if in_process is None else in_process,
        devices_per_host=devices_per_host,
        mesh=mesh,
        sparse_cores=sparse_cores,
    )
    config = RunConfig(
        storage_path=str(storage),
        name=name,
        max_steps=max_steps,
        eval_every_steps=10,
        checkpoint_config=checkpoints,
    )
    reference = JobReference(function=f"{__name__}:{job}", arguments={"folder": str(folder), **arguments})
    url = f"{storage}/{name}"
    run = (
        open_run(url, settings=arguments)
        if Path(url).exists()
        else create_run(url, reference.resolve(), reference, warm_start=warm_start)
    )
    return fit(run, scaling=scaling, config=config, reporter=reporter or SilentReporter())


def assert_close(found: Result, expected: Result) -> None:
    """Same losses and committed arrays, to the order in which floats are added."""
    assert found.losses == pytest.approx({step: expected.losses[step] for step in found.losses}, rel=2e-5)
    assert found.evaluations[-1].loss == pytest.approx(expected.evaluations[-1].loss, rel=2e-5)
    arrays, others = committed_state(found.path), committed_state(expected.path)
    assert arrays.keys() == others.keys()
    for name, values in arrays.items():
        np.testing.assert_allclose(values, others[name], rtol=2e-4, atol=5e-6, err_msg=name)
