"""Click prediction: with DLRM on a generated set whose best AUC is known (`synthetic`), and with DLRM, DCN-V2, FM or
DeepFM on click logs (`criteo`).

Copy this file to begin a job of your own: a job is a function with plain arguments that declares `-> JobConfig`. All
names that it imports are public ones of docs/names.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import optax

from podembed import (
    DenseColumn,
    FeatureConfig,
    IdColumn,
    JobConfig,
    JobError,
    Model,
    ParquetData,
    ReadOrder,
    ShortModel,
    TableConfig,
)
from podembed.embedding import RowWiseAdagrad, TruncatedNormal
from podembed.jobs.datasets import PreparedSet, read_prepared, write_synthetic
from podembed.jobs.models import DLRM, FM, DCNv2, DeepFM

SMALL = TruncatedNormal(stddev=0.05)
DEFAULT_ROWS = 200_000
PREPARED = "prepared.json"  # in the folder of a prepared set
MODELS: dict[str, Callable[[], Model | ShortModel]] = {"dlrm": DLRM, "dcn_v2": DCNv2, "fm": FM, "deepfm": DeepFM}

# Names of the 13 numbers and the 26 categorical fields in Parquet files that are understood, by who wrote them.
COLUMN_NAMES = {
    "podembed": (tuple(f"i{n}" for n in range(13)), tuple(f"c{n}" for n in range(26))),
    "torchrec": (tuple(f"int_{n}" for n in range(13)), tuple(f"cat_{n}" for n in range(26))),
}


def synthetic(
    *,
    folder: str = ".data/criteo-synthetic",
    batch_size: int = 1024,
    epochs: int = 1,
    dim: int = 16,
    learning_rate: float = 0.05,
    dense_learning_rate: float = 1e-3,
    seed: int = 0,
    staleness: int = 0,
    wire_dtype: str = "float32",
    order: ReadOrder = "shuffled",
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
        data=replace(data.data(), order=order),
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
    model: str = "dlrm",
    vocabulary_size: int | None = None,
    batch_size: int = 1024,
    epochs: int = 1,
    dim: int = 16,
    learning_rate: float = 0.05,
    dense_learning_rate: float = 1e-3,
    seed: int = 0,
    staleness: int = 0,
    wire_dtype: str = "float32",
    order: ReadOrder = "shuffled",
) -> JobConfig:
    """Click prediction from numbers and fields in Parquet files; every field has a table of its own.

    Args:
      data, eval_data: paths or globs.
      columns: whose column names the files have, a key of `COLUMN_NAMES`: then the files hold Criteo's 13 numbers and
        26 fields, and values are hashed here. It may also be the path of the `prepared.json` of a prepared set, which
        says the columns and the tables' sizes.
      model: a key of `MODELS`.
      vocabulary_size: rows of each table where values are hashed here; None stands for `DEFAULT_ROWS`.
      order: order of the samples, see `InputData`; the files of click logs are days, so `files` is the order of time.

    Raises:
      JobError: unknown column names or model, or a vocabulary size beside a prepared set.
      PrepareError: the prepared set cannot be read.
    """
    if model not in MODELS:
        raise JobError(f"Found model='{model}'. Expected one of {sorted(MODELS)}.")
    if columns.endswith(PREPARED):
        if vocabulary_size is not None:
            raise JobError(
                f"Found vocabulary_size={vocabulary_size} beside a prepared set. Expected none, since {columns} says "
                "the tables' sizes. Leave it out, or prepare the text with other sizes."
            )
        sizes, parquet = _prepared(read_prepared(columns), data, eval_data)
    else:
        sizes, parquet = _hashed(columns, vocabulary_size or DEFAULT_ROWS, data, eval_data)
    return JobConfig(
        name="criteo",
        features={
            field: FeatureConfig(TableConfig(rows, dim, SMALL, combiner="mean", name=f"table_{field}"))
            for field, rows in sizes.items()
        },
        model=MODELS[model](),
        data=replace(parquet, order=order),
        batch_size=batch_size,
        optimizer=RowWiseAdagrad(learning_rate),
        dense_optimizer=optax.adam(dense_learning_rate),
        num_epochs=epochs,
        seed=seed,
        staleness=staleness,
        wire_dtype=wire_dtype,
    )


def _hashed(
    columns: str, vocabulary_size: int, data: Sequence[str], eval_data: Sequence[str]
) -> tuple[dict[str, int], ParquetData]:
    """Rows of each field's table, and the data with values as Criteo has them."""
    if columns not in COLUMN_NAMES:
        raise JobError(
            f"Found columns='{columns}'. Expected one of {sorted(COLUMN_NAMES)}, or the path of a {PREPARED}."
        )
    numbers, fields = COLUMN_NAMES[columns]
    parquet = ParquetData(
        tuple(data),
        eval_paths=tuple(eval_data),
        label="label",
        dense=tuple(DenseColumn(name, "log1p") for name in numbers),
        # One salt a field: equal values of two fields mean different things.
        features={field: IdColumn(field, mode="hash", salt=at) for at, field in enumerate(fields)},
    )
    return dict.fromkeys(fields, vocabulary_size), parquet


def _prepared(
    prepared: PreparedSet, data: Sequence[str], eval_data: Sequence[str]
) -> tuple[dict[str, int], ParquetData]:
    """The same for a prepared set, whose ids are final."""
    parquet = ParquetData(
        tuple(data),
        eval_paths=tuple(eval_data),
        label=prepared.label,
        dense=prepared.dense,
        features={field.name: IdColumn(field.name) for field in prepared.fields},
    )
    return {field.name: field.rows for field in prepared.fields}, parquet
