"""Jobs whose programs `benchmarks/chips.py` compiles for TPUs. They declare shapes; no data are read."""

from __future__ import annotations

from typing import Any

import optax

from podembed import FeatureConfig, IdColumn, JobConfig, ListColumn, ParquetData, TableConfig
from podembed.jobs.models import DLRM, HSTU, SASRec

NO_DATA = "none-*.parquet"
# The MLPs of MLPerf's DLRM, between 13 numbers and 26 features.
MLPERF: dict[str, Any] = {"bottom": (512, 256), "top": (1024, 1024, 512, 256)}


def dlrm(
    *, dim: int = 128, batch_size: int = 8192, mlps: str = "mlperf", compute_dtype: str = "float32", num_lanes: int = 16
) -> JobConfig:
    """26 features of one id."""
    names = [f"c{n}" for n in range(26)]
    return JobConfig(
        name="dlrm",
        features={name: FeatureConfig(TableConfig(100_000, dim, name=name)) for name in names},
        model=DLRM(**(MLPERF if mlps == "mlperf" else {})),
        data=ParquetData(
            NO_DATA,
            label="label",
            dense=tuple(f"i{n}" for n in range(13)),
            features={name: IdColumn(name) for name in names},
        ),
        batch_size=batch_size,
        dense_optimizer=optax.adam(1e-3),
        compute_dtype=compute_dtype,
        num_lanes=num_lanes,
    )


def sasrec(
    *,
    dim: int = 64,
    length: int = 50,
    blocks: int = 1,
    batch_size: int = 4096,
    compute_dtype: str = "float32",
    num_lanes: int = 16,
) -> JobConfig:
    """Histories of which all positions are trained."""
    model = SASRec(history="history", item="item", positives="positives", negatives="negatives", blocks=blocks)
    return _next_item("sasrec", model, dim, length, batch_size, compute_dtype, num_lanes)


def hstu(
    *,
    dim: int = 64,
    length: int = 50,
    blocks: int = 2,
    batch_size: int = 4096,
    compute_dtype: str = "float32",
    num_lanes: int = 16,
) -> JobConfig:
    """The same with the layers of HSTU and times."""
    model = HSTU(
        history="history",
        item="item",
        positives="positives",
        negatives="negatives",
        times="times",
        blocks=blocks,
        heads=2,
    )
    times = (ListColumn("times", length, "int32"),)
    return _next_item("hstu", model, dim, length, batch_size, compute_dtype, num_lanes, extra=times)


def _next_item(
    name: str,
    model: Any,
    dim: int,
    length: int,
    batch_size: int,
    compute_dtype: str,
    num_lanes: int,
    extra: tuple[ListColumn, ...] = (),
) -> JobConfig:
    items = TableConfig(1_000_000, dim, combiner="sum", name="items")
    lists = {feature: FeatureConfig(items, max_sequence_length=length) for feature in ("history", "positives")}
    return JobConfig(
        name=name,
        features={
            **lists,
            "negatives": FeatureConfig(items, max_sequence_length=length),
            "item": FeatureConfig(items),
        },
        model=model,
        data=ParquetData(
            NO_DATA,
            label="label",
            features={feature: IdColumn(feature) for feature in ("history", "positives", "negatives", "item")},
            extra=extra,
        ),
        batch_size=batch_size,
        dense_optimizer=optax.adam(1e-3),
        compute_dtype=compute_dtype,
        num_lanes=num_lanes,
    )
