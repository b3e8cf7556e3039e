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
    *,
    dim: int = 128,
    batch_size: int = 8192,
    mlps: str = "mlperf",
    compute_dtype: str = "float32",
    num_lanes: int = 16,
    num_rows: int = 100_000,
    place: Any = "host",
) -> JobConfig:
    """26 features of one id."""
    names = [f"c{n}" for n in range(26)]
    return JobConfig(
        name="dlrm",
        features={name: FeatureConfig(TableConfig(num_rows, dim, name=name, place=place)) for name in names},
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


def next_item(
    *,
    model: str = "sasrec",
    dim: int = 64,
    length: int = 50,
    blocks: int = 1,
    batch_size: int = 4096,
    compute_dtype: str = "float32",
    num_lanes: int = 16,
) -> JobConfig:
    """Histories of which all positions are trained, with `sasrec` or `hstu`; that has times, too."""
    names = {name: name for name in ("history", "item", "positives", "negatives")}
    models = {"sasrec": SASRec(**names, blocks=blocks), "hstu": HSTU(**names, blocks=blocks, heads=2, times="times")}
    items = TableConfig(1_000_000, dim, combiner="sum", name="items")
    sequence = FeatureConfig(items, max_sequence_length=length)
    return JobConfig(
        name=model,
        features={"history": sequence, "positives": sequence, "negatives": sequence, "item": FeatureConfig(items)},
        model=models[model],
        data=ParquetData(
            NO_DATA,
            label="label",
            features={name: IdColumn(name) for name in names},
            extra=(ListColumn("times", length, "int32"),) if model == "hstu" else (),
        ),
        batch_size=batch_size,
        dense_optimizer=optax.adam(1e-3),
        compute_dtype=compute_dtype,
        num_lanes=num_lanes,
    )
