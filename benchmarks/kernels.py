"""Nanoseconds per id or row of every kernel, on one thread, beside numpy doing the same. Prints one JSON line for each
width.

    python benchmarks/kernels.py [--dims 64 128] [--rows 2000000] [--ids 160000]

Ids follow a bounded Zipf law (exponent 1.05) spread over the table. Eight different batches take turns, so rows come
from memory except for what stays hot. The median over the batches is printed, with that of `numpy` beside it. Compare
ratios, since machines differ.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.kernels.arrays import aligned_empty, aligned_zeros
from podembed.embedding.kernels.pool import gather
from podembed.embedding.lookup import compiled as kernels
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec

NUM_BATCHES = 8
IDS_PER_BAG = 10
OPTIMIZERS = {
    "sgd": SGD(0.1),
    "rowwise_adagrad": RowWiseAdagrad(0.1),
    "adagrad": Adagrad(0.1),
    "adam": Adam(0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Ids, the distinct ones, and where each id's row is among them."""

    ids: np.ndarray
    unique: np.ndarray
    inverse: np.ndarray


class Scratch:
    """What the kernels write to, allocated once."""

    def __init__(self, num_ids: int) -> None:
        self.hash_slots = np.zeros((kernels.num_hash_slots(num_ids), 2), np.int64)
        self.unique = np.empty(num_ids, np.int64)
        self.inverse = np.empty(num_ids, np.int32)

    def unique_ids(self, ids: np.ndarray) -> int:
        return kernels.unique_ids(ids, self.hash_slots, self.unique, self.inverse)


def make_batches(num_rows: int, num_ids: int, scratch: Scratch) -> list[Batch]:
    """Zipf ids, their ranks spread over the table by a multiplication."""
    rng = np.random.default_rng(0)
    share = np.cumsum(1.0 / np.arange(1, num_rows + 1) ** 1.05)
    batches = []
    for _ in range(NUM_BATCHES):
        rank = np.searchsorted(share, rng.random(num_ids) * share[-1])
        ids = rank.astype(np.int64) * 2654435761 % num_rows
        count = scratch.unique_ids(ids)
        batches.append(Batch(ids=ids, unique=scratch.unique[:count].copy(), inverse=scratch.inverse.copy()))
    return batches


def nanoseconds(run: Callable[[Batch], object], batches: list[Batch], size: Callable[[Batch], int]) -> float:
    """Median time of one item, after one warm-up call."""
    run(batches[0])
    found = []
    for batch in batches * 2:
        start = time.perf_counter()
        run(batch)
        found.append((time.perf_counter() - start) / size(batch) * 1e9)
    return round(float(np.median(found)), 1)


def lookups(dim: int, num_rows: int, num_ids: int) -> dict[str, dict[str, float]]:
    """Dedup and pooling per id, gather per distinct row."""
    scratch = Scratch(num_ids)
    batches = make_batches(num_rows, num_ids, scratch)
    table = aligned_zeros((num_rows, dim))
    table += 0.5
    splits = np.arange(0, num_ids + 1, IDS_PER_BAG)
    rows = aligned_empty((max(len(batch.unique) for batch in batches), dim))
    activations = aligned_zeros((len(splits) - 1, 3, dim))[:, 1, :]

    def per_id(batch: Batch) -> int:
        return num_ids

    def per_row(batch: Batch) -> int:
        return len(batch.unique)

    def sum_gradients(batch: Batch) -> None:
        rows[: len(batch.unique)] = 0
        kernels.sum_gradients(activations, batch.inverse, splits, None, "mean", rows)

    def sum_gradients_numpy(batch: Batch) -> None:
        rows[: len(batch.unique)] = 0
        np.add.at(rows, batch.inverse, np.repeat(activations / IDS_PER_BAG, IDS_PER_BAG, axis=0))

    contenders = {
        "unique_ids": (per_id, lambda b: scratch.unique_ids(b.ids), lambda b: np.unique(b.ids, return_inverse=True)),
        "gather": (
            per_row,
            lambda b: gather(table, b.unique, rows),
            lambda b: np.take(table, b.unique, axis=0, out=rows[: len(b.unique)], mode="clip"),
        ),
        "pool": (
            per_id,
            lambda b: kernels.pool(rows, b.inverse, splits, None, "mean", activations),
            lambda b: np.divide(np.add.reduceat(rows[b.inverse], splits[:-1]), IDS_PER_BAG, out=activations),
        ),
        "sum_gradients": (per_id, sum_gradients, sum_gradients_numpy),
    }
    return {
        name: {"ns": nanoseconds(ours, batches, size), "numpy_ns": nanoseconds(numpy, batches[:2], size)}
        for name, (size, ours, numpy) in contenders.items()
    }


def updates(name: str, optimizer: Optimizer, dim: int, num_rows: int, num_ids: int) -> dict[str, float]:
    """One step of an optimizer per touched row, merging included."""
    config = TableConfig(num_rows, dim, Constant(0.5), optimizer, name="t")
    table = Table(TableSpec.of(config, seed=0, num_buckets=1), np.array([0]))
    table.initialize()
    batches = make_batches(num_rows, num_ids, Scratch(num_ids))
    gradients = aligned_zeros((num_ids, dim))
    gradients += 1e-3

    def update(batch: Batch) -> None:
        table.update(batch.unique, gradients[: len(batch.unique)], 0.1)

    result = {"ns": nanoseconds(update, batches, lambda b: len(b.unique))}
    if name == "adagrad":
        result["numpy_ns"] = nanoseconds(
            lambda b: adagrad_numpy(table, b, gradients), batches[:2], lambda b: len(b.unique)
        )
    return result


def adagrad_numpy(table: Table, batch: Batch, gradients: np.ndarray) -> None:
    """The rule as one writes it in numpy."""
    gradient, accumulator = gradients[: len(batch.unique)], table.slots["accumulator"]
    accumulator[batch.unique] += gradient * gradient
    table.rows[batch.unique] -= np.float32(0.1) * gradient / np.sqrt(accumulator[batch.unique])


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of the kernels on one thread.")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="columns of a row")
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the table")
    parser.add_argument("--ids", type=int, default=160_000, help="ids of a batch, a multiple of 10")
    arguments = parser.parse_args()
    for dim in arguments.dims:
        found = lookups(dim, arguments.rows, arguments.ids)
        for name, optimizer in OPTIMIZERS.items():
            found[f"update_{name}"] = updates(name, optimizer, dim, arguments.rows, arguments.ids)
        print(
            json.dumps({"benchmark": "kernels", "dim": dim, "rows": arguments.rows, "ids": arguments.ids} | found),
            flush=True,
        )


if __name__ == "__main__":
    main()
