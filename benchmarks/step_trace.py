"""Which of our files and functions one step of training passes, on one host in one process. Prints one JSON line.

    python benchmarks/step_trace.py

A small job trains in this process, and calls of functions in all threads are noted. A function belongs to a steady step
if it is called in most steps. So what a window or a second costs is left out. The reader has read all rows
before. The job looks up ahead in every step, where others choose that anew from time to time. Python calls lambdas and
generators as functions, and before 3.12 comprehensions.

Functions stand in the order of their first call, in the run's first step. So they show the walk of a batch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
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

HOME = f"{Path(podembed.__file__).parent}{os.sep}"
BATCH_SIZE, NUM_STEPS, DIM = 64, 60, 8
NUM_ROWS = 2 * NUM_STEPS * BATCH_SIZE
# The first ones compile. Hosts run ahead of devices, so what is called once a step is not called between all callbacks.
SKIPPED_STEPS, SHARE_OF_STEPS = 5, 0.5


class Calls(SilentReporter):
    """Notes the steps in which each of our functions is called.

    Threads: those that it profiles add to entries of their own. The one that computes steps moves `step`.
    """

    def __init__(self) -> None:
        self.step = 0
        self._steps: dict[tuple[int, CodeType], set[int]] = {}
        self._has_begun = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            self._steps.setdefault((threading.get_ident(), frame.f_code), set()).add(self.step)

    def event(self, event: Any) -> None:
        # What is called before the first step is no part of it, and would come first.
        if not self._has_begun:
            self._steps.clear()

    def window(self, report: WindowReport) -> None:
        self._has_begun = True

    def next_step(self) -> np.float32:
        self.step += 1
        return np.float32(0.0)

    def steady(self) -> list[tuple[str, str]]:
        """File and function of all that is called in most steps, in the order of the first step."""
        found: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        for (_, code), steps in self._steps.items():
            found[code.co_filename.removeprefix(HOME), code.co_qualname] |= steps
        counted = range(SKIPPED_STEPS, self.step)
        return [one for one, steps in found.items() if len(steps & {*counted}) >= SHARE_OF_STEPS * len(counted)]


class SteppedModel:
    """A sum of all values, of which nearly nothing is compiled. Tells `calls` of each step."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(())}

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        total = params["scale"] * sum(jnp.mean(values, axis=1) for values in (dense, *activations.values()))
        return total + jax.pure_callback(self._calls.next_step, jax.ShapeDtypeStruct((), jnp.float32))


def write_data(folder: str) -> None:
    rng = np.random.default_rng(0)
    bags = pa.FixedSizeListArray.from_arrays(pa.array(rng.integers(0, 500, 3 * NUM_ROWS)), 3)
    columns: dict[str, Any] = {
        "label": rng.integers(0, 2, NUM_ROWS).astype(np.int8),
        "x": rng.standard_normal(NUM_ROWS).astype(np.float32),
        "user": rng.integers(0, 20_000, NUM_ROWS),
        "item": rng.integers(0, 500, NUM_ROWS),
        "history": bags.cast(pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), f"{folder}/rows.parquet", row_group_size=BATCH_SIZE)


def job(folder: str, calls: Calls) -> JobConfig:
    """Single ids, and a bag that shares a table."""
    users = TableConfig(20_000, DIM, combiner="sum", name="users")
    items = TableConfig(500, DIM, combiner="mean", name="items")
    return JobConfig(
        name="traced",
        features={"user": FeatureConfig(users), "item": FeatureConfig(items), "history": FeatureConfig(items)},
        model=SteppedModel(calls),
        data=ParquetData(f"{folder}/rows.parquet", label="label", dense=("x",)),
        batch_size=BATCH_SIZE,
        overlap=True,
        optimizer=RowWiseAdagrad(0.05),
        dense_optimizer=optax.adam(1e-3),
    )


def trace() -> list[tuple[str, str]]:
    """File and function of all that a steady step calls."""
    calls = Calls()
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder)
        trainer = Trainer(
            job(folder, calls),
            scaling_config=ScalingConfig(in_process=True, threads_per_host=1),
            run_config=RunConfig(
                name="run",
                storage_path=folder,
                max_steps=NUM_STEPS,
                checkpoint_config=CheckpointConfig(every_steps=NUM_ROWS),
            ),
            reporter=calls,
        )
        threading.setprofile(calls)
        sys.setprofile(calls)
        try:
            trainer.fit()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return calls.steady()


def main() -> None:
    found = trace()
    files = list(dict.fromkeys(file for file, _ in found))
    functions = [f"{file}:{function}" for file, function in found]
    print(json.dumps({"benchmark": "step_trace", "files": files, "functions": functions}), flush=True)


if __name__ == "__main__":
    main()
