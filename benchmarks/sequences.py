"""Steps of DIN on histories of one length, of lengths spread tenfold, and padded to a maximum. Prints one JSON line.

    python benchmarks/sequences.py [--pairs 5] [--steps 80] [--mean 50] [--samples 256]

All runs are in this process, and those that are compared take turns. Spread lengths are even in their logarithm, from
the mean's root of ten below to as much above, and then scaled to the same mean. A step counts from its begin to that
of the next one. Steps that compile are left out, and their programs are counted.

The second comparison declares a maximum of 4,096 (`--longest`) for histories of the same mean. It sets what is done by
real length against the same model on the padded form. On the hosts both look up real lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import machine_cpu_s, tune_allocator
from podembed import (
    FeatureConfig,
    Jagged,
    JobConfig,
    ModelBatch,
    ParquetData,
    RunConfig,
    ScalingConfig,
    SilentReporter,
    StepContext,
    TableConfig,
    Trainer,
)
from podembed.jobs.models import DIN
from podembed.workers.device.step_programs import StepPrograms
from podembed.workers.job.padding import PaddingLevels

DIM, NUM_ITEMS = 16, 100_000
# The first steps of a run fill caches and queues.
SKIPPED_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedDIN:
    """DIN on histories that are padded to the declared maximum."""

    din: DIN

    def init(self, key: Any, spec: Any) -> Any:
        return self.din.init(key, spec)

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> Any:
        name = self.din.history
        padded = Jagged.of_padded(batch.activations[name], batch.lengths[name])
        return self.din.apply(params, replace(batch, sequences={name: padded}), context)


def write_rows(folder: Path, lengths: np.ndarray) -> str:
    """A Parquet file with a history of each length, and items and labels beside them."""
    rng = np.random.default_rng(1)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    columns = {
        "label": (rng.random(len(lengths)) < 0.5).astype(np.float32),
        "item": rng.integers(0, NUM_ITEMS, len(lengths)),
        "history": pa.ListArray.from_arrays(offsets, pa.array(rng.integers(0, NUM_ITEMS, lengths.sum()))),
    }
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=4096)
    return str(folder / "*.parquet")


def spread(num_rows: int, mean: int) -> np.ndarray:
    found = 10 ** np.random.default_rng(0).uniform(-0.5, 0.5, num_rows)
    return np.maximum(1, np.round(found * mean / found.mean())).astype(np.int64)


def run(data: str, folder: Path, *, samples: int, longest: int, is_padded: bool = False) -> tuple[float, int]:
    """Milliseconds of a mean step, and how many programs were compiled in the middle."""
    items, din = TableConfig(NUM_ITEMS, DIM, combiner="sum", name="items"), DIN(target="item", history="history")
    job = JobConfig(
        name="sequences",
        features={"item": FeatureConfig(items), "history": FeatureConfig(items, max_sequence_length=longest)},
        model=PaddedDIN(din=din) if is_padded else din,
        data=ParquetData(data, label="label"),
        batch_size=samples,
        num_lanes=4,
    )
    begins: list[float] = []
    compiled: list[int] = []
    train = StepPrograms.train

    def timed(programs: StepPrograms, levels: PaddingLevels) -> Any:
        begins.append(time.perf_counter())
        found = train(programs, levels)
        compiled.append(programs.num_late)
        return found

    StepPrograms.train = timed  # type: ignore[method-assign]
    try:
        Trainer(
            job,
            scaling_config=ScalingConfig(in_process=True),
            run_config=RunConfig(storage_path=str(folder), name=f"run-{time.time_ns()}"),
            reporter=SilentReporter(),
        ).fit()
    finally:
        StepPrograms.train = train  # type: ignore[method-assign]
    counts = np.diff(np.concatenate([[0], compiled]))[:-1] == 0
    counts[:SKIPPED_STEPS] = False
    return float(np.diff(begins)[counts].mean() * 1e3), compiled[-1]


def compared(first: Any, second: Any, pairs: int) -> dict[str, Any]:
    """Two runs in turns: the ratio of the second to the first, its spread, and milliseconds of each."""
    times: list[tuple[float, float]] = []
    programs: list[tuple[int, int]] = []
    for at in range(pairs):
        order = (first, second) if at % 2 == 0 else (second, first)
        (a, more), (b, others) = [one() for one in order][:: 1 if at % 2 == 0 else -1]
        times.append((a, b))
        programs.append((more, others))
    ratios = sorted(b / a for a, b in times)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
        "step_ms": [round(statistics.median(column), 2) for column in zip(*times, strict=True)],
        "programs": programs[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--mean", type=int, default=50)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--longest", type=int, default=4096)
    given = parser.parse_args()
    tune_allocator()
    before_s, started = machine_cpu_s(), time.perf_counter()
    own_s = sum(os.times()[:2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = given.samples * given.steps
        constant = write_rows(folder / "constant", np.full(rows, given.mean))
        varied = write_rows(folder / "spread", spread(rows, given.mean))
        few = write_rows(folder / "few", spread(given.samples * (SKIPPED_STEPS + 10), given.mean))
        shape: dict[str, Any] = {"samples": given.samples, "longest": 5 * given.mean}
        found = {
            "spread_to_constant": compared(
                lambda: run(constant, folder, **shape), lambda: run(varied, folder, **shape), given.pairs
            )
        }
        shape["longest"] = given.longest
        found[f"padded_to_real_of_{given.longest}"] = compared(
            lambda: run(few, folder, **shape),
            lambda: run(few, folder, is_padded=True, **shape),
            max(1, given.pairs // 2),
        )
    seconds = time.perf_counter() - started
    others = (machine_cpu_s() - before_s - (sum(os.times()[:2]) - own_s)) / seconds
    print(json.dumps({**found, "other_cpus_busy": round(max(0.0, others), 2)}))


if __name__ == "__main__":
    main()
