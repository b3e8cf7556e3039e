"""Cost of a `TPUEmbedding` step, enqueue to apply_gradients, over the kernels it is made of. Prints one JSON line.

    python benchmarks/tpu_embedding.py [--batch-size 4096] [--num-tables 4] \\
        [--rows 200000] [--dim 64] [--bag-length 10] [--steps 30]

The bare kernels do what a host does for one step, into buffers allocated once: distinct ids, routing, gather, pooling,
gradient sum, update. Both work on tables of the same first values and take turns on the same batches; the ratio is that
of the medians. Target: at most 1.2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Uniform
from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.lookup import compiled as kernels
from podembed.embedding.lookup.router import Router
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.row_index import KeyRequest
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding

NUM_BATCHES = 4


class BareKernels:
    """One table's step in its kernels, every buffer allocated once."""

    def __init__(self, spec: TableSpec, *, num_ids: int, batch_size: int) -> None:
        num_buckets = spec.layout.num_buckets
        self.table = Table(spec, np.arange(num_buckets))
        self.table.initialize()
        self._router = Router(spec)
        self._hash_slots = np.zeros((kernels.num_hash_slots(num_ids), 2), np.int64)
        self._unique, self._inverse = np.empty(num_ids, np.int64), np.empty(num_ids, np.int32)
        self._counts = np.empty(1, np.int64)
        self._local, self._position = np.empty(num_ids, np.int64), np.empty(num_ids, np.int32)
        self._index = np.empty(num_ids, np.int32)
        self._rows = aligned_empty((num_ids, spec.dim))
        self.activations = aligned_empty((batch_size, spec.dim))

    def forward(self, bags: Ragged) -> None:
        table, ids = self.table, bags.values
        self._count = count = kernels.unique_ids(ids, self._hash_slots, self._unique, self._inverse)
        unique, local, rows = self._unique[:count], self._local[:count], self._rows[:count]
        self._router.route(unique, self._counts, local, self._position)
        table.index.accept([KeyRequest(local, local)], None)
        table.gather(local, rows)
        kernels.row_of_each_id(self._position, self._inverse, self._index)
        kernels.pool(rows, self._index, bags.row_splits, None, "sum", self.activations)

    def backward(self, bags: Ragged, gradient: np.ndarray, learning_rate: float) -> None:
        local, rows = self._local[: self._count], self._rows[: self._count]
        rows.fill(0.0)
        kernels.sum_gradients(gradient, self._index, bags.row_splits, None, "sum", rows)
        self.table.update(local, rows, learning_rate)


def make_batches(num_tables: int, num_rows: int, batch_size: int, bag_length: int) -> list[list[Ragged]]:
    """Zipf ids (exponent 1.05), their ranks spread over the table by a multiplication."""
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, num_rows + 1) ** 1.05
    bounds = np.cumsum(weights / weights.sum())
    splits = np.arange(0, batch_size * bag_length + 1, bag_length)

    def ids() -> np.ndarray:
        ranks = np.searchsorted(bounds, rng.random(batch_size * bag_length)).clip(0, num_rows - 1)
        return ranks * 2_654_435_761 % num_rows

    return [[Ragged(ids(), splits) for _ in range(num_tables)] for _ in range(NUM_BATCHES)]


def seconds(step: Callable[[], None]) -> float:
    """CPU seconds of the process, kernel included: other users of the machine do not count, page faults do."""
    started = time.process_time()
    step()
    return time.process_time() - started


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    batch_size, num_ids = arguments.batch_size, arguments.batch_size * arguments.bag_length
    optimizer = Adagrad(0.05)
    tables = [
        TableConfig(arguments.rows, arguments.dim, Uniform(-0.1, 0.1), optimizer, "sum", name=f"table_{at}")
        for at in range(arguments.num_tables)
    ]
    with LocalStrategy().scope():
        embedding = TPUEmbedding([FeatureConfig(table) for table in tables], batch_size)
    bare = [BareKernels(TableSpec.of(table, seed=0), num_ids=num_ids, batch_size=batch_size) for table in tables]
    batches = make_batches(arguments.num_tables, arguments.rows, batch_size, arguments.bag_length)
    gradients = [
        jnp.asarray(np.random.default_rng(1).normal(size=(batch_size, arguments.dim)), jnp.float32) for _ in tables
    ]
    as_numpy = [np.asarray(gradient) for gradient in gradients]

    def run_embedding(batch: Sequence[Ragged]) -> None:
        embedding.enqueue(batch)
        embedding.dequeue()
        embedding.apply_gradients(gradients)

    def run_bare(batch: Sequence[Ragged]) -> None:
        # All activations before any gradient, since the dense model needs them together.
        for one, bags in zip(bare, batch, strict=True):
            one.forward(bags)
        for one, bags, gradient in zip(bare, batch, as_numpy, strict=True):
            one.backward(bags, gradient, 0.05)

    spent: dict[str, list[float]] = {"embedding": [], "bare": []}
    for number in range(arguments.steps + NUM_BATCHES):
        batch = batches[number % NUM_BATCHES]
        spent["embedding"].append(seconds(lambda batch=batch: run_embedding(batch)))
        spent["bare"].append(seconds(lambda batch=batch: run_bare(batch)))
    # The first pass over the batches compiles and touches memory.
    median = {name: statistics.median(times[NUM_BATCHES:]) for name, times in spent.items()}
    return {
        "batch_size": batch_size,
        "embedding_ms": round(median["embedding"] * 1e3, 3),
        "bare_kernels_ms": round(median["bare"] * 1e3, 3),
        "ratio": round(median["embedding"] / median["bare"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in [
        ("batch-size", 4096),
        ("num-tables", 4),
        ("rows", 200_000),
        ("dim", 64),
        ("bag-length", 10),
        ("steps", 30),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    print(json.dumps({"benchmark": "tpu_embedding", **measure(parser.parse_args())}))


if __name__ == "__main__":
    main()
