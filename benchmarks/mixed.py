"""The workloads of `benchmarks/workloads.py` as jobs: what workers import to build them. `benchmarks/dlrm.py` runs
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import (
    NUM_DENSE,
    MixedBatch,
    MixedWorkload,
    mixed_dense_values,
    mixed_table_values,
    mixed_workload,
    read_mixed,
)
from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad, RowWiseAdagrad
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.config import ParquetData
from podembed.workers.input.lanes import LanePlan
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference


@dataclass(frozen=True)
class MixedData(ParquetData):
    """Batches that `write_mixed` left in a folder, used in turn. Each host loads its own samples when it starts.

    Attributes:
      bench: name of the workload.
    """

    bench: str = "small-C"

    def open_reader(self, plan: LanePlan, lanes: range) -> MixedReader:
        width = plan.rows_per_lane_step
        return MixedReader(self, slice(lanes.start * width, lanes.stop * width))


class MixedReader:
    """The samples of some lanes, step by step, without any work."""

    def __init__(self, data: MixedData, samples: slice) -> None:
        shape, folder = mixed_workload(data.bench), Path(data.paths[0])
        self._batches = [
            _batch(shape, read_mixed(shape, folder, number, samples)) for number in range(shape.num_batches)
        ]

    def read(self, step: int) -> Batch:
        return self._batches[step % len(self._batches)]

    def close(self) -> None:
        self._batches = []


def _batch(shape: MixedWorkload, batch: MixedBatch) -> Batch:
    return Batch(
        dense=batch.dense,
        labels=batch.labels,
        weights=np.ones(len(batch.labels), np.float32),
        features={shape.feature(at): Ragged.of(ids, splits) for at, (ids, splits) in enumerate(batch.bags)},
        sample_ids=np.arange(len(batch.labels)),
    )


def mixed_reference(folder: str, arguments: argparse.Namespace) -> JobReference:
    """The job that workers build for themselves, with the options of `benchmarks/dlrm.py`."""
    job = {name: getattr(arguments, name) for name in ("bench", "emb_opt", "staleness", "wire_dtype")}
    job |= {"folder": folder, "overlap": arguments.overlap == "on"}
    return JobReference(function="benchmarks.mixed:mixed_job", arguments=job)


def mixed_job(
    *,
    bench: str,
    emb_opt: str,
    folder: str,
    staleness: int = 0,
    overlap: bool = True,
    wire_dtype: str = "float32",
) -> JobConfig:
    """The workload as a job. Runs in the workers, too."""
    import jax
    import jax.numpy as jnp
    import optax

    shape = mixed_workload(bench)

    class Concatenation:
        """All activations and the bottom layers' output side by side, then two layers more."""

        def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> Any:
            return [(jnp.asarray(weight), jnp.asarray(bias)) for weight, bias in mixed_dense_values(shape)]

        def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
            *bottom, (top, top_bias), (last, last_bias) = params
            for weight, bias in bottom:
                dense = jax.nn.relu(dense @ weight + bias)
            joined = jnp.concatenate([dense, *activations.values()], axis=1)
            return (jax.nn.relu(joined @ top + top_bias) @ last + last_bias)[:, 0]

    rate, epsilon = shape.learning_rate, shape.epsilon
    tables = [
        TableConfig(rows, dim, name=f"t{at:03d}", combiner=combiner, initializer=mixed_table_values(shape, at))
        for at, (rows, dim, combiner) in enumerate(zip(shape.table_rows, shape.dims, shape.combiners, strict=True))
    ]
    return JobConfig(
        name=f"bench-{bench}",
        features={shape.feature(at): FeatureConfig(tables[table]) for at, table in enumerate(shape.table_of)},
        model=Concatenation(),
        data=MixedData(folder, label="label", dense=tuple(f"x{at}" for at in range(NUM_DENSE)), bench=bench),
        batch_size=shape.batch_size,
        optimizer=RowWiseAdagrad(rate, epsilon=epsilon)
        if emb_opt == "rowwise"
        else Adagrad(rate, 0.0, epsilon=epsilon),
        dense_optimizer=optax.adagrad(rate, shape.dense_accumulator, epsilon),
        num_lanes=16,
        staleness=staleness,
        overlap=overlap,
        wire_dtype=wire_dtype,
    )
