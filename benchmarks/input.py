"""CPU time of reading workload A from Parquet, beside bare pyarrow reading the same columns. Prints one JSON line.

    python benchmarks/input.py [--lanes 16] [--rows-per-group 32768] [--rounds 10] [--compression snappy] [--ragged]

Both read the same number of rows on one thread, with the memory settings of worker processes. They take turns, and the
other one is first in every second round. Bare pyarrow reads a row group at a time in file order, and nothing more. Ours
reads the batches of a training run: shuffled, checked and put together. Files are in the page cache. CPU seconds of the
whole process count; the median over the rounds is printed. A round is a whole number of row groups of every lane, so
each row group is decoded once. At the ends of an epoch a run decodes one row group more per lane.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import tune_allocator
from benchmarks.workload import NUM_DENSE, Batches, Workload, make_batches, workload
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan

GROUPS_PER_FILE = 4
DENSE = tuple(f"i{at}" for at in range(NUM_DENSE))


def write_files(
    folder: Path,
    shape: Workload,
    batches: Batches,
    *,
    rows_per_group: int,
    num_groups: int,
    compression: str,
    is_ragged: bool = False,
) -> str:
    """One file of samples, and further names for it; the glob of all.

    Args:
      batches: of at least `GROUPS_PER_FILE` row groups.
      is_ragged: bags have 5 to 15 ids and not all 10.
    """
    num_rows = GROUPS_PER_FILE * rows_per_group
    columns = {"label": pa.array(batches.labels.reshape(-1)[:num_rows])}
    dense = batches.dense.reshape(-1, NUM_DENSE)[:num_rows]
    columns |= {name: pa.array(np.ascontiguousarray(dense[:, at])) for at, name in enumerate(DENSE)}
    for at, (ids, bag_length) in enumerate(zip(batches.ids, shape.bag_lengths, strict=True)):
        values = pa.array(ids.reshape(-1)[: num_rows * bag_length])
        offsets = np.arange(num_rows + 1) * bag_length
        if is_ragged:
            lengths = np.random.default_rng(at).integers(bag_length // 2, bag_length * 3 // 2 + 1, num_rows)
            offsets = np.minimum(np.cumsum([0, *lengths]), len(values))
        columns[f"c{at}"] = (
            values if bag_length == 1 else pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
        )
    first = folder / "part-000.parquet"
    pq.write_table(pa.table(columns), first, row_group_size=rows_per_group, compression=compression)
    for number in range(1, -(-num_groups // GROUPS_PER_FILE)):
        os.link(first, folder / f"part-{number:03d}.parquet")
    return str(folder / "part-*.parquet")


class Bare:
    """pyarrow alone."""

    def __init__(self, data: ParquetData) -> None:
        self._files = sorted(Path(data.paths[0]).parent.glob("*.parquet"))
        self._columns = list(data.columns)
        self._at = 0

    def read(self, num_groups: int) -> None:
        for _ in range(num_groups):
            number, group = divmod(self._at, GROUPS_PER_FILE)
            if group == 0:
                self._file = pq.ParquetFile(self._files[number % len(self._files)])
            self._file.read_row_group(group, columns=self._columns, use_threads=False)
            self._at += 1


def spend(work: Callable[[], None]) -> tuple[float, float, int]:
    """CPU and wall seconds, and page faults."""
    cpu, wall = time.process_time(), time.perf_counter()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return time.process_time() - cpu, time.perf_counter() - wall, faults


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of input beside bare pyarrow.")
    parser.add_argument("--lanes", type=int, default=16, help="lanes that the one host reads, dividing 4096")
    parser.add_argument("--rows-per-group", type=int, default=32_768, help="a multiple of 4096")
    parser.add_argument("--ragged", action="store_true", help="bags of 5 to 15 ids instead of 10")
    parser.add_argument("--rounds", type=int, default=10, help="pairs that are measured")
    parser.add_argument("--compression", default="snappy", help="of the Parquet files")
    arguments = parser.parse_args()
    tune_allocator()
    shape = workload("A")
    rows_per_round = arguments.lanes * arguments.rows_per_group
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(
            Path(folder),
            shape,
            make_batches(shape, -(-GROUPS_PER_FILE * arguments.rows_per_group // shape.batch_size)),
            rows_per_group=arguments.rows_per_group,
            num_groups=arguments.lanes * (arguments.rounds + 3),
            compression=arguments.compression,
            is_ragged=arguments.ragged,
        )
        data = ParquetData(
            paths,
            label="label",
            dense=DENSE,
            features={f"c{at}": IdColumn(f"c{at}", vocabulary_size=rows) for at, rows in enumerate(shape.table_rows)},
        )
        index = build_index(data)
        plan = training_plan(index, num_lanes=arguments.lanes, batch_size=shape.batch_size, seed=0)
        reader, bare = InputReader(data, index, plan, range(arguments.lanes)), Bare(data)
        steps = rows_per_round // shape.batch_size

        def ours(first_step: int) -> None:
            for step in range(first_step, first_step + steps):
                reader.read(step)

        ours(0)
        bare.read(arguments.lanes)
        pairs = []
        for at in range(arguments.rounds):
            work = [lambda: bare.read(arguments.lanes), lambda at=at: ours((at + 1) * steps)]
            # Whoever begins finds other caches and clocks; each does as often.
            spent = [spend(each) for each in (work if at % 2 == 0 else work[::-1])]
            pairs.append(tuple(spent if at % 2 == 0 else spent[::-1]))
        reader.close()
    ratios = [ours[0] / bare[0] for bare, ours in pairs]
    print(
        json.dumps(
            {
                "benchmark": "input",
                "lanes": arguments.lanes,
                "rows_per_group": arguments.rows_per_group,
                "compression": arguments.compression,
                "ragged": arguments.ragged,
                "cpu_ratio_to_pyarrow": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
                "cpu_us_per_sample": round(1e6 * statistics.median(ours[0] for _, ours in pairs) / rows_per_round, 3),
                "pyarrow_cpu_us_per_sample": round(
                    1e6 * statistics.median(bare[0] for bare, _ in pairs) / rows_per_round, 3
                ),
                "page_faults_per_row_group": round(
                    statistics.median(ours[2] for _, ours in pairs) / arguments.lanes, 1
                ),
                "pyarrow_page_faults_per_row_group": round(
                    statistics.median(bare[2] for bare, _ in pairs) / arguments.lanes, 1
                ),
                "load1": round(os.getloadavg()[0], 2),
                "samples_per_s": round(rows_per_round / statistics.median(ours[1] for _, ours in pairs)),
            }
        )
    )


if __name__ == "__main__":
    main()
