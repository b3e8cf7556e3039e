"""A job with a table of each fault, on the files of `tests.small_job`. All else about it is sound."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import optax

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.jobs.chaos.jobs import BATCH_SIZE, tiny_data
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig
from tests.small_job import B_ROWS

DIM = 8


class SpoiltModel:
    """Sums of rows. Of `alike` it sees but the mean of each row, and from `still` no gradient comes."""

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        return {"dense": jax.random.normal(key, (num_dense,)), "sound": jax.random.normal(key, (widths["sound"],))}

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        still = jax.lax.stop_gradient(activations["still"]).sum(axis=1)
        moved = activations["alike"].mean(axis=1) + activations["jumps"].sum(axis=1)
        return dense @ params["dense"] + activations["sound"] @ params["sound"] + moved + still


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
