"""What grouping entries by row takes in each of its three ways, by rows an entry. Prints one JSON line.

    python benchmarks/grouping.py
    python benchmarks/grouping.py --entries 102400 --tables 10

Nanoseconds an entry, medians over rounds, with the Python around a call. Several tables take turns, and memory that
the caches hold is written over before each round, since a step does so, too. The limits between the ways in
`embedding/kernels/grouped.py` follow from it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks import measuring  # noqa: E402
from podembed.embedding.kernels import grouped, many_tables  # noqa: E402

BAG = 3
OTHER_BYTES = 48 << 20
# By way, the most rows an entry that are counted, and the fewest that are hashed.
WAYS = {"counted": (1 << 40, 1 << 40), "marked": (0, 1 << 40), "hashed": (0, 0)}


def measure(num_entries: int, num_rows: int, num_tables: int, num_rounds: int) -> dict[str, float]:
    """By way, nanoseconds an entry."""
    random, other = np.random.default_rng(0), np.zeros(OTHER_BYTES // 8)
    marks = [np.zeros(num_rows, np.int32) for _ in range(num_tables)]
    splits, seconds = np.arange(0, num_entries + 1, BAG), {name: [] for name in WAYS}
    for _ in range(num_rounds + 1):
        entries = [
            many_tables.BagLists.of([random.integers(0, num_rows, int(splits[-1]), np.int32)], [splits], [(64, 256)])
            for _ in range(num_tables)
        ]
        for name, (most_counted, fewest_hashed) in WAYS.items():
            grouped.ROWS_PER_COUNTED, grouped.ROWS_PER_HASHED = most_counted, fewest_hashed
            grouped.MOST_HASHED = 1 << 40
            other += 1
            began = time.thread_time()
            for of_table, own in zip(entries, marks, strict=True):
                many_tables.group_bags(of_table, own)
            seconds[name].append(time.thread_time() - began)
    # The first round compiles.
    each = 1e9 / (num_tables * num_entries)
    return {name: round(each * statistics.median(spent[1:]), 2) for name, spent in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=6_144, help="of a table in a step")
    parser.add_argument("--rows-an-entry", type=float, nargs="+", default=[0.1, 1, 4, 8, 32, 1024])
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    measuring.tune_allocator()
    found = [
        {
            "rows_an_entry": ratio,
            "ns": measure(arguments.entries, int(ratio * arguments.entries), arguments.tables, arguments.rounds),
        }
        for ratio in arguments.rows_an_entry
    ]
    line = {"benchmark": "grouping", "entries": arguments.entries, "tables": arguments.tables, "found": found}
    print(json.dumps(line | {"load1": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d")}))


if __name__ == "__main__":
    main()
