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
from podembed.embedding.shards import ShardedArray, ShardLayout
from podembed.workers.device.options import AXIS
from podembed.workers.device.tables.exchange import AskedArray, fetched, given
from podembed.workers.device.tables.updates import CHANGED, Entries, update_named

NUM_ROWS, DIM, IDS, RATE = 1_000, 4, 80, 0.3
TABLE = "table"
OPTIMIZER = Adagrad(RATE, 0.1)
WIDTHS = {"rows": DIM, "accumulator": DIM}


def array_of(num_parts: int, num_buckets: int) -> ShardedArray:
    """A small table and, behind it, the one that is tested."""
    return ShardedArray(
        {
            name: ShardLayout(table=BucketLayout(num_rows=num_rows, num_buckets=num_buckets), num_parts=num_parts)
            for name, num_rows in (("other", 300), (TABLE, NUM_ROWS))
        }
    )


def kinds(array: ShardedArray, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Ids of all devices, int32 `[num_parts * IDS]`."""
    size = array.num_parts * IDS
    mixed = random.integers(0, NUM_ROWS, size)
    mixed[random.random(size) < 0.2] = -1
    one_part = np.arange(NUM_ROWS)[array.slots_of(TABLE, np.arange(NUM_ROWS)) < array.rows_per_part]
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


def step_of(array: ShardedArray, level: int | None) -> Any:
    """A compiled lookup with the update after it."""
    none = jnp.full(1, -1, jnp.int32)
    mesh = Mesh(np.asarray(jax.devices()[: array.num_parts]), (AXIS,))

    def step(table: dict[str, jax.Array], rows: jax.Array, gradients: jax.Array) -> Any:
        asked = AskedArray.of({"other": none, TABLE: rows}, array, level=level)
        (found,), rounds = fetched([asked], [table["rows"]], [DIM])
        places = asked.wanted.places[len(none) :]
        vectors = jnp.where(rows[:, None] < 0, 0, found[jnp.maximum(places, 0)])
        gradients = jnp.concatenate([jnp.zeros((len(none), DIM)), gradients])
        sums = asked.wanted.sums(gradients, in_a_tree=False)

        def take(entries: list[Entries], state: Any) -> Any:
            return update_named(state, entries[0], OPTIMIZER, jnp.float32(RATE), widths=WIDTHS, in_a_tree=False)

        return vectors, given([asked], [sums], take, dict(table)), rounds

    lying = dict.fromkeys(("rows", "accumulator", CHANGED), P(AXIS))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(lying, P(AXIS), P(AXIS)), out_specs=(P(AXIS), lying, P()), check_vma=False
    )
    return jax.jit(mapped), NamedSharding(mesh, P(AXIS))


def run(array: ShardedArray, level: int | None) -> dict[str, Any]:
    """By kind: the largest errors of vectors, rows and slots, the rounds, and a digest of all bytes. Errors of slots
    are shares of what these would be, had no gradient cancelled another.
    """
    random = np.random.default_rng(5)
    values = random.normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    slots = array.slots_of(TABLE, np.arange(NUM_ROWS))
    (step, sharding), found = step_of(array, level), {}
    for kind, ids in kinds(array, random).items():
        gradients = random.normal(size=(len(ids), DIM)).astype(np.float32)
        held = {"rows": np.full((array.num_slots, DIM), np.nan, np.float32)}
        held["accumulator"], held[CHANGED] = held["rows"].copy(), np.zeros(array.num_slots, bool)
        held["rows"][slots], held["accumulator"][slots] = values, 0.1
        arguments = jax.device_put((held, ids.astype(np.int32), gradients), sharding)
        vectors, after, rounds = jax.device_get(step(*arguments))
        sums = np.zeros((NUM_ROWS, DIM))
        np.add.at(sums, ids[ids >= 0], gradients[ids >= 0].astype(np.float64))
        sizes = np.zeros((NUM_ROWS, DIM))
        np.add.at(sizes, ids[ids >= 0], np.abs(gradients[ids >= 0], dtype=np.float64))
        accumulator = 0.1 + sums**2
        rows = values - RATE * sums / np.sqrt(accumulator)
        expected = np.where(ids[:, None] < 0, 0, values[ids])
        found[kind] = {
            "vectors": float(np.abs(vectors - expected).max()),
            "rows": float(np.abs(after["rows"][slots] - rows).max()),
            "accumulator": float((np.abs(after["accumulator"][slots] - accumulator) / (0.1 + sizes**2)).max()),
            "changed": sorted({*ids[ids >= 0].tolist()}) == np.flatnonzero(after[CHANGED][slots]).tolist(),
            "rounds": int(rounds),
            "digest": hashlib.sha256(
                vectors.tobytes() + b"".join(after[name][slots].tobytes() for name in sorted(after))
            ).hexdigest(),
        }
    return found


def main() -> None:
    cases = [(3, 16), (8, 256)]
    if sys.argv[1] == "all":
        cases += [(1, 16), (8, 4), (2, 16), (4, 256), (5, 64), (7, 1)]
    results = {
        f"{num_parts} parts, {num_buckets} buckets": {
            name: run(array_of(num_parts, num_buckets), level)
            for name, level in (("all", 0), ("usual", None), ("least", 60))
        }
        for num_parts, num_buckets in cases
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
