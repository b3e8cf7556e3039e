"""A job with a table of each fault, on the files of `tests.small_job`. All else about it is sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer
from podembed.jobs.chaos.jobs import BATCH_SIZE, tiny_data
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig
from tests.small_job import B_ROWS, small_job

DIM = 8


class SpoiltModel:
    """Sums of rows. Of `alike` it sees but the mean of each row, and from `still` no gradient comes."""

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        return {"dense": jax.random.normal(key, (num_dense,)), "sound": jax.random.normal(key, (widths["sound"],))}

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        still = jax.lax.stop_gradient(activations["still"]).sum(axis=1)
        moved = activations["alike"].mean(axis=1) + activations["jumps"].sum(axis=1)
        return dense @ params["dense"] + activations["sound"] @ params["sound"] + moved + still


RULES: Mapping[str, Callable[[float], Optimizer]] = {
    "adagrad": lambda factor: Adagrad(0.05 * factor, initial_accumulator_value=1e-6),
    "adam": lambda factor: Adam(0.001 * factor),
}
"""Adaptive rules with a rate that suits them, times a factor."""


def hasty_job(*, folder: str, epochs: int, rule: str, factor: float, seed: int = 3, place: str = "host") -> JobConfig:
    """The small job with one rule for all tables."""
    job = small_job(folder=folder, audit=False, epochs=epochs, seed=seed)
    tables: dict[int, TableConfig] = {}
    features = {}
    for name, feature in job.features.items():
        table = tables.setdefault(id(feature.table), copy(feature.table))
        table.optimizer, table.place = RULES[rule](factor), place
        features[name] = copy(feature)
        features[name].table = table
    return replace(job, features=features)


def spoilt_job(*, folder: str, epochs: int, place: str = "host") -> JobConfig:
    table = partial(TableConfig, dim=DIM, place=place, optimizer=Adagrad(0.05))
    features = {
        "sound": ("bag", table(300, name="sound")),
        # Rows that begin at zero and are all pushed the same way stay on one line.
        "alike": ("other_bag", table(300, name="alike", initializer=Constant(0.0))),
        "jumps": ("a", table(50, name="jumps", optimizer=SGD(1e3))),
        "still": ("b", table(B_ROWS, name="still")),
    }
    columns = {name: IdColumn(column) for name, (column, _) in features.items()}
    data = tiny_data(folder, ())
    return JobConfig(
        name="spoilt",
        features={name: FeatureConfig(table) for name, (_, table) in features.items()},
        model=SpoiltModel(),
        data=ParquetData(data.paths, label="label", dense=("x", "y"), features=columns),
        batch_size=BATCH_SIZE,
        num_epochs=epochs,
        dense_optimizer=optax.adam(1e-2),
    )
