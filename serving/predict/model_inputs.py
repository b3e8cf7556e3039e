"""What a model is given outside of a run, where one process has all samples of a call: its batch and its context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.features.activations import Activations
from podembed.workers.device.dense_half import model_spec
from podembed.workers.job.job import JobConfig
from podembed.workers.model.batch import ModelBatch
from podembed.workers.model.context import StepContext
from podembed.workers.model.jagged import Jagged


def batch_of(
    job: JobConfig,
    *,
    dense: jax.Array,
    activations: Mapping[str, jax.Array],
    lengths: Mapping[str, jax.Array],
    columns: Mapping[str, jax.Array],
) -> ModelBatch:
    """The batch of some samples, with labels of zeros, as a model may expect them.

    Args:
      dense: `[n, num_dense]`; n may be a symbol.
      activations: by feature `[n, *shape]`, sequences with room for their longest sample.
      lengths: by sequence feature, int32 `[n]`.
      columns: the extra columns as batches of the job have them.
    """
    num_samples = dense.shape[0]
    example = replace(model_spec(job).example(1), sequences={})
    lists = {name: columns[one.length_key] for name, one in job.data.list_columns.items()}
    return replace(
        jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_samples, *leaf.shape[1:])), example),
        dense=dense,
        activations=Activations({name: activations[name] for name in job.features}),
        lengths=lists | {name: lengths[name] for name in job.sequences},
        sequences={name: Jagged.of_padded(activations[name], lengths[name]) for name in job.sequences},
        columns={one.name: columns[one.name] for one in job.data.extra_columns},
    )


def context_of(job: JobConfig, batch: ModelBatch, *, step: int, params: Any, state: Any) -> StepContext:
    """The context of such a batch. Nothing is drawn where nothing is trained, so its key is an ordinary one.

    Args:
      step: step of the commit.
    """
    num_samples = batch.weights.shape[0]
    return replace(
        StepContext.alone(1, training=False, seed=job.seed, state=state),
        step=np.uint32(step),
        key=jax.random.key(job.seed),
        positions=jnp.arange(num_samples, dtype=jnp.int32),
        batch_size=num_samples,
        weights=batch.weights,
        params=params,
    )
