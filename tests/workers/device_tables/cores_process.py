"""Sharded tables on emulated SparseCores, on CPU devices. Prints JSON.

Usage: python -m tests.workers.device_tables.cores_process FOLDER few|all
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.shards import ShardedArray, ShardLayout
from podembed.workers.device.tables.exchange import AskedArray, AskedRound, Wanted
from podembed.workers.device.tables.pooling import BagIds
from podembed.workers.device.tables.sparse_cores import CoreIds
from tests.workers.device_tables.emulated_cores import emulate

CASES = [
    (1, 2, 64, 16, "sum", False),
    (4, 2, 1000, 64, "sum", True),
    (2, 4, 333, 64, "mean", True),
    (4, 4, 5000, 256, "sqrtn", True),
    (8, 2, 17, 128, "mean", False),
    (2, 2, 7, 32, "sum", True),
]
"""Chips, cores of each, rows of the table, bags, combiner, and whether ids have weights."""


def lists_of(case: tuple[int, int, int, int, str, bool]) -> list[str]:
    """The kinds of lists that differ on some device from those that the package makes of the same ids."""
    num_chips, cores, num_rows, num_bags, combiner, is_weighted = case
    random, num_cores = np.random.default_rng(num_rows), num_chips * cores
    bags = [random.integers(0, num_rows, size) for size in random.integers(1, 7, num_bags)]
    weights = [random.random(len(one), np.float32) + 0.1 if is_weighted else np.ones(len(one)) for one in bags]
    expected = lists_of_package(bags, weights, case)
    # The package has row r on core r modulo all cores.
    size = -(-num_rows // num_cores) * cores
    layout = ShardLayout(table=BucketLayout(num_rows=size * num_chips, num_buckets=num_chips), num_parts=num_chips)
    array = ShardedArray({"t": layout}, cores=cores)
    found, num_own = {}, num_bags // num_chips
    for chip in range(num_chips):
        own = range(chip * num_own, (chip + 1) * num_own)
        rows = np.concatenate([bags[at] for at in own]).astype(np.int32)
        core, place = rows % num_cores, rows // num_cores
        slots = core * array.rows_per_core + place
        of_bag = np.repeat(np.arange(num_own), [len(bags[at]) for at in own])
        own_weights = jnp.asarray(np.concatenate([weights[at] for at in own]), jnp.float32)
        ids = BagIds(
            jnp.asarray(rows),
            jnp.asarray(of_bag, jnp.int32),
            own_weights if is_weighted else None,
            combiner=combiner,
            num_bags=num_own,
        )
        asked = AskedArray(array, Wanted.of(jnp.asarray(slots, jnp.int32), array), len(slots))
        bounds = jnp.arange(num_cores + 1, dtype=jnp.int32) * array.rows_per_core
        whole = AskedRound(*[jnp.zeros(0)] * 4, bounds[:-1], bounds[1:])
        mine = CoreIds.of(asked, [ids]).lists(whole)
        found[chip] = [np.asarray(one).reshape(cores, -1) for one in mine]
    return [name for name, same in compared(found, expected).items() if not same]


def lists_of_package(bags: list[Any], weights: list[Any], case: tuple[int, int, int, int, str, bool]) -> list[Any]:
    num_chips, cores, num_rows, num_bags, combiner, _ = case
    table = embedding_spec.TableSpec(
        name="t",
        vocabulary_size=num_rows,
        embedding_dim=8,
        initializer=jax.nn.initializers.zeros,
        optimizer=embedding_spec.SGDOptimizerSpec(),
        combiner=combiner,
        max_ids_per_partition=4096,
        max_unique_ids_per_partition=4096,
    )
    features = {
        "f": embedding_spec.FeatureSpec(
            name="f", table_spec=table, input_shape=(num_bags, 6), output_shape=(num_bags, 8)
        )
    }
    embedding.prepare_feature_specs_for_training(features, global_device_count=num_chips, num_sc_per_device=cores)

    def ragged(values: list[Any], kind: Any) -> np.ndarray:
        return np.array([*(np.asarray(one, kind) for one in values), None], dtype=object)[:-1]

    made, _ = embedding.preprocess_sparse_dense_matmul_input(
        {"f": ragged(bags, np.int32)},
        {"f": ragged(weights, np.float32)},
        features,
        num_chips,
        num_chips,
        num_sc_per_device=cores,
    )
    fields = ("lhs_row_pointers", "lhs_embedding_ids", "lhs_sample_ids", "lhs_gains")
    return [
        np.asarray(getattr(made.sparse_dense_matmul_input, name)["t"]).reshape(num_chips, cores, -1) for name in fields
    ]


def compared(found: dict[int, list[np.ndarray]], expected: list[np.ndarray]) -> dict[str, bool]:
    """Whether each kind of list is the same up to its last id; gains to the rounding of a division."""
    same = dict.fromkeys(("ends", "rows", "bags", "gains"), True)
    for chip, mine in found.items():
        for core, ends in enumerate(mine[0]):
            same["ends"] &= np.array_equal(ends, expected[0][chip, core])
            size = ends[-1]
            for name, own, other in zip(("rows", "bags"), mine[1:3], expected[1:3], strict=True):
                same[name] &= np.array_equal(own[core, :size], other[chip, core, :size])
            gains = mine[3][core, :size], expected[3][chip, core, :size]
            same["gains"] &= np.allclose(*gains, rtol=3e-7, atol=0, equal_nan=True)
    return same


def runs(folder: Path, jobs: list[str]) -> dict[str, Any]:
    """Differences of losses and arrays between runs on hosts and on emulated cores, and the most rounds of a step. Part
    of each run does without cores, and commits hold what has changed.
    """
    from podembed.orchestrator.api.config import CheckpointConfig
    from podembed.tools.metrics.reading import StreamReader
    from podembed.workers.storage.store import Store
    from tests.run_state import committed_state
    from tests.workers.device_tables.jobs import SIZES, train, write_rows

    write_rows(folder)
    placed: dict[str, dict[str, Any]] = {"placed_job": {"sharded": [*SIZES]}, "wide_job": {"place": "sharded"}}
    found, often = {}, CheckpointConfig(every_steps=5, full_every=10)
    for job in jobs:
        arguments = placed[job]
        hosts = train(folder, folder, f"{job}-hosts", job=job, devices_per_host=4)
        losses: dict[int, float] = {}
        for max_steps, is_of_cores in ((10, True), (15, False), (20, True)):
            arguments |= {"max_steps": max_steps, "sparse_cores": is_of_cores, "checkpoints": often}
            cores = train(folder, folder, f"{job}-cores", job=job, devices_per_host=4, **arguments)
            losses |= cores.losses
        arrays, others = committed_state(cores.path), committed_state(hosts.path)
        windows = StreamReader(Store(cores.path)).read().windows
        found[job] = {
            "losses": max(abs(losses[step] - loss) for step, loss in hosts.losses.items()),
            "arrays": {
                name: float(np.abs(values - others[name]).max()) for name, values in arrays.items() if values.size
            },
            "rounds": max(point.value("exchange_rounds") for point in windows),
        }
    return found


if __name__ == "__main__":
    emulate()
    is_short = sys.argv[2] == "few"
    lists = [lists_of(case) for case in CASES[: 2 if is_short else None]]
    print(
        json.dumps(
            {"lists": lists, "runs": runs(Path(sys.argv[1]), ["placed_job", "wide_job"][: 1 if is_short else 2])}
        )
    )
