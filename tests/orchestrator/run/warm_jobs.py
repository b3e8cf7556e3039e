"""The small job changed in ways that a warm start must know of, by name, so that other processes can import it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optax

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.workers.data.columns import IdColumn
from podembed.workers.job.job import JobConfig
from tests.small_job import B_ROWS, DIM, SmallModel, small_job


class WiderModel(SmallModel):
    """Has one more parameter."""

    def init(self, key: Any, num_dense: int, widths: Any) -> dict[str, Any]:
        params = super().init(key, num_dense, widths)
        return {**params, "extra": params["out"]}


def changed_job(*, folder: str, change: str = "nothing", seed: int = 3) -> JobConfig:
    """The small job with one change, or with `all` that concern tables: 'a' renamed to 'letters', 'bags' with another
    dimension, 'b' with another optimizer, and a new table 'fresh' for the feature 'other_bag'.
    """
    job = small_job(folder=folder, seed=seed)
    features, hashed = dict(job.features), IdColumn("a", mode="hash", missing="empty")
    if change == "tables":
        features["a"] = FeatureConfig(TableConfig(50, DIM, name="letters", combiner="sum", optimizer=Adagrad(0.1)))
        features["b"] = FeatureConfig(TableConfig(B_ROWS, 2 * DIM, name="b", combiner="sum", optimizer=SGD(0.1)))
        features["bag"] = FeatureConfig(TableConfig(300, DIM // 2, name="bags", combiner="mean"))
        features["other_bag"] = FeatureConfig(TableConfig(300, DIM, name="fresh", combiner="sqrtn"))
        return replace(job, features=features)
    return {
        "nothing": job,
        "hashed": replace(job, data=replace(job.data, features={**job.data.features, "a": hashed})),
        "model": replace(job, model=WiderModel()),
        "dense optimizer": replace(job, dense_optimizer=optax.sgd(1e-2)),
    }[change]
