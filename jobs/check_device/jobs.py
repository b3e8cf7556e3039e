"""The small jobs that are trained on devices and on the CPU, and their data. Every shape has one reason to be there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

from podembed import FeatureConfig, IdColumn, JobConfig, ListColumn, ParquetData, TableConfig, Task
from podembed.embedding import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    Momentum,
    QuantizationConfig,
    RowWiseAdagrad,
)
from podembed.jobs.models import DIN, DLRM, HSTU, DCNv2, DeepFM, MMoE, SASRec, TwoTowers

BATCH_SIZE = 240
"""Divides evenly over 1 to 6, 8, 10, 12, 15 and 16 devices."""
NUM_ROWS, LENGTH, DIM = 960, 6, 16
SIZES = {"few": 12, "many": 5_000}
"""Rows of the tables: fewer than ids of a batch, and more."""
CLICKS = ("few_id", "many_id", "few_bag", "many_bag")
HISTORY = ("history", "positives", "negatives")
NO_DATA = "none-*.parquet"


def write_rows(folder: Path) -> str:
    """Single ids, bags of 0 to 5 ids that may name one twice, weights of both signs, histories, labels."""
    random = np.random.default_rng(7)
    lengths, steps = random.integers(0, 6, NUM_ROWS).tolist(), random.integers(1, LENGTH + 1, NUM_ROWS).tolist()
    labels = random.integers(0, 2, (2, NUM_ROWS)).astype(np.float32)
    columns: dict[str, Any] = {"label": labels[0], "buy": labels[1]}
    columns |= {name: random.standard_normal(NUM_ROWS, np.float32) for name in ("x", "y")}
    columns["shares"] = pa.array([(random.integers(-2, 9, n) / 4).tolist() for n in lengths], pa.list_(pa.float64()))
    for name, size in SIZES.items():
        columns[f"{name}_id"] = random.integers(0, size, NUM_ROWS)
        columns[f"{name}_bag"] = pa.array([random.integers(0, size, n).tolist() for n in lengths], pa.list_(pa.int64()))
    for name in HISTORY:
        ids = [random.integers(0, SIZES["many"], n).tolist() for n in steps]
        columns[name] = pa.array(ids, pa.list_(pa.int64()))
    times = [np.sort(random.integers(0, 100_000, n)).tolist() for n in steps]
    columns["times"] = pa.array(times, pa.list_(pa.int32()))
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=16)
    return str(folder / "rows.parquet")


def check_job(*, rows: str, model: str, place: Any = "host", compute_dtype: Any = "float32") -> JobConfig:
    """A job of one model, with its tables in one place.

    Args:
      rows: file of `write_rows`.
      model: a key of `MODELS`; `tables` has one table for each kind of row optimizer and of lookup.
    """
    many = partial(TableConfig, SIZES["many"], DIM, place=place, optimizer=Adagrad(0.3, 0.1))
    few = partial(TableConfig, SIZES["few"], DIM, place=place, optimizer=Adagrad(0.3, 0.1))
    extra: tuple[ListColumn, ...] = ()
    if model == "tables":
        features, columns = _of_tables(many, few)
    elif model in ("din", "sasrec", "hstu"):
        items = many(name="items", combiner="sum")
        names = ("history",) if model == "din" else HISTORY
        features = {name: FeatureConfig(items, max_sequence_length=LENGTH) for name in names}
        features["item"] = FeatureConfig(items)
        columns = {name: IdColumn(name) for name in names} | {"item": IdColumn("many_id")}
        extra = (ListColumn("times", LENGTH, "int32"),) if model == "hstu" else ()
    else:
        tables = {"few": few(name="few", combiner="sum"), "many": many(name="many", combiner="sum")}
        features = {name: FeatureConfig(tables[name.split("_")[0]]) for name in CLICKS}
        columns = {name: IdColumn(name) for name in CLICKS}
    tasks = tuple(map(Task, ("label", "buy"))) if model == "tables" else ()
    return JobConfig(
        name="check",
        features=features,
        model=MODELS[model],
        data=ParquetData(
            rows,
            eval_paths=rows,
            labels=("label", "buy") if tasks else ("label",),
            dense=("x", "y"),
            features=columns,
            extra=extra,
        ),
        tasks=tasks,
        batch_size=BATCH_SIZE,
        num_lanes=4,
        num_epochs=4,
        # Adam would make large steps of gradients that are nothing but rounding.
        dense_optimizer=optax.sgd(0.05),
        compute_dtype=compute_dtype,
    )


def _of_tables(many: Any, few: Any) -> tuple[dict[str, FeatureConfig], dict[str, IdColumn]]:
    """A table for each row optimizer but Lion, whose signs hang on rounding; with combiners, weights, limits, rounded
    lookups, a sequence, lists of bags, and one that is only read.
    """
    first = np.random.default_rng(3).standard_normal((SIZES["many"], DIM)).astype(np.float32)
    limited = Adagrad(0.3, clipvalue=0.01, weight_decay_factor=0.01, clip_weight_min=-0.3, clip_weight_max=0.35)
    rounded = QuantizationConfig(255, -0.5, 0.5)
    tables = {
        "mean": many(name="mean", combiner="mean", optimizer=limited),
        "sqrtn": many(name="sqrtn", combiner="sqrtn", optimizer=RowWiseAdagrad(0.1)),
        "rounded": many(name="rounded", optimizer=FTRL(0.1), quantization_config=rounded),
        "steps": many(name="steps", optimizer=Adam(0.01, epsilon=1e-3)),
        "read": many(name="read", initial_rows=first, trainable=False, combiner="sum"),
        "all": few(name="all", combiner="sum", optimizer=Adam(0.01, epsilon=1e-3, lazy_adam=False)),
        "momentum": few(name="momentum", optimizer=AdagradMomentum(0.1, momentum=0.9)),
        "ball": many(name="ball", optimizer=Momentum(0.1, use_nesterov=True)),
        "plain": many(name="plain", optimizer=SGD(0.5)),
    }
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    features["steps"] = FeatureConfig(tables["steps"], max_sequence_length=LENGTH)
    features["item"] = FeatureConfig(tables["steps"])
    features["lists"] = FeatureConfig(tables["momentum"], output_shape=(None, 3, 2))
    columns = {name: IdColumn(f"{'few' if name == 'all' else 'many'}_bag", weights="shares") for name in features}
    columns |= {"item": IdColumn("many_id"), "momentum": IdColumn("few_id"), "steps": IdColumn("history")}
    return features, columns | {"lists": IdColumn("few_bag")}


_NEXT: dict[str, Any] = {name: name for name in (*HISTORY, "item")}
MODELS: dict[str, Any] = {
    "tables": MMoE(tasks=("label", "buy")),
    "dlrm": DLRM(bottom=(16,), top=(16,)),
    "dcn_v2": DCNv2(cross_layers=2, deep=(16,)),
    "deepfm": DeepFM(layers=(16,)),
    "two_towers": TwoTowers(user=CLICKS[:2], item=CLICKS[2:]),
    "din": DIN(target="item", history="history"),
    "sasrec": SASRec(**_NEXT, blocks=1),
    "hstu": HSTU(**_NEXT, blocks=1, heads=2, times="times"),
}


def timed_job(*, batch_size: int) -> JobConfig:
    """A job of which the device's half of steps is timed. No data are read."""
    names = [f"c{at}" for at in range(8)]
    return JobConfig(
        name="timed",
        features={name: FeatureConfig(TableConfig(100_000, 128, name=name)) for name in names},
        model=DLRM(bottom=(512, 256), top=(512, 256)),
        data=ParquetData(NO_DATA, label="label", dense=("x", "y"), features={name: IdColumn(name) for name in names}),
        batch_size=batch_size,
        dense_optimizer=optax.adam(1e-3),
    )
