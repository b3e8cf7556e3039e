"""A job for each way of looking up and updating that is not the plain one, its data, and the same steps by
`TPUEmbedding` in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.features.activations import Activations
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig

BATCH_SIZE = 12
NUM_BATCHES = 6
PLAIN_ROWS = 400
LENGTH = 3
# Named, since a job and `TPUEmbedding` take different ones where none is given.
START = 0.1

TABLE_OPTIONS: dict[str, dict[str, Any]] = {
    "drop": {"invalid_ids": "drop"},
    "clip": {"invalid_ids": "clip"},
    "hash": {"invalid_ids": "hash"},
    "unaccumulated": {"optimizer": Adagrad(0.3, START, use_gradient_accumulation=False)},
    "quantized": {"quantization_config": QuantizationConfig(16, -1.0, 1.0)},
    "everything": {
        "invalid_ids": "drop",
        "optimizer": Adagrad(0.3, START, use_gradient_accumulation=False),
        "quantization_config": QuantizationConfig(16, -1.0, 1.0),
    },
}
FEATURE_OPTIONS: dict[str, dict[str, Any]] = {
    "sequence": {"max_sequence_length": LENGTH},
    "single": {"max_sequence_length": 1},
    "output_shape": {"output_shape": (BATCH_SIZE, 2, 2)},
    "pooled_shape": {"output_shape": (BATCH_SIZE, 1)},
    "everything": {"max_sequence_length": LENGTH},
}
WAYS = tuple(dict.fromkeys([*TABLE_OPTIONS, *FEATURE_OPTIONS]))
_HAS_OUTSIDE = {"drop", "clip", "hash", "everything"}


class PositionModel:
    """A linear model that weighs the positions of a sample differently; its scores feed back into every gradient."""

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        return {name: jnp.linspace(-0.5, 0.8, width) for name, width in widths.items()}

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        scores = dense[:, 0]
        for name in sorted(activations):
            vectors = activations[name].reshape(len(dense), -1, activations[name].shape[-1])
            scores = scores + (vectors @ params[name]) @ jnp.arange(1.0, vectors.shape[1] + 1)
        return scores


def write_odd_data(folder: Path, way: str, *, odd_rows: int, longest: int = 5) -> None:
    """`rows.parquet`: columns `label`, `x`, `one` (an id), `odd` and `other` (lists of up to `longest` ids)."""
    rng = np.random.default_rng(4)
    num_rows = BATCH_SIZE * NUM_BATCHES
    low, high = (-20, 2 * odd_rows) if way in _HAS_OUTSIDE else (0, odd_rows)

    def lists() -> list[list[int]]:
        return [rng.integers(low, high, rng.integers(0, longest + 1)).tolist() for _ in range(num_rows)]

    columns = {
        "label": rng.integers(0, 2, num_rows).astype(np.float32),
        "x": rng.normal(size=num_rows).astype(np.float32),
        "one": rng.integers(0, PLAIN_ROWS, num_rows),
        "odd": pa.array(lists(), pa.list_(pa.int64())),
        "other": pa.array(lists(), pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=20)


def odd_features(way: str, *, odd_rows: int) -> dict[str, FeatureConfig]:
    """`odd` and `other` share the table that is out of the ordinary; `one` looks up in a plain one."""
    options: dict[str, Any] = {"optimizer": Adagrad(0.3, START), **TABLE_OPTIONS.get(way, {})}
    table = TableConfig(odd_rows, 4, combiner="mean", name="odd", **options)
    plain = TableConfig(PLAIN_ROWS, 4, combiner="sum", name="plain", optimizer=Adagrad(0.3, START))
    # In the order of their names, in which `TPUEmbedding` takes them, too.
    return {
        "odd": FeatureConfig(table, **FEATURE_OPTIONS.get(way, {})),
        "one": FeatureConfig(plain),
        "other": FeatureConfig(table, combiner="sqrtn"),
    }


def odd_job(*, folder: str, way: str, odd_rows: int, staleness: int = 0, overlap: bool = True) -> JobConfig:
    """The job on what `write_odd_data` wrote."""
    return JobConfig(
        name="odd",
        features=odd_features(way, odd_rows=odd_rows),
        model=PositionModel(),
        data=ParquetData(f"{folder}/*.parquet", label="label", dense=("x",), order="files", eval_paths=f"{folder}/*"),
        batch_size=BATCH_SIZE,
        num_lanes=4,
        dense_optimizer=optax.sgd(0.1),
        staleness=staleness,
        overlap=overlap,
    )


def steps_of_tpu_embedding(
    folder: str, way: str, *, odd_rows: int, staleness: int = 0
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same steps in one process: their losses, and the tables."""
    features = odd_features(way, odd_rows=odd_rows)
    model, rule = PositionModel(), optax.sgd(0.1)
    params = model.init(jax.random.key(0), 1, {name: feature.table.dim for name, feature in features.items()})
    state, losses = rule.init(params), []
    with embedding_of(features, staleness=staleness) as embedding:
        for batch in batches_of(folder):
            embedding.enqueue({name: batch[name] for name in features}, training=True)
            loss = partial(_loss, model, batch["x"][:, None], batch["label"])
            value, (gradient, of_vectors) = jax.value_and_grad(loss, argnums=(0, 1))(params, embedding.dequeue())
            embedding.apply_gradients(of_vectors)
            updates, state = rule.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(value))
        return losses, state_of(embedding)


@contextmanager
def embedding_of(
    features: Mapping[str, FeatureConfig] | Sequence[FeatureConfig], *, staleness: int
) -> Iterator[TPUEmbedding]:
    """In one process, with the first values of a job with the seed 0."""
    with LocalStrategy(seed=0).scope():
        embedding = TPUEmbedding(features, BATCH_SIZE, pipeline_execution_with_tensor_core=bool(staleness))
    try:
        yield embedding
    finally:
        embedding.close()


def batches_of(folder: str) -> Iterator[dict[str, Any]]:
    """The columns of `write_odd_data`, step by step."""
    rows = pq.read_table(Path(folder) / "rows.parquet").to_pydict()
    for first in range(0, NUM_BATCHES * BATCH_SIZE, BATCH_SIZE):
        batch = {name: values[first : first + BATCH_SIZE] for name, values in rows.items()}
        lists = {name: Ragged.of_lists(batch[name]) for name in ("odd", "other")}
        numbers = {name: np.array(batch[name], np.float32) for name in ("x", "label")}
        yield {**lists, **numbers, "one": np.array(batch["one"])}


def state_of(embedding: TPUEmbedding) -> dict[str, np.ndarray]:
    """What `run_state.committed_state` says of the tables of a run."""
    held = embedding.read_tables()
    return {f"{table.name}/{name}": values for table, arrays in held.items() for name, values in arrays.items()}


def _loss(model: PositionModel, dense: np.ndarray, labels: np.ndarray, params: Any, vectors: Any) -> jax.Array:
    scores = model.apply(params, jnp.asarray(dense), Activations(vectors))
    return optax.sigmoid_binary_cross_entropy(scores, jnp.asarray(labels, jnp.float32)).mean()
