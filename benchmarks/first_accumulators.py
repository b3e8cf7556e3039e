"""Row optimizers side by side on the jobs that come with the program and on the smallest job of docs/write-a-job.md.
Prints one JSON line: by job and optimizer, the figures of the last evaluation.

    python benchmarks/first_accumulators.py --data ml-latest-small --jobs smallest synthetic movielens
    python benchmarks/first_accumulators.py --jobs smallest --batch-size 8192 --optimizers "Adagrad(0.05)"

`own` is what the job declares itself. The default of a job was chosen by these figures. What decides is how the first
accumulator compares with the squares of gradients, which are those of a mean over the batch: small, and smaller the
larger the batch. The data of `smallest` is drawn so that the best reachable AUC is known: 200,000 rows, 2,000 items of
100,000, and a click by sigmoid(bias[item]).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed import JobConfig, RunConfig, ScalingConfig, SilentReporter, Trainer, embedding
from podembed.jobs.built_in import BUILT_IN_JOBS, RATINGS_JOBS
from podembed.workers.job.quality import area_under_curve
from podembed.workers.job.reference import JobReference

PAGE = Path(__file__).parents[1] / "docs" / "write-a-job.md"
OWN = "own"
SMALLEST, EPOCHS = "smallest", 3
OPTIMIZERS = (
    OWN,
    *(f"Adagrad(0.05, {value:g})" for value in (1e-1, 1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10)),
    "RowWiseAdagrad(0.05)",
)


def smallest(folder: Path) -> tuple[JobConfig, float]:
    """The first block of the page as it stands there, over files in `folder`, and the AUC of the truth."""
    random = np.random.default_rng(0)
    items, bias = random.choice(100_000, 2_000, replace=False), random.normal(0, 1.5, 2_000)
    reachable = 0.0
    for name, count in (("train", 200_000), ("eval", 20_000)):
        chosen = random.integers(0, len(items), count)
        clicks = random.random(count) < 1 / (1 + np.exp(-bias[chosen]))
        numbers = {column: random.random(count, np.float32) for column in ("price", "age")}
        columns = {"click": clicks.astype(np.int8), "item": items[chosen], **numbers}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=10_000)
        reachable = area_under_curve(bias[chosen], clicks)
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    job = names["job"]()
    data = replace(job.data, paths=(f"{folder}/train.parquet",), eval_paths=(f"{folder}/eval.parquet",))
    return replace(job, data=data, num_epochs=EPOCHS), reachable


def job_of(name: str, given: argparse.Namespace, folder: Path) -> tuple[JobConfig, float | None]:
    """A job, and the best AUC that can be reached, where it is known."""
    if name == SMALLEST:
        job, reachable = smallest(folder)
        return job, reachable
    cache = os.path.abspath(given.cache)
    arguments: dict[str, Any] = {"seed": given.seed}
    if name in RATINGS_JOBS:
        arguments |= {"data": given.data, "cache": f"{cache}/movielens"}
    else:
        arguments |= {"folder": f"{cache}/{'criteo-synthetic' if name == 'synthetic' else 'two-tasks'}"}
    job = JobReference(function=BUILT_IN_JOBS[name], arguments=arguments).resolve()
    return job, job.best_auc


def optimizer_of(text: str) -> embedding.Optimizer:
    return eval(text, vars(embedding).copy())  # noqa: S307  # of whoever starts this


def figures(job: JobConfig, folder: str, max_steps: int | None) -> dict[str, float]:
    """Of the evaluation at the end of a run on one host, in this process."""
    result = Trainer(
        job,
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(storage_path=folder, name="run", max_steps=max_steps),
        reporter=SilentReporter(),
    ).fit()
    return {name: round(value, 4) for name, value in result.evaluations[-1].values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=[SMALLEST, "synthetic"])
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, help="expressions of podembed.embedding")
    parser.add_argument("--data", help="folder of the ratings, for the jobs that take it")
    parser.add_argument("--cache", default=".data", help="folder where generated sets are written, or found")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--max-steps", type=int, help="of each run; all epochs of the job without it")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name in given.jobs:
        with tempfile.TemporaryDirectory() as folder:
            job, reachable = job_of(name, given, Path(folder))
            job = replace(job, seed=given.seed, batch_size=given.batch_size or job.batch_size)
            found[name] = {"batch_size": job.batch_size} | ({"best_auc": round(reachable, 4)} if reachable else {})
            for text in given.optimizers:
                chosen = job if text == OWN else replace(job, optimizer=optimizer_of(text))
                with tempfile.TemporaryDirectory() as storage:
                    found[name][text] = figures(chosen, storage, given.max_steps)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
