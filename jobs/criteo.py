"""Click prediction with DLRM, on a generated set whose best AUC is known (`synthetic`) or on Criteo's files (`criteo`).

Copy this file to begin a job of your own: a job is a function with plain arguments that returns a `JobConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence

import optax

from embedding.config import FeatureConfig, TableConfig
from embedding.initializers import TruncatedNormal
from embedding.optimizers import RowWiseAdagrad
from jobs.models.dlrm import DLRM
from jobs.synthetic import DEFAULT_FOLDER, write_synthetic
from workers.data_config import DenseColumn, IdColumn, ParquetData
from workers.job import JobConfig, JobError

SMALL = TruncatedNormal(stddev=0.05)

# Names of the 13 numbers and the 26 categorical fields in Parquet files that are understood, by who wrote them.
COLUMN_NAMES = {
    "podembed": (tuple(f"i{n}" for n in range(13)), tuple(f"c{n}" for n in range(26))),
    "torchrec": (tuple(f"int_{n}" for n in range(13)), tuple(f"cat_{n}" for n in range(26))),
}


def synthetic(
    *,
    folder: str = str(DEFAULT_FOLDER),
    batch_size: int = 1024,
    epochs: int = 1,
    dim: int = 16,
    learning_rate: float = 0.05,
    dense_learning_rate: float = 1e-3,
    seed: int = 0,
    staleness: int = 0,
    wire_dtype: str = "float32",
) -> JobConfig:
    """DLRM on the generated set in `folder`, which is written if it is not there."""
    data = write_synthetic(folder)
    tables = {
        name: TableConfig(size, dim, SMALL, combiner="mean", name=name) for name, size in data.vocabulary_sizes.items()
    }
    return JobConfig(
        name="synthetic",
        features={name: FeatureConfig(table) for name, table in tables.items()},
        model=DLRM(),
        data=data.data(),
        batch_size=batch_size,
        optimizer=RowWiseAdagrad(learning_rate),
        dense_optimizer=optax.adam(dense_learning_rate),
        num_epochs=epochs,
        seed=seed,
        staleness=staleness,
        wire_dtype=wire_dtype,
        best_auc=data.reachable_auc,
    )


def criteo(
    *,
    data: Sequence[str],
    eval_data: Sequence[str] = (),
    columns: str = "podembed",
    vocabulary_size: int = 200_000,
    batch_size: int = 1024,
    epochs: int = 1,
    dim: int = 16,
    learning_rate: float = 0.05,
    dense_learning_rate: float = 1e-3,
    seed: int = 0,
    staleness: int = 0,
    wire_dtype: str = "float32",
) -> JobConfig:
    """DLRM on Criteo's 13 numbers and 26 fields, in Parquet files; each field's values are hashed into a table of its own.

    Args:
      data, eval_data: paths or globs.
      columns: whose column names the files have, a key of `COLUMN_NAMES`.
      vocabulary_size: rows of each table.

    Raises:
      JobError: unknown column names.
    """
    if columns not in COLUMN_NAMES:
        raise JobError(f"Found columns='{columns}'. Expected one of {sorted(COLUMN_NAMES)}.")
    numbers, fields = COLUMN_NAMES[columns]
    features = {
        field: FeatureConfig(TableConfig(vocabulary_size, dim, SMALL, combiner="mean", name=f"table_{field}"))
        for field in fields
    }
    return JobConfig(
        name="criteo",
        features=features,
        model=DLRM(),
        data=ParquetData(
            tuple(data),
            eval_paths=tuple(eval_data),
            label="label",
            dense=tuple(DenseColumn(name, "log1p") for name in numbers),
            # One salt a field: equal values of two fields mean different things.
            features={field: IdColumn(field, mode="hash", salt=at) for at, field in enumerate(fields)},
        ),
        batch_size=batch_size,
        optimizer=RowWiseAdagrad(learning_rate),
        dense_optimizer=optax.adam(dense_learning_rate),
        num_epochs=epochs,
        seed=seed,
        staleness=staleness,
        wire_dtype=wire_dtype,
    )
