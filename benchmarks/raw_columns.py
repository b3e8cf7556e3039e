"""CPU time of what becomes of one column: as it is, hashed, in buckets, crossed, with weights. Prints one JSON line.

    python benchmarks/raw_columns.py [--rows 1000000] [--rounds 7]

Each kind is a feature of a Parquet file that is read shuffled, as in training, on one thread. All take turns. It prints
nanoseconds of CPU a row, the median over the rounds, and their ratio to ids that are read as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import tune_allocator
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan

SIZE = 100_000
BATCH_SIZE, LANES = 4096, 4
HOUR = IdColumn("at", unit="h", since="midnight")
# By kind the feature, and the kind that it is compared with.
KINDS = {
    "single as it is": (IdColumn("item"), "single as it is"),
    "single hashed": (IdColumn("item", "hash"), "single as it is"),
    "text hashed": (IdColumn("word", "hash"), "single as it is"),
    "10 buckets": (IdColumn("price", boundaries=tuple(range(9))), "single as it is"),
    "hour of the day": (HOUR, "single as it is"),
    "two integers crossed": (IdColumn("item", crossed_with=("user",)), "single as it is"),
    "text, bucket and hour crossed": (
        IdColumn("word", crossed_with=(IdColumn("price", boundaries=tuple(range(9))), HOUR)),
        "single as it is",
    ),
    "bag as it is": (IdColumn("bag"), "bag as it is"),
    "bag with weights": (IdColumn("bag", weights="shares"), "bag as it is"),
    "bag crossed with an integer": (IdColumn("bag", crossed_with=("user",)), "bag as it is"),
}


def write(folder: Path, num_rows: int) -> str:
    """Bags have 0 to 10 ids."""
    random = np.random.default_rng(0)
    splits = np.concatenate([[0], np.cumsum(random.integers(0, 11, num_rows))]).astype(np.int32)
    bag = pa.array(random.integers(0, SIZE, splits[-1]))
    table = pa.table(
        {
            "y": np.zeros(num_rows, np.int8),
            "item": random.integers(0, SIZE, num_rows),
            "user": random.integers(0, 2**60, num_rows),
            "price": random.random(num_rows, np.float32) * 10,
            "at": pa.array(random.integers(0, 2**50, num_rows), pa.timestamp("us")),
            "word": pa.array([f"word-{number}" for number in random.integers(0, SIZE, num_rows)]),
            "bag": pa.ListArray.from_arrays(pa.array(splits), bag),
            "shares": pa.ListArray.from_arrays(pa.array(splits), pa.array(random.random(splits[-1], np.float32))),
        }
    )
    pq.write_table(table, folder / "part.parquet", row_group_size=32_768)
    return str(folder / "part.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of one column by what becomes of it.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    tune_allocator()
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), arguments.rows)
        readers = {}
        for kind, (source, _) in KINDS.items():
            data = ParquetData(path, label="y", features={"f": source}).resolved({"f": SIZE})
            index = build_index(data)
            plan = training_plan(index, num_lanes=LANES, batch_size=BATCH_SIZE, seed=0)
            readers[kind] = InputReader(data, index, plan, range(LANES)), plan.steps_per_epoch
        spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(arguments.rounds + 1):
            for kind, (reader, steps) in readers.items():
                start = time.process_time()
                for step in range(number * steps, (number + 1) * steps):
                    reader.read(step)
                spent[kind].append(time.process_time() - start)
    # The first round compiles.
    ns = {kind: 1e9 * statistics.median(rounds[1:]) / arguments.rows for kind, rounds in spent.items()}
    print(
        json.dumps(
            {
                "benchmark": "raw_columns",
                "cpu_ns_per_row": {kind: round(value) for kind, value in ns.items()},
                "ratio": {kind: round(ns[kind] / ns[beside], 2) for kind, (_, beside) in KINDS.items()},
                "load1": round(os.getloadavg()[0], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
