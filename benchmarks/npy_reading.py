"""Reading `.npy` blocks by their range of bytes, as `NpyData` does, beside slices of a memory map. Prints one JSON
line.

    python benchmarks/npy_reading.py [--rows 4000000] [--columns 26] [--rounds 9]

Both read a sparse array of int32 block by block and take every column of a block apart, in turns. The file is in the
page cache. A map is opened anew for every round, as for every file of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from podembed.workers.data.config import ROWS_PER_BLOCK
from podembed.workers.data.files import open_ranges
from podembed.workers.formats.npy import read_header, read_rows


def by_range(path: str) -> None:
    with open_ranges(path) as file:
        header = read_header("sparse", path, file)
        for first in range(0, header.num_rows, ROWS_PER_BLOCK):
            take_apart(read_rows(header, file, first, min(ROWS_PER_BLOCK, header.num_rows - first)))


def by_map(path: str) -> None:
    rows = np.load(path, mmap_mode="r", allow_pickle=False)
    for first in range(0, len(rows), ROWS_PER_BLOCK):
        take_apart(rows[first : first + ROWS_PER_BLOCK])


def take_apart(rows: np.ndarray) -> None:
    for at in range(rows.shape[1]):
        np.ascontiguousarray(rows[:, at])


def cpu_s(work: Callable[[str], None], path: str) -> float:
    begun = time.process_time()
    work(path)
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--columns", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "day_0_sparse.npy"))
        np.save(path, np.arange(arguments.rows * arguments.columns, dtype=np.int32).reshape(-1, arguments.columns))
        cpu_s(by_range, path), cpu_s(by_map, path)
        pairs = []
        for at in range(arguments.rounds):
            order = (by_range, by_map) if at % 2 == 0 else (by_map, by_range)
            spent = {work: cpu_s(work, path) for work in order}
            pairs.append((spent[by_range], spent[by_map]))
    print(
        json.dumps(
            {
                "benchmark": "npy_reading",
                "rows": arguments.rows,
                "columns": arguments.columns,
                "range_to_map_cpu_ratio": round(statistics.median(ours / theirs for ours, theirs in pairs), 3),
                "range_cpu_ns_per_row": round(1e9 * statistics.median(ours for ours, _ in pairs) / arguments.rows, 1),
                "map_cpu_ns_per_row": round(1e9 * statistics.median(theirs for _, theirs in pairs) / arguments.rows, 1),
                "load1": round(os.getloadavg()[0], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
