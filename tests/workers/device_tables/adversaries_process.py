"""Runs on awkward ids with all tables on hosts and with all cut over devices of the processor: eight with `all`, four
with `few`. Prints JSON: by kind of ids the largest differences of losses and of committed arrays, and the most rounds
of a step.

With `cores`, devices are as if they had SparseCores, which have room for few rows in a round.

Usage: python -m tests.workers.device_tables.adversaries_process FOLDER few|all|cores
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 if sys.argv[2] == 'all' else 4}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.orchestrator.api.result import Result
from podembed.tools.metrics.reading import StreamReader
from podembed.workers.device.tables import sparse_cores
from podembed.workers.storage.store import Store
from tests.run_state import committed_state
from tests.workers.device_tables import jobs
from tests.workers.device_tables.emulated_cores import emulate
from tests.workers.device_tables.jobs import NUM_ROWS, SIZES, train

ALL = [*SIZES]
KINDS = [
    "a sample of 10,000 ids",
    "all ids equal",
    "all ids on one device",
    "batches without ids",
    "a batch smaller than the number of devices",
]
# An epoch.
NUM_STEPS = 10
BATCH_SIZES = {"a batch smaller than the number of devices": 4}


def bags_of(kind: str, size: int, random: np.random.Generator) -> list[list[int]]:
    """A bag for each sample."""
    bags = [random.integers(0, size, n).tolist() for n in random.integers(0, 4, NUM_ROWS)]
    if kind == "all ids equal":
        return [[size // 2] * 3] * NUM_ROWS
    if kind == "all ids on one device":
        # Its buckets come first.
        num_buckets = min(256, 1 << (size - 1).bit_length())
        return [(random.integers(0, max(1, size // num_buckets), 3) * num_buckets).tolist() for _ in bags]
    if kind == "a sample of 10,000 ids":
        bags[100] = random.integers(0, size, 10_000).tolist()
    if kind == "batches without ids":
        bags[: NUM_ROWS // 2] = [[]] * (NUM_ROWS // 2)
    return bags


def write(folder: Path, kind: str) -> None:
    random = np.random.default_rng(11)
    columns: dict[str, Any] = {
        "label": random.integers(0, 2, NUM_ROWS).astype(np.float32),
        "x": random.standard_normal(NUM_ROWS, np.float32),
    }
    for name, size in SIZES.items():
        columns[f"{name}_bag"] = pa.array(bags_of(kind, size, random), pa.list_(pa.int64()))
        columns[f"{name}_id"] = [bag[0] if bag else 0 for bag in bags_of(kind, size, random)]
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=16)


def compared(found: Result, expected: Result) -> dict[str, float]:
    arrays, others = committed_state(found.path), committed_state(expected.path)
    assert arrays.keys() == others.keys()
    windows = StreamReader(Store(found.path)).read().windows
    return {
        "losses": max(abs(found.losses[step] / loss - 1) for step, loss in expected.losses.items()),
        # Of the size of the largest number, since sums of numbers of both signs may be as small as their errors.
        "arrays": max(
            float(np.abs(arrays[name] - values).max() / np.abs(values).max()) for name, values in others.items()
        ),
        "rounds": max(point.value("exchange_rounds") or 0 for point in windows),
    }


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    if sys.argv[2] == "cores":
        emulate()
        sparse_cores.MOST_ROWS = 8
    for kind in KINDS[: 1 if sys.argv[2] == "few" else None]:
        jobs.BATCH_SIZE = BATCH_SIZES.get(kind, 40)
        rows = folder / kind.replace(" ", "-") / "rows"
        write(rows, kind)
        given: dict[str, Any] = {"devices_per_host": jax.device_count(), "max_steps": NUM_STEPS}
        expected = train(rows, rows.parent, "hosts", **given)
        given["sparse_cores"] = sys.argv[2] == "cores"
        found[kind] = compared(train(rows, rows.parent, "sharded", sharded=ALL, **given), expected)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
