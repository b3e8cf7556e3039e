"""Two related tasks at once with MMoE or PLE: does a user click an item, and buy what was clicked (`mmoe`).

The set is generated into a folder. A user has one taste for clicks and another one for purchases. They mostly agree, so
one task helps the other. A purchase is known of clicked samples alone; its label is null elsewhere. The probabilities
behind the labels are known, and with them the best AUC of each task.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

from podembed import Baseline, FeatureConfig, JobConfig, JobError, Label, Model, ParquetData, TableConfig, Task
from podembed.embedding import Adagrad, TruncatedNormal
from podembed.jobs.finished_folder import create_once
from podembed.jobs.models import PLE, MMoE
from podembed.workers.job.quality import area_under_curve

TASKS = ("click", "buy")
MODELS: dict[str, Callable[[], Model]] = {"mmoe": lambda: MMoE(tasks=TASKS), "ple": lambda: PLE(tasks=TASKS)}
# Of the planted model.
WIDTH, AGREEMENT, SCALE = 3, 0.9, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTasksSpec:
    """What is generated."""

    train_rows: int = 200_000
    eval_rows: int = 20_000
    users: int = 400
    items: int = 300
    seed: int = 2018


def mmoe(
    *,
    folder: str = ".data/two-tasks",
    model: str = "mmoe",
    batch_size: int = 256,
    epochs: int = 6,
    dim: int = 16,
    learning_rate: float = 1.0,
    dense_learning_rate: float = 1e-2,
    seed: int = 0,
) -> JobConfig:
    """MMoE, or PLE with `model=ple`, on the set in `folder`, which is written if it is not there.

    Layers find it hard to multiply two vectors. With small steps of the tables they learn how likely users and items
    are by themselves, and stay there for many epochs.

    Args:
      learning_rate: learning rate of the tables.

    Raises:
      JobError: an unknown model.
    """
    if model not in MODELS:
        raise JobError(f"Found model='{model}'. Expected one of {sorted(MODELS)}.")
    report = write_two_tasks(Path(folder), TwoTasksSpec())
    sizes = {"user": report["spec"]["users"], "item": report["spec"]["items"]}
    spread = TruncatedNormal(stddev=0.3)
    return JobConfig(
        name="mmoe",
        features={name: FeatureConfig(TableConfig(size, dim, spread, name=name)) for name, size in sizes.items()},
        model=MODELS[model](),
        data=ParquetData(
            f"{folder}/train-*.parquet",
            eval_paths=f"{folder}/eval-*.parquet",
            labels=("click", Label("buy", missing="mask")),
            dense=("hour",),
        ),
        tasks=tuple(Task(name) for name in TASKS),
        batch_size=batch_size,
        num_epochs=epochs,
        optimizer=Adagrad(learning_rate, initial_accumulator_value=0.1),
        dense_optimizer=optax.adam(dense_learning_rate),
        seed=seed,
        baseline=Baseline(name="the planted model", figures=report["reachable"]),
    )


def write_two_tasks(folder: Path, spec: TwoTasksSpec) -> dict[str, Any]:
    """Writes the set, unless the folder already holds one. Returns its report, `meta.json`, with the AUC of the true
    probabilities as `reachable`.

    Raises:
      FolderError: the folder holds something else.
    """
    return create_once(folder, lambda unfinished: _write(unfinished, spec))


def _write(folder: Path, spec: TwoTasksSpec) -> dict[str, Any]:
    rng = np.random.default_rng(spec.seed)
    # The last number of a taste counts for all items.
    item = np.concatenate([rng.normal(size=(spec.items, WIDTH - 1)), np.ones((spec.items, 1))], axis=1)
    of_item = rng.normal(size=spec.items)
    click = rng.normal(size=(spec.users, WIDTH))
    # Of unit variance again, with AGREEMENT as the correlation of the two tastes.
    buy = AGREEMENT * click + np.sqrt(1 - AGREEMENT**2) * rng.normal(size=(spec.users, WIDTH))
    reachable: dict[str, float] = {}
    for part, num_rows in (("train-00", spec.train_rows), ("eval-00", spec.eval_rows)):
        users, items = rng.integers(0, spec.users, num_rows), rng.integers(0, spec.items, num_rows)
        hour = rng.normal(size=num_rows)
        odds = {
            name: SCALE * ((tastes[users] * item[items]).sum(axis=1) + of_item[items]) / 2 + weight * hour + mean
            for name, tastes, weight, mean in (("click", click, 0.3, -0.5), ("buy", buy, -0.2, -1.0))
        }
        labels = {name: rng.random(num_rows) < 1 / (1 + np.exp(-one)) for name, one in odds.items()}
        is_clicked = labels["click"]
        columns = {
            "user": pa.array(users),
            "item": pa.array(items),
            "hour": pa.array(hour.astype(np.float32)),
            "click": pa.array(is_clicked.astype(np.int8)),
            "buy": pa.array(labels["buy"].astype(np.int8), mask=~is_clicked),
        }
        pq.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=10_000)
        reachable = {
            "click/auc": area_under_curve(odds["click"], is_clicked),
            "buy/auc": area_under_curve(odds["buy"][is_clicked], labels["buy"][is_clicked]),
        }
    report = {"generator": "two-tasks", "spec": asdict(spec), "reachable": reachable}
    (folder / "meta.json").write_text(json.dumps(report, indent=1))
    return report
