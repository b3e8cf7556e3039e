"""`RankingForward`: scores of each sample of a batch with each of a block of candidates, which all samples share.

The samples are looked up once, and a candidate once for all samples. A job with candidates gets the block in the place
of those of each sample. Of any other job each pair of a sample and a candidate is a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.config import FeatureConfig
from podembed.serving.predict.model_inputs import batch_of, context_of
from podembed.serving.predict.pooled_rows import LookedUp
from podembed.serving.predict.trained_forward import dense_state
from podembed.workers.data.extra_columns import batch_shapes
from podembed.workers.device.dense_half import DenseStateError, outputs_of, scores_of
from podembed.workers.job.candidates import chance_columns
from podembed.workers.job.job import JobConfig

# Pairs of a sample and a candidate that are scored at once.
PAIRS = 1 << 16

Arrays = dict[str, Any]


def ranked_features(job: JobConfig, feature: str) -> tuple[str, ...]:
    """The features that a candidate stands in for: that one, and others of its column with the same negatives.

    Raises:
      DenseStateError: the job has no such feature, or a model without a score for each id of it.
    """
    columns = job.resolved_data.id_columns
    if feature not in columns or (job.candidates is not None and feature not in job.candidate_features):
        named = list(job.candidate_features or columns)
        raise DenseStateError(
            f"Found no feature {feature!r} to rank. Expected one of {named}. Name the items' feature."
        )
    if job.tasks:
        raise DenseStateError(
            f"Found tasks {[task.label for task in job.tasks]} in a job to rank by. Expected one score a sample."
        )
    kinds = {name: (one.column, one.negatives and one.negatives.draws) for name, one in columns.items()}
    alike = tuple(name for name, kind in kinds.items() if kind == kinds[feature])
    for name in alike:
        inner = job.activation_shapes[name][:-1]
        if len(inner) > 1 or (job.candidates is None and math.prod(inner) != 1):
            raise DenseStateError(
                f"Found feature {name!r} with room for {list(inner)} vectors. Expected one vector a candidate."
            )
    return alike


class RankingForward:
    """The forward pass of a commit for blocks of candidates, compiled once.

    Attributes:
      job: with room for a block in the place of its candidates; nothing is drawn beside its ids.
      features: features that a candidate stands in for.
      block_size: candidates that are scored at once.
      dtype: dtype of scores, float32, or float64 where the model gives that or integers.
    """

    def __init__(self, job: JobConfig, dense: Mapping[str, np.ndarray], *, feature: str, step: int) -> None:
        """Args:
        dense: the arrays of `params` and `state` by their keys, as a checkpoint has them.
        step: of the commit.

        Raises:
          DenseStateError: as `ranked_features`, or the arrays are not those of the job.
        """
        self.features = ranked_features(job, feature)
        self.block_size = max(1, PAIRS // job.batch_size)
        self.job = _with_room(job, self.features if job.candidates else (), self.block_size)
        self._params, self._state = dense_state(job, dense)
        self._step, self._chances = step, chance_columns(job.data.id_columns)
        self._program = jax.jit(self._scores)
        given = self._given_dtype()
        # Of integers up to 32 bits it holds all.
        is_wide = given.kind in "biu" or given == np.float64
        self.dtype = np.dtype(np.float64 if is_wide else np.float32)

    def scores(self, found: LookedUp, block: Mapping[str, np.ndarray]) -> np.ndarray:
        """`[n, block_size]`, of `dtype`.

        Args:
          found: the samples; what they have of `features` is not read. Sequences are padded. Extra columns that were
            not read are zeros.
          block: by feature, float32 `[block_size, width]`, the rows of the candidates.
        """
        names = [name for name in self.job.features if name not in self.features]
        shapes = batch_shapes(self.job.data.extra_columns)
        unread = {name: shape.zeros(found.batch.num_samples) for name, shape in shapes.items()}
        activations = dict(zip(self.job.features, found.activations, strict=True))
        inputs: Arrays = {
            "dense": found.batch.dense,
            "activations": {name: activations[name] for name in names},
            "lengths": {name: found.lengths[name].astype(np.int32) for name in names if name in self.job.sequences},
            "columns": {name: found.batch.columns.get(name, zeros) for name, zeros in unread.items()},
        }
        return np.asarray(self._program(self._params, self._state, inputs, dict(block))).astype(self.dtype, copy=False)

    def _given_dtype(self) -> np.dtype:
        """What the model gives. Nothing is computed."""
        job, n = self.job, self.job.batch_size
        names = [name for name in job.features if name not in self.features]

        def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        inputs: Arrays = {
            "dense": array((n, job.data.num_dense)),
            "activations": {name: array((n, *job.activation_shapes[name])) for name in names},
            "lengths": {name: array((n,), jnp.int32) for name in names if name in job.sequences},
            "columns": {
                name: array((n, *one.inner), one.dtype) for name, one in batch_shapes(job.data.extra_columns).items()
            },
        }
        block = {name: array((self.block_size, job.features[name].table.dim)) for name in self.features}
        return np.dtype(self._program.eval_shape(self._params, self._state, inputs, block).dtype)

    def _scores(self, params: Any, state: Any, inputs: Arrays, block: Arrays) -> jax.Array:
        job, num_samples = self.job, inputs["dense"].shape[0]
        num_rows, each = (num_samples, self.block_size) if job.candidates else (num_samples * self.block_size, 1)
        if job.candidates is None:
            inputs = jax.tree.map(lambda leaf: jnp.repeat(leaf, self.block_size, axis=0), inputs)
        rows = {
            name: jnp.broadcast_to(values, (num_samples, *values.shape)).reshape(num_rows, *job.activation_shapes[name])
            for name, values in block.items()
        }
        lengths = {name: jnp.full(num_rows, each, jnp.int32) for name in block if name in job.sequences}
        batch = batch_of(
            job,
            dense=inputs["dense"],
            activations=inputs["activations"] | rows,
            lengths=inputs["lengths"] | lengths,
            columns=inputs["columns"],
        )
        room = {name: jnp.zeros((num_rows, *shape[:-1])) for name, shape in job.activation_shapes.items()}
        chances = {kind: {name: room[name] for name in names} for kind, names in self._chances.items()}
        batch = replace(batch, **chances)
        context = context_of(job, batch, step=self._step, params=params, state=state)
        outputs, _ = outputs_of(job, params, batch, context)
        return scores_of(job, outputs, num_rows).reshape(num_samples, self.block_size)


def _with_room(job: JobConfig, features: tuple[str, ...], width: int) -> JobConfig:
    """The job with so many candidates of a sample, and without anything that is drawn."""
    columns = {name: replace(source, negatives=None) for name, source in job.resolved_data.id_columns.items()}
    wide = {name: FeatureConfig(job.features[name].table, max_sequence_length=width) for name in features}
    declared = {name: wide.get(name, feature) for name, feature in job.features.items()}
    return replace(
        job,
        features=declared,
        data=replace(job.resolved_data, features=columns),
        metrics=(),
        early_stopping=None,
        callbacks=(),
    )
