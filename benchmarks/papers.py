"""The jobs of papers on 1, 2 and 3 hosts, and over restarts with as many and with other hosts. A JSON line a job.

    python benchmarks/papers.py [--jobs sasrec hstu ...] [--steps 11]

Each job trains on generated ratings, or on its own generated set, a few epochs long. One host is this process; more are
processes of Ray. A run over a restart is cut in the middle of an epoch.

The losses of each step, the last metrics and the rows are set beside those of one host. On another number of hosts sums
are rounded in another order, so they differ a little. How much that grows in a few steps depends on the model. So one
more run of one host, `nudged`, begins with dense parameters that differ by the rounding of a float32.

A run that is cut and goes on as it was must end with the same bytes, or the program fails. It also fails where losses
differ by more than `--most` of themselves, and by more than ten times those of the nudged run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np

from podembed import (
    JobConfig,
    ModelBatch,
    ModelSpec,
    Result,
    RunConfig,
    ScalingConfig,
    SilentReporter,
    StepContext,
    Trainer,
    WithState,
)
from podembed.jobs.papers.mmoe import TwoTasksSpec, write_two_tasks
from podembed.orchestrator.cluster.connection import connected
from podembed.orchestrator.run.reference import open_commit
from podembed.tools.inspect.diff import RunDifference, diff
from podembed.workers.job.reference import JobReference

USERS, MOVIES, TASTES, LEAST, MOST = 120, 200, 5, 6, 20
_SEQUENCES = {"length": 10, "dim": 16, "batch_size": 32, "learning_rate": 0.01}
_PAIRS = {"batch_size": 256, "learning_rate": 0.01}

# By job, its arguments. Samples of an epoch fill several steps, the last one in part.
JOBS: dict[str, dict[str, Any]] = {
    "ncf": {"kind": "neumf", **_PAIRS},
    "mf": {"batch_size": 256},
    "fm": {"history_length": 10, **_PAIRS},
    "deepfm": {"history_length": 10, **_PAIRS},
    "bpr": _PAIRS,
    "two_tower": {"history_length": 10, **_PAIRS},
    "fism": {"history_length": 20, **_PAIRS},
    "din": {"length": 10, "negatives": 3, **_PAIRS},
    "sasrec": _SEQUENCES,
    "hstu": {"negatives": 2, **_SEQUENCES},
    "mmoe": {},
}
# Modules of jobs that have another name.
MODULES = {"bpr": "mf", "deepfm": "fm"}
# Jobs that learn the stars, and rank nothing.
RATERS = ("mf", "fm", "deepfm")
# The hosts of a run, one number after the other where it is cut in the middle.
RUNS = {"1": (1,), "nudged": (1,), "1 then 1": (1, 1), "2": (2,), "2 then 2": (2, 2), "3": (3,), "3 then 2": (3, 2)}
# These end as those without a cut.
SAME_BYTES = {"1 then 1": "1", "2 then 2": "2"}


# Half the distance of two float32 numbers near 1, and how much of it a run on other hosts may have.
NUDGE, TIMES_NUDGED = 2.0**-24, 10.0


@dataclass(frozen=True, slots=True)
class Nudged:
    """A model whose parameters begin a rounding apart from those of `model`."""

    model: Any

    def init(self, key: jax.Array, spec: ModelSpec) -> Any:
        made = self.model.init(key, spec)
        return WithState(nudged(made.value), made.state) if isinstance(made, WithState) else nudged(made)

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> Any:
        return self.model.apply(params, batch, context)

    @property
    def loss(self) -> Any:
        return getattr(self.model, "loss", None)


def nudged(params: Any) -> Any:
    """Each number times one more or less the nudge, by a random sign."""
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda x: x * (1 + NUDGE * jax.random.rademacher(next(keys), x.shape, x.dtype)), params)


def write_data(folder: Path) -> None:
    """Ratings of users with tastes, of whom some rate little, and a small set of two tasks."""
    rng = np.random.default_rng(0)
    lines = []
    for user in range(USERS):
        movies = rng.choice(MOVIES // TASTES, LEAST + user % (MOST - LEAST), replace=False) * TASTES + user % TASTES
        lines += [f"{user}\t{movie}\t{5 - 3 * (movie % 2)}\t{at}\n" for at, movie in enumerate(movies.tolist())]
    folder.mkdir()
    (folder / "u.data").write_text("".join(lines))
    write_two_tasks(folder / "two-tasks", TwoTasksSpec(train_rows=1_400, eval_rows=1_000, users=40, items=30))


def reference(name: str, data: Path) -> JobReference:
    where = {"folder": str(data / "two-tasks")}
    if name != "mmoe":
        where = {"data": str(data), "cache": str(data / "cache")}
        where |= {} if name in RATERS else {"candidates": 49}
    module = MODULES.get(name, name)
    return JobReference(function=f"podembed.jobs.papers.{module}:{name}", arguments={**where, **JOBS[name]})


def train(job: JobReference | JobConfig, folder: Path, name: str, *, hosts: Sequence[int], steps: int) -> Result:
    """A run of `steps`, cut once for each further number of hosts."""
    result = None
    for part, num_hosts in enumerate(hosts, start=1):
        result = Trainer(
            job,
            scaling_config=ScalingConfig(num_hosts=num_hosts, in_process=num_hosts == 1),
            run_config=RunConfig(storage_path=str(folder), name=name, max_steps=steps * part // len(hosts)),
            reporter=SilentReporter(),
        ).fit()
        if result.stopped_by is not None:
            sys.exit(f"stopped by {result.stopped_by}")
    assert result is not None
    return result


def largest(one: Mapping[Any, float], other: Mapping[Any, float], *, is_relative: bool) -> float:
    """The largest difference among the keys of `other`; not finite if one of them is not."""
    return max(abs(one[key] - other[key]) / (abs(one[key]) if is_relative else 1.0) for key in other)


def rows_apart(found: RunDifference) -> float:
    """The largest difference of a number in a table, its slots included."""
    return max((array.max_abs for table in found.tables for array in table.arrays), default=0.0)


def compared(name: str, data: Path, folder: Path, *, steps: int) -> dict[str, Any]:
    """One job in all its runs."""
    job = reference(name, data)
    moved = replace(job.resolve(), model=Nudged(job.resolve().model))
    results = {
        run: train(
            moved if run == "nudged" else job, folder, f"{name}-{run.replace(' ', '-')}", hosts=hosts, steps=steps
        )
        for run, hosts in RUNS.items()
    }
    commits = {run: open_commit(result.path) for run, result in results.items()}
    one = results["1"]
    beside: dict[str, dict[str, float]] = {}
    for run, result in results.items():
        if run == "1":
            continue
        figures = result.evaluations[-1].values
        beside[run] = {
            "steps": len(result.losses),
            "loss": largest(one.losses, result.losses, is_relative=True),
            "metrics": largest(one.evaluations[-1].values, figures, is_relative=False),
            "rows": rows_apart(diff(commits["1"], commits[run])),
        }
    return {
        "job": name,
        "steps": len(one.losses),
        "metrics": one.evaluations[-1].values,
        "to_one_host": beside,
        "same_bytes": {run: diff(commits[run], commits[whole]).is_equal for run, whole in SAME_BYTES.items()},
    }


def is_met(found: Mapping[str, Any], *, most: float) -> bool:
    """Whether bytes are equal, and losses as near as rounding lets them be.

    Args:
      most: relative difference of losses that no nudged run has to explain.
    """
    losses = {run: beside["loss"] for run, beside in found["to_one_host"].items()}
    limit = max(most, TIMES_NUDGED * losses.pop("nudged"))
    return max(losses.values()) <= limit and all(found["same_bytes"].values())


def rounded(value: Any) -> Any:
    """Three digits of each number."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--most", type=float, default=1e-6)
    given = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as name, connected(num_hosts=3):
        folder = Path(name)
        write_data(folder / "data")
        for job in given.jobs:
            started = time.perf_counter()
            found = compared(job, folder / "data", folder / "runs", steps=given.steps)
            found |= {"is_met": is_met(found, most=given.most), "seconds": time.perf_counter() - started}
            missed += not found["is_met"]
            print(json.dumps(rounded(found)), flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    os.environ.setdefault("PJRT_NPROC", "1")
    main()
