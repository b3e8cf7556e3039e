"""Which of our files and functions one step of training passes, on one host in one process. Prints one JSON line.

    python benchmarks/step_trace.py

A small job trains in this process, and every call of a function in any thread is counted. A function belongs to a
steady step if it is called about once a step or more, without a commit or an evaluation in between. So what a window or
a second costs is left out. Row groups are as long as batches, so reading and decoding is a part of each step. Functions
without a name (lambdas, comprehensions) are not counted: newer versions of Python do not call all of them.

Functions stand in the order of their first call, in the run's first step. So they show the walk of a batch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

import podembed
from podembed import (
    CheckpointConfig,
    FeatureConfig,
    JobConfig,
    ParquetData,
    RunConfig,
    ScalingConfig,
    SilentReporter,
    TableConfig,
    Trainer,
    WindowReport,
)
from podembed.embedding import RowWiseAdagrad
from podembed.jobs.models import DLRM

HOME = f"{Path(podembed.__file__).parent}{os.sep}"
BATCH_SIZE, NUM_STEPS, DIM = 64, 60, 8
NUM_ROWS = 2 * NUM_STEPS * BATCH_SIZE
# What reads ahead does not stand at the same place at the end of the steps that count and before them.
SHARE_OF_STEPS = 0.8


class Calls:
    """Counts calls of our functions. Mutated by the threads that it profiles, each of which has entries of its own."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, CodeType], int] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            key = threading.get_ident(), frame.f_code
            self._counts[key] = self._counts.get(key, 0) + 1

    def forget(self) -> None:
        self._counts.clear()

    def now(self) -> Counter[tuple[str, str]]:
        """Calls so far by file and function, in the order of the first ones."""
        found: Counter[tuple[str, str]] = Counter()
        for (_, code), count in list(self._counts.items()):
            found[code.co_filename.removeprefix(HOME), code.co_qualname] += count
        return found


class Windows(SilentReporter):
    """Keeps what was called up to the end of each window."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.ends: list[tuple[int, Counter[tuple[str, str]]]] = []

    def event(self, event: Any) -> None:
        # What is called before the first step is no part of it, and would come first.
        if not self.ends:
            self._calls.forget()

    def window(self, report: WindowReport) -> None:
        self.ends.append((report.step, self._calls.now()))


def write_data(folder: str) -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "label": rng.integers(0, 2, NUM_ROWS).astype(np.int8),
        "x": rng.standard_normal(NUM_ROWS).astype(np.float32),
        "user": rng.integers(0, 20_000, NUM_ROWS),
        "item": rng.integers(0, 500, NUM_ROWS),
        "history": pa.array([rng.integers(0, 500, n).tolist() for n in rng.integers(0, 5, NUM_ROWS)]),
    }
    pq.write_table(pa.table(columns), f"{folder}/rows.parquet", row_group_size=BATCH_SIZE)


def job(folder: str) -> JobConfig:
    """Single ids, and a bag that shares a table."""
    users = TableConfig(20_000, DIM, combiner="sum", name="users")
    items = TableConfig(500, DIM, combiner="mean", name="items")
    return JobConfig(
        name="traced",
        features={"user": FeatureConfig(users), "item": FeatureConfig(items), "history": FeatureConfig(items)},
        model=DLRM(),
        data=ParquetData(f"{folder}/rows.parquet", label="label", dense=("x",)),
        batch_size=BATCH_SIZE,
        optimizer=RowWiseAdagrad(0.05),
        dense_optimizer=optax.adam(1e-3),
    )


def trace() -> list[tuple[str, str]]:
    """File and function of all that a steady step calls, in the order of the first step."""
    calls = Calls()
    windows = Windows(calls)
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder)
        threading.setprofile(calls)
        sys.setprofile(calls)
        try:
            Trainer(
                job(folder),
                scaling_config=ScalingConfig(in_process=True, threads_per_host=1),
                run_config=RunConfig(
                    name="run",
                    storage_path=folder,
                    max_steps=NUM_STEPS,
                    checkpoint_config=CheckpointConfig(every_steps=NUM_ROWS),
                ),
                reporter=windows,
            ).fit()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    # The first window, of one step, compiles. The commit at the end comes after the last one.
    (first, before), *_, (last, after) = windows.ends
    least = SHARE_OF_STEPS * (last - first)
    return [one for one in after if after[one] - before[one] >= least and not one[1].endswith(">")]


def main() -> None:
    found = trace()
    files = list(dict.fromkeys(file for file, _ in found))
    functions = [f"{file}:{function}" for file, function in found]
    print(json.dumps({"benchmark": "step_trace", "files": files, "functions": functions}), flush=True)


if __name__ == "__main__":
    main()
