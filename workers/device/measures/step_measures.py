"""`Measured`: what a compiled training step says of its samples and of the dense half. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podembed.workers.device.dense_half import scores_of, task_scores
from podembed.workers.job.job import JobConfig
from podembed.workers.job.quality import has_logits
from podembed.workers.job.window_figures import LARGEST_LOGIT, NOT_BINARY, NOT_COUNTED, NUM_BINS
from podembed.workers.model.batch import ModelBatch

NUM_SUMS = 2
NUM_NORMS = 3
NORMS_EVERY = 32
"""Steps. A norm costs a third of a nanosecond a parameter on a CPU. Gradients have one in each step: they may jump."""
NOT_MEASURED = -1.0


class DeviceScores(NamedTuple):
    """Scores of one device. Both are empty where a job has no scores that are log odds.

    Attributes:
      codes: int16 `[labels, n]`, as of `LabelCounts`.
      sums: float32 `[labels, 2]`: of weight × predicted probability, and of weight × cross entropy.
    """

    codes: tuple[jax.Array, ...]
    sums: tuple[jax.Array, ...]


class Measured(NamedTuple):
    """Measures of one step.

    Attributes:
      scored: by label, of all samples.
      norms: float32 `[3]`, Euclidean: of the dense gradients, of their update, and of the parameters before it. The
        last two are `NOT_MEASURED` but in each step whose number `NORMS_EVERY` divides.
      rounds: int32: how often devices asked for rows of sharded tables; None without such tables.
    """

    scored: DeviceScores
    norms: jax.Array
    rounds: jax.Array | None = None

    @staticmethod
    def lying(by_sample: Any, replicated: Any) -> Any:
        """The shardings of its arrays, in the same structure."""
        where: Any = Measured
        return where(by_sample, replicated, replicated)


def measured_labels(job: JobConfig) -> tuple[str, ...]:
    """Labels whose scores are log odds, one a sample."""
    if job.has_own_loss or job.candidates is not None:
        return ()
    if job.tasks:
        return tuple(task.label for task in job.tasks if task.kind == "binary" and has_logits(task.loss))
    return (job.data.label,) if job.has_logits and job.data.label else ()


def scored(job: JobConfig, outputs: Any, batch: ModelBatch) -> DeviceScores:
    """Scores of the samples by a model's outputs, before they are trained on."""
    names, num_samples = measured_labels(job), batch.weights.shape[0]
    if not names:
        return DeviceScores((), ())
    by_label: Mapping[str, jax.Array] = (
        dict(zip((task.label for task in job.tasks), task_scores(job, outputs, num_samples), strict=True))
        if job.tasks
        else {names[0]: scores_of(job, outputs, num_samples)}
    )
    found = [
        _of_label(
            jax.lax.stop_gradient(by_label[name]).astype(jnp.float32),
            batch.labels[name],
            jnp.where(batch.label_masks[name], batch.weights, 0.0),
        )
        for name in names
    ]
    return DeviceScores(tuple(codes for codes, _ in found), tuple(sums for _, sums in found))


def _of_label(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    bins = jnp.clip((logits + LARGEST_LOGIT) * (NUM_BINS / (2 * LARGEST_LOGIT)), 0, NUM_BINS - 1).astype(jnp.int16)
    is_binary = (labels == 0) | (labels == 1)
    codes = jnp.where(is_binary, 2 * bins + (labels == 1), NOT_BINARY)
    losses = jnp.logaddexp(0.0, logits) - labels * logits
    sums = [jnp.sum(weights * values) for values in (jax.nn.sigmoid(logits), losses)]
    return jnp.where(weights > 0, codes, NOT_COUNTED).astype(jnp.int16), jnp.stack(sums)[None]


def norms(gradients: Any, updates: Any, params: Any, step: jax.Array) -> jax.Array:
    """As `Measured` has them, for a step of this number."""

    def both() -> jax.Array:
        return jnp.stack([_norm(updates), _norm(params)])

    def neither() -> jax.Array:
        return jnp.full(2, NOT_MEASURED, jnp.float32)

    return jnp.concatenate([_norm(gradients)[None], jax.lax.cond(step % NORMS_EVERY == 0, both, neither)])


def _norm(tree: Any) -> jax.Array:
    squares = (jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.float32(0)))
