"""Whole training runs of a `TPUEmbedding`, beside the float64 oracle: the declarations, the batches and the
comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import scipy.sparse

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Optimizer
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.features.inputs import Sparse
from podembed.embedding.tf.features.structures import flatten_with_paths
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from tests.conformance.embedding_oracle import Bag, Oracle, OracleFeature, OracleTable

BATCH_SIZE = 6
NUM_STEPS = 5
LENGTH = 3
RELATIVE = 3e-5


def declare(optimizer: Optimizer) -> tuple[Any, TableConfig, TableConfig]:
    """Four features over two tables: dense, weighted ragged, weighted sparse, and a sequence."""
    # Of widths whose kernels other tests compile, too.
    users = TableConfig(17, 3, combiner="mean", name="users", optimizer=optimizer)
    items = TableConfig(29, 8, combiner="sqrtn", name="items", optimizer=optimizer)
    config = {
        "dense": FeatureConfig(users),
        "bags": (FeatureConfig(users), FeatureConfig(items)),
        "history": FeatureConfig(users, max_sequence_length=LENGTH),
        "recent": FeatureConfig(items, combiner="sum"),
    }
    return config, users, items


def oracle_of(embedding: TPUEmbedding, users: TableConfig, items: TableConfig) -> Oracle:
    """An oracle that starts with the embedding's rows."""
    held = embedding.read_tables()
    tables = {
        "users": OracleTable.of(held[users]["rows"], users.optimizer),  # type: ignore[arg-type]
        "items": OracleTable.of(held[items]["rows"], items.optimizer),  # type: ignore[arg-type]
    }
    # In flat order, which is the order of duplicates without accumulation.
    features = {
        "bags/0": OracleFeature("users", "mean"),
        "bags/1": OracleFeature("items", "sqrtn"),
        "dense": OracleFeature("users", "mean"),
        "history": OracleFeature("users", "mean"),
        "recent": OracleFeature("items", "sum"),
    }
    return Oracle(tables, features)


def in_form(form: str, rows: list[list[int]]) -> tuple[Any, Any]:
    """Ids and their weights in one of the forms that `enqueue` takes."""
    weights = [[0.5 * (1 + at) for at in range(len(ids))] for ids in rows]
    if form == "ragged":
        ids = Ragged.of_lists(rows)
        return ids, Ragged(np.concatenate([np.asarray(row, np.float32) for row in weights]), ids.row_splits)
    if form == "pyarrow":
        return pa.array(rows, pa.list_(pa.int64())), pa.array(weights, pa.list_(pa.float32()))
    places = np.array([(row, column) for row, ids in enumerate(rows) for column in range(len(ids))], np.int64)
    values = np.concatenate([np.asarray(row, np.int64) for row in rows])
    of_values = np.concatenate([np.asarray(row, np.float32) for row in weights])
    shape = (len(rows), 3)
    if form == "sparse":
        return Sparse(places, values, shape), Sparse(places, of_values, shape)
    ids_at, weights_at = (scipy.sparse.coo_array((one, tuple(places.T)), shape=shape) for one in (values, of_values))
    return (ids_at, weights_at) if form == "coo" else (ids_at.asformat(form), weights_at.asformat(form))


def make_batch(rng: np.random.Generator, batch_size: int = BATCH_SIZE) -> tuple[Any, Any, dict[str, list[Bag]]]:
    """Features, weights, and the same as bags for the oracle."""
    dense = rng.integers(0, 17, batch_size)
    weighted = [random_bag(rng, 17) for _ in range(batch_size)]
    sparse = [random_bag(rng, 29) for _ in range(batch_size)]
    history = [rng.integers(0, 17, rng.integers(0, 5)).tolist() for _ in range(batch_size)]
    recent = [rng.integers(0, 29, rng.integers(0, 4)).tolist() for _ in range(batch_size)]
    sparse_ids, sparse_weights = as_sparse(sparse)
    features = {
        "dense": dense,
        "bags": (ragged([[i for i, _ in bag] for bag in weighted]), sparse_ids),
        "history": ragged(history),
        "recent": ragged(recent),
    }
    weights = {
        "dense": None,
        "bags": (ragged([[w for _, w in bag] for bag in weighted], np.float32), sparse_weights),
        "history": None,
        "recent": None,
    }
    bags: dict[str, list[Bag]] = {
        "bags/0": weighted,
        "bags/1": sparse,
        "dense": [[(int(i), 1.0)] for i in dense],
        "history": [[(row[at], 1.0)] if at < len(row) else [] for row in history for at in range(LENGTH)],
        "recent": [[(i, 1.0) for i in row] for row in recent],
    }
    return features, weights, bags


def random_bag(rng: np.random.Generator, num_rows: int) -> Bag:
    count = int(rng.integers(0, 4))
    return [
        (int(i), float(np.float32(w)))
        for i, w in zip(rng.integers(0, num_rows, count), rng.uniform(0.2, 2, count), strict=True)
    ]


def ragged(lists: list[list[Any]], dtype: Any = np.int64) -> Ragged:
    splits = np.concatenate([[0], np.cumsum([len(row) for row in lists])])
    return Ragged(np.array([value for row in lists for value in row], dtype), splits)


def as_sparse(bags: list[Bag]) -> tuple[Sparse, Sparse]:
    indices = np.array([(row, at) for row, bag in enumerate(bags) for at in range(len(bag))], np.int64).reshape(-1, 2)
    values = [pair for bag in bags for pair in bag]
    shape = (len(bags), 4)
    return (
        Sparse(indices, np.array([i for i, _ in values], np.int64), shape),
        Sparse(indices, np.array([w for _, w in values], np.float32), shape),
    )


class Run:
    """Steps an embedding and its oracle side by side.

    Gradients depend on the activations, so a step of staleness too many or too few shows in the next numbers.
    """

    def __init__(
        self, embedding: TPUEmbedding, oracle: Oracle, rate: Callable[[int], float], *, is_pipelined: bool
    ) -> None:
        self.embedding, self.oracle, self._rate = embedding, oracle, rate
        self._is_pipelined = is_pipelined
        self._rng = np.random.default_rng(3)
        self._waiting: Any = None
        self._step = 0

    def step(self) -> None:
        features, weights, bags = make_batch(self._rng)
        self.embedding.enqueue(features, weights)
        expected = self.oracle.forward(bags)
        # Backward N right after forward N + 1.
        self.drain_oracle()
        activations = self.embedding.dequeue()
        found = dict(flatten_with_paths(activations))
        for name, value in expected.items():
            np.testing.assert_allclose(
                np.asarray(found[name]).reshape(value.shape), value, rtol=RELATIVE, atol=2e-6, err_msg=name
            )
        noise = {name: self._rng.normal(size=value.shape) for name, value in expected.items()}
        gradients = jax.tree_util.tree_map_with_path(
            lambda path, leaf: 0.3 * leaf + jnp.asarray(noise[_name(path)].reshape(leaf.shape), jnp.float32),
            activations,
        )
        self.embedding.apply_gradients(gradients)
        exact = {name: 0.3 * value + noise[name].astype(np.float32) for name, value in expected.items()}
        rate = self._rate(self._step)
        self._waiting = (bags, exact, {"users": rate, "items": rate})
        self._step += 1
        if not self._is_pipelined:
            self.drain_oracle()

    def drain_oracle(self) -> None:
        if self._waiting is not None:
            self.oracle.backward(*self._waiting)
            self._waiting = None

    def compare_tables(self, users: TableConfig, items: TableConfig) -> None:
        """All rows and slots, with every update applied."""
        self.drain_oracle()
        held = self.embedding.read_tables()
        for config in (users, items):
            table = self.oracle.tables[str(config.name)]
            arrays = list(held[config].values())
            for found, expected in zip(arrays, [table.rows, *table.slots], strict=True):
                np.testing.assert_allclose(found, expected, rtol=RELATIVE, atol=RELATIVE * np.abs(expected).max())


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
