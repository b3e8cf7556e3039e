"""Writing files of a save past the page cache beside writing them through it: rates and processor time. Prints one JSON
line.

    python benchmarks/file_writes.py --file-mib 4 --mib 256 --rounds 4

Four threads write, as in a save, and files are synced in batches. Rounds take turns. Processor time is that of this
process, without what the kernel's own threads take later.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from podembed.workers.checkpoint.file_threads import NUM_THREADS, SYNC_BYTES  # noqa: E402
from podembed.workers.storage.direct import DirectWrites  # noqa: E402
from podembed.workers.storage.local import LocalFiles, Unsynced  # noqa: E402


def write_files(folder: str, data: memoryview, *, count: int, writes: DirectWrites) -> tuple[float, float]:
    """Returns MB/s, and processor ns a byte."""
    files = LocalFiles(folder, direct=writes)
    per_batch = max(1, SYNC_BYTES // len(data))

    def write_batch(first: int) -> None:
        unsynced = Unsynced()
        with files.sync_later(unsynced):
            for number in range(first, min(first + per_batch, count)):
                files.write_new(f"data/{number}", [data[:-4], data[-4:]])
        files.sync(unsynced)

    cpu_s, began_s = time.process_time(), time.monotonic()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(write_batch, range(0, count, per_batch)))
    size_bytes = count * len(data)
    return size_bytes / (time.monotonic() - began_s) / 1e6, (time.process_time() - cpu_s) / size_bytes * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file-mib", type=float, default=4.0)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", help="where to write; a new folder below it is made and removed")
    arguments = parser.parse_args()
    data = np.random.default_rng(0).integers(0, 256, int(arguments.file_mib * (1 << 20)), np.uint8).data
    count = max(1, (arguments.mib << 20) // len(data))
    ways = {"page cache": DirectWrites(flag=0), "direct": DirectWrites()}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way in [*ways][:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                found[way].append(write_files(folder, data, count=count, writes=ways[way]))
    line = {
        "benchmark": "file_writes",
        "file_mib": arguments.file_mib,
        "files": count,
        "rounds": arguments.rounds,
        "takes_direct_writes": ways["direct"].is_possible,
        **{
            way: {
                "mb_per_s": round(statistics.median(rate for rate, _ in rounds), 1),
                "cpu_ns_per_byte": round(statistics.median(cost for _, cost in rounds), 3),
            }
            for way, rounds in found.items()
        },
        "load1": round(os.getloadavg()[0], 2),
        "date": date.today().isoformat(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
