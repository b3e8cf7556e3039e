"""A job small enough for tests that still has everything: lists and empty bags, shared tables, all combiners, three row optimizers,
several buckets a table, and an audit table that counts how often each sample was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

from embedding.config import FeatureConfig, TableConfig
from embedding.initializers import Constant
from embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from workers.data_config import IdColumn, ParquetData
from workers.job import JobConfig

NUM_ROWS = 1_900
BATCH_SIZE = 96
NUM_LANES = 12
DIM = 8
B_ROWS = 30_000


class SmallModel:
    """One hidden layer over the dense inputs and all activations; the audit feature bypasses it with a gradient of exactly 1."""

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        width = num_dense + sum(width for name, width in widths.items() if name != "audit")
        first, second = jax.random.split(key)
        return {
            "hidden": jax.random.normal(first, (width, 16)) / np.sqrt(width),
            "out": jax.random.normal(second, (16,)) / 4.0,
        }

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        seen = [value for name, value in activations.items() if name != "audit"]
        logits = jnp.tanh(jnp.concatenate([dense, *seen], axis=1) @ params["hidden"]) @ params["out"]
        return _tap(logits, activations["audit"]) if "audit" in activations else logits


@jax.custom_vjp
def _tap(logits: jax.Array, audit: jax.Array) -> jax.Array:
    """The logits alone; the gradient of every sample's audit value is 1, whatever the loss says."""
    return logits


_tap.defvjp(lambda logits, audit: (logits, audit), lambda audit, upstream: (upstream, jnp.ones_like(audit)))


def write_small_data(folder: Path | str, *, num_rows: int = NUM_ROWS, seed: int = 5) -> None:
    """Two files of uneven row groups; columns `label`, `x`, `y`, `a`, `b`, `bag`, `other_bag`, `sample_id`."""
    rng = np.random.default_rng(seed)
    bags = [rng.integers(0, 300, rng.integers(0, 6)).tolist() for _ in range(num_rows)]
    others = [rng.integers(0, 300, rng.integers(0, 4)).tolist() for _ in range(num_rows)]
    table = pa.table(
        {
            "label": pa.array((rng.random(num_rows) < 0.3).astype(np.int8)),
            "x": pa.array(rng.standard_normal(num_rows).astype(np.float32)),
            "y": pa.array(rng.standard_normal(num_rows).astype(np.float32)),
            "a": pa.array(rng.integers(0, 50, num_rows)),
            "b": pa.array(np.minimum(rng.zipf(1.3, num_rows), 999) * 37 % B_ROWS),
            "bag": pa.array(bags, pa.list_(pa.int64())),
            "other_bag": pa.array(others, pa.list_(pa.int64())),
            "sample_id": pa.array(np.arange(num_rows)),
        }
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    cut = num_rows * 2 // 3
    pq.write_table(table.slice(0, cut), f"{folder}/part-0.parquet", row_group_size=170)
    pq.write_table(table.slice(cut), f"{folder}/part-1.parquet", row_group_size=90)


def small_job(
    *,
    folder: str,
    num_rows: int = NUM_ROWS,
    epochs: int = 3,
    audit: bool = True,
    evaluate: bool = False,
    seed: int = 3,
    staleness: int = 0,
    overlap: bool = True,
) -> JobConfig:
    """The job on what `write_small_data` wrote."""
    bags = TableConfig(300, DIM, name="bags", combiner="mean", optimizer=RowWiseAdagrad(0.05))
    features = {
        "a": FeatureConfig(TableConfig(50, DIM, name="a", combiner="sum", optimizer=Adagrad(0.1))),
        # Too large for one host's fair share: it is cut into buckets and its rows travel, while the others lie whole and are pooled there.
        "b": FeatureConfig(TableConfig(B_ROWS, 2 * DIM, name="b", combiner="sum", optimizer=Adam(0.01))),
        "bag": FeatureConfig(bags),
        "other_bag": FeatureConfig(bags, combiner="sqrtn"),
    }
    columns = {name: IdColumn(name) for name in features}
    if audit:
        # Gradients are divided by the batch's weight, so at this rate a visit in a full batch takes 1 off a sample's row.
        table = TableConfig(
            num_rows, 1, name="audit", combiner="sum", initializer=Constant(0.0), optimizer=SGD(float(BATCH_SIZE))
        )
        features["audit"] = FeatureConfig(table)
        columns["audit"] = IdColumn("sample_id")
    return JobConfig(
        name="small",
        features=features,
        model=SmallModel(),
        data=ParquetData(
            f"{folder}/part-*.parquet",
            label="label",
            dense=("x", "y"),
            features=columns,
            sample_id="sample_id",
            eval_paths=f"{folder}/part-*.parquet" if evaluate else (),
        ),
        batch_size=BATCH_SIZE,
        num_lanes=NUM_LANES,
        num_epochs=epochs,
        dense_optimizer=optax.adam(1e-2),
        seed=seed,
        staleness=staleness,
        overlap=overlap,
    )
