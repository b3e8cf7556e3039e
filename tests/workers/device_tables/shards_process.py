"""Lookups and updates of sharded tables on 1 to 8 devices of the processor, with ids of all kinds. Prints JSON.

Usage: python -m tests.workers.device_tables.shards_process few|all
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.shards import ShardLayout
from podembed.workers.device.options import AXIS
from podembed.workers.device.tables import exchange
from podembed.workers.device.tables.exchange import AskedTable, fetched, given
from podembed.workers.device.tables.updates import Entries, sums_of_runs, update_named

NUM_ROWS, DIM, IDS, RATE = 1_000, 4, 48, 0.3
OPTIMIZER = Adagrad(RATE, 0.1)


def layout_of(num_parts: int, num_buckets: int) -> ShardLayout:
    return ShardLayout(table=BucketLayout(num_rows=NUM_ROWS, num_buckets=num_buckets), num_parts=num_parts)


def kinds(layout: ShardLayout, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Ids of all devices, int32 `[num_parts * IDS]`."""
    size = layout.num_parts * IDS
    mixed = random.integers(0, NUM_ROWS, size)
    mixed[random.random(size) < 0.2] = -1
    one_part = np.arange(NUM_ROWS)[layout.slots_of(np.arange(NUM_ROWS)) < layout.rows_per_part]
    alone = np.full(size, -1)
    alone[IDS - 5] = 999
    return {
        "mixed": mixed,
        "equal": np.full(size, 7),
        "one part": np.resize(one_part, size),
        "none": np.full(size, -1),
        "one id": alone,
        "skewed": np.minimum(random.zipf(1.3, size) - 1, NUM_ROWS - 1),
    }


def step_of(layout: ShardLayout) -> Any:
    """A compiled lookup with the update after it."""
    mesh = Mesh(np.asarray(jax.devices()[: layout.num_parts]), (AXIS,))

    def step(table: dict[str, jax.Array], rows: jax.Array, gradients: jax.Array) -> Any:
        asked = AskedTable.of(rows, layout)
        (found,), rounds = fetched([asked], [table["rows"]])
        vectors = jnp.where(rows[:, None] < 0, 0, found[jnp.maximum(asked.wanted.places, 0)])
        own, number = gradients[asked.wanted.order], jnp.cumsum(asked.wanted.is_first) - 1
        sums = sums_of_runs(own, asked.wanted.is_first, number, in_a_tree=False)

        def take(entries: list[Entries], state: Any) -> Any:
            return update_named(state, entries[0], OPTIMIZER, jnp.float32(RATE), in_a_tree=False)

        return vectors, given([asked], [sums], take, dict(table)), rounds

    lying = {"rows": P(AXIS), "accumulator": P(AXIS)}
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(lying, P(AXIS), P(AXIS)), out_specs=(P(AXIS), lying, P()), check_vma=False
    )
    return jax.jit(mapped), NamedSharding(mesh, P(AXIS))


def run(layout: ShardLayout, *, margin: float) -> dict[str, Any]:
    """By kind: the largest errors of vectors, rows and slots, the rounds, and a digest of all bytes."""
    exchange.MARGIN, exchange.LEAST_ROOM = margin, 1 if margin < 1 else 8
    random = np.random.default_rng(5)
    values = random.normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    slots = layout.slots_of(np.arange(NUM_ROWS))
    (step, sharding), found = step_of(layout), {}
    for kind, ids in kinds(layout, random).items():
        gradients = random.normal(size=(len(ids), DIM)).astype(np.float32)
        held = {"rows": np.full((layout.num_slots, DIM), np.nan, np.float32)}
        held["accumulator"] = held["rows"].copy()
        held["rows"][slots], held["accumulator"][slots] = values, 0.1
        arguments = jax.device_put((held, ids.astype(np.int32), gradients), sharding)
        vectors, after, rounds = jax.device_get(step(*arguments))
        sums = np.zeros((NUM_ROWS, DIM))
        np.add.at(sums, ids[ids >= 0], gradients[ids >= 0].astype(np.float64))
        accumulator = 0.1 + sums**2
        rows = values - RATE * sums / np.sqrt(accumulator)
        expected = np.where(ids[:, None] < 0, 0, values[ids])
        found[kind] = {
            "vectors": float(np.abs(vectors - expected).max()),
            "rows": float(np.abs(after["rows"][slots] - rows).max()),
            "accumulator": float((np.abs(after["accumulator"][slots] - accumulator) / accumulator).max()),
            "rounds": int(rounds),
            "digest": hashlib.sha256(
                vectors.tobytes() + b"".join(after[name][slots].tobytes() for name in sorted(after))
            ).hexdigest(),
        }
    return found


def main() -> None:
    cases = [(1, 16), (3, 16), (8, 4), (8, 256)]
    if sys.argv[1] == "all":
        cases += [(2, 16), (4, 256), (5, 64), (7, 1)]
    results = {
        f"{num_parts} parts, {num_buckets} buckets": {
            str(margin): run(layout_of(num_parts, num_buckets), margin=margin) for margin in (1_000, 2, 0.1)
        }
        for num_parts, num_buckets in cases
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
