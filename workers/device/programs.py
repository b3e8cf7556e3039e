"""What a device process compiles: the forward pass of a job, its training step, and the way of results to the host.

Pure functions of arrays. `workers.device.model_step` holds the state and calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from podembed.embedding.features.activations import Activations
from podembed.workers.job.job import JobConfig

AXIS = "data"
Blocks = tuple[jax.Array, ...]


def sigmoid_binary_cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Per-sample binary cross entropy of logits `[n]`; stable for large scores of either sign."""
    return optax.sigmoid_binary_cross_entropy(scores, labels)


def reads_in_place() -> bool:
    devices = jax.local_devices()
    return len(devices) == 1 and devices[0].platform == "cpu"


def forward_pass(job: JobConfig, params: Any, dense: jax.Array, activations: Blocks) -> jax.Array:
    return job.model.apply(params, dense, Activations(zip(job.widths, activations, strict=True)))


def training_step(
    job: JobConfig,
    optimizer: optax.GradientTransformation,
    params: Any,
    state: Any,
    dense: jax.Array,
    activations: Blocks,
    labels: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
) -> tuple[Any, Any, Blocks, jax.Array]:
    """One host's part of a step; `scale` is 1 / the global batch's weight. The activations' gradients come back without
    it.
    """
    per_sample = job.loss or sigmoid_binary_cross_entropy

    def weighted_loss(params: Any, activations: Blocks) -> jax.Array:
        return jnp.sum(per_sample(forward_pass(job, params, dense, activations), labels) * weights)

    loss, (dense_gradients, gradients) = jax.value_and_grad(weighted_loss, argnums=(0, 1))(params, activations)
    # One all-reduce a step: the loss travels with the gradients. It comes after the activations' gradients,
    # which need no other host and can be handed back while it runs.
    flat, unravel = ravel_pytree(dense_gradients)
    total = jax.lax.psum(jnp.concatenate([flat, loss[None]]), AXIS) * scale
    updates, state = optimizer.update(unravel(total[:-1]), state, params)
    return optax.apply_updates(params, updates), state, gradients, total[-1]


def own_parts(array: jax.Array) -> list[jax.Array]:
    """This host's rows of a global array, one part a device in the order of the rows, with their copies to this process
    under way.

    On one CPU device there is nothing to copy.
    """
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    parts = [shard.data for shard in shards]
    if not reads_in_place():
        for part in parts:
            part.copy_to_host_async()
    return parts


def to_host(parts: Sequence[jax.Array], out: np.ndarray, scale: np.float32 | None = None) -> None:
    """Waits for the parts of `own_parts` and copies them, times `scale`."""
    at = 0
    for part in parts:
        rows = np.asarray(part)
        if scale is None:
            out[at : at + len(rows)] = rows
        else:
            np.multiply(rows, scale, out=out[at : at + len(rows)])
        at += len(rows)
