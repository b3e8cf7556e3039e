"""The small job with one rule for all tables, whose rates are too high by a factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer
from podembed.workers.job.job import JobConfig
from tests.small_job import small_job

RULES: Mapping[str, Callable[[float], Optimizer]] = {
    "adagrad": lambda factor: Adagrad(0.05 * factor, initial_accumulator_value=1e-6),
    "adam": lambda factor: Adam(0.001 * factor),
    "sgd": lambda factor: SGD(10.0 * factor),
}
"""Rules with a rate that suits them, times a factor."""


def hasty_job(*, folder: str, epochs: int, rule: str, factor: float, seed: int = 3, place: str = "host") -> JobConfig:
    """See the module."""
    job = small_job(folder=folder, audit=False, epochs=epochs, seed=seed)
    tables: dict[int, TableConfig] = {}
    features = {}
    for name, feature in job.features.items():
        table = tables.setdefault(id(feature.table), copy(feature.table))
        table.optimizer, table.place = RULES[rule](factor), place
        features[name] = copy(feature)
        features[name].table = table
    return replace(job, features=features)
