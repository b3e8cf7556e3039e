"""The workloads of `benchmarks/workloads.py` as jobs: what workers import to build them. `benchmarks/dlrm.py` runs
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.in_memory import InMemory, batch_of
from benchmarks.workloads import (
    NUM_DENSE,
    MixedBatch,
    MixedWorkload,
    attention_values,
    mixed_dense_values,
    mixed_table_values,
    mixed_workload,
    read_mixed,
)
from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad, RowWiseAdagrad
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.model.contract import ModelSpec


class MixedData(InMemory):
    """Batches that `write_mixed` wrote."""

    def load(self, samples: slice) -> list[Batch]:
        shape, folder = mixed_workload(self.bench), Path(self.paths[0])
        return [_batch(shape, read_mixed(shape, folder, number, samples)) for number in range(shape.num_batches)]


def _batch(shape: MixedWorkload, batch: MixedBatch) -> Batch:
    features = {shape.feature(at): Ragged.of(*bag) for at, bag in enumerate(batch.bags)}
    return batch_of(batch.dense, batch.labels, features)


def mixed_reference(folder: str, arguments: argparse.Namespace) -> JobReference:
    """The job that workers build for themselves, with the options of `benchmarks/dlrm.py`."""
    job = {name: getattr(arguments, name) for name in ("bench", "emb_opt", "staleness", "wire_dtype")}
    job |= {"compute_dtype": getattr(arguments, "compute_dtype", "float32")}
    job |= {"folder": folder, "overlap": {"auto": None, "on": True, "off": False}[arguments.overlap]}
    return JobReference(function="benchmarks.mixed:mixed_job", arguments=job)


def mixed_job(
    *,
    bench: str,
    emb_opt: str,
    folder: str,
    staleness: int = 0,
    overlap: bool | None = None,
    wire_dtype: str = "float32",
    compute_dtype: str = "float32",
) -> JobConfig:
    """The workload as a job. Runs in the workers, too."""
    import jax
    import jax.numpy as jnp
    import optax

    from podembed.jobs.models.sasrec import SASRec

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

    class GivenSASRec(SASRec):
        """A SASRec whose first values are those of the workload."""

        def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
            params, values = SASRec.init(self, key, spec), attention_values(shape)
            params["positions"] = jnp.asarray(values.pop("positions"))
            (block,) = params["blocks"]
            for name, weight in values.items():
                block[name] = [{"weight": jnp.asarray(weight), "bias": jnp.zeros(weight.shape[1])}]
            return params

    rate, epsilon = shape.learning_rate, shape.epsilon
    has_attention = bool(shape.longest)
    features = [shape.feature(at) for at in range(len(shape.lengths))]
    trained = {"positives": features[2], "negatives": features[3]} if shape.trains_all else {}
    tables = [
        TableConfig(rows, dim, name=f"t{at:03d}", combiner=combiner, initializer=mixed_table_values(shape, at))
        for at, (rows, dim, combiner) in enumerate(zip(shape.table_rows, shape.dims, shape.combiners, strict=True))
    ]
    return JobConfig(
        name=f"bench-{bench}",
        features={
            shape.feature(at): FeatureConfig(
                tables[table], max_sequence_length=shape.longest[at] if has_attention else 0
            )
            for at, table in enumerate(shape.table_of)
        },
        model=GivenSASRec(history=features[0], item=features[1], **trained, blocks=1, dropout=0.0)
        if has_attention
        else Concatenation(),
        candidates=features[1] if has_attention and shape.longest[1] else None,
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
        compute_dtype=compute_dtype,
    )
