"""What a device process compiles: the forward pass of a job and its training step, as one device sees them.

Pure functions of arrays. `workers.device.model_step` holds the state and calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from podembed.embedding.features.activations import Activations
from podembed.workers.device.dense_half import losses_of, outputs_of, scheduled, scores_of
from podembed.workers.device.measures.step_measures import Measured, norms, scored
from podembed.workers.device.options import AXIS
from podembed.workers.job.candidates import chance_columns
from podembed.workers.job.job import JobConfig
from podembed.workers.model.batch import ModelBatch
from podembed.workers.model.context import Shares, StepContext
from podembed.workers.model.jagged import Jagged
from podembed.workers.model.sample_keys import with_positions

_STEPS = 1
Blocks = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A share of a batch: this host's as parts of global arrays, or one device's. A JAX pytree.

    Attributes:
      dense: float32 `[n, num_dense]`.
      activations: one `[n, *inner, width]` a feature; of a sequence `[capacity, width]`, as `Jagged` has them. What
        hosts send has those of the features that they look up.
      labels, weights: float32 `[n]`.
      lengths: by sequence feature, int32 `[n]`.
      columns: columns by name, `[n, ...]`; among them all labels but the first. A label that is missing is NaN.
      rows: by feature of a table on devices, int32: one row a bag, -1 for none; or as many as a device has room for.
      row_bags: of these the bag of each row, int32 of the same shape, rising; the number of bags where there is no row.
      row_weights: row weights of such features whose ids have weights, float32 of the same shape.
    """

    dense: jax.Array
    activations: Blocks
    labels: jax.Array
    weights: jax.Array
    lengths: Mapping[str, jax.Array] = field(default_factory=dict)
    columns: Mapping[str, jax.Array] = field(default_factory=dict)
    rows: Mapping[str, jax.Array] = field(default_factory=dict)
    row_bags: Mapping[str, jax.Array] = field(default_factory=dict)
    row_weights: Mapping[str, jax.Array] = field(default_factory=dict)


def scores_of_batch(
    job: JobConfig,
    shares: Shares,
    longest: Mapping[str, int],
    params: Any,
    state: Any,
    inputs: Inputs,
    step: jax.Array,
) -> jax.Array:
    """One device's part of an evaluation: a score for each of its samples, or for each of their candidates."""
    batch = _batch(job, inputs, longest)
    context = _context(job, shares, params, state, batch.weights, step, training=False)
    outputs, _ = outputs_of(job, params, batch, context)
    return scores_of(job, outputs, batch.weights.shape[0])


def training_step(
    job: JobConfig,
    optimizer: optax.GradientTransformation,
    shares: Shares,
    longest: Mapping[str, int],
    params: Any,
    optimizer_state: Any,
    state: Any,
    inputs: Inputs,
    step: jax.Array,
    scale: jax.Array,
    *,
    cut: Sequence[bool] = (),
) -> tuple[Any, Any, Any, Blocks, jax.Array, Measured]:
    """One device's part of a step; `scale` is 1 / the global batch's weight. The gradients of activations come back
    without it, for the features whose tables are trained. Last comes what the step measured.

    Args:
      longest: by sequence feature, at least the longest sample of all hosts.
      cut: by leaf of the parameters, whether it is cut over devices that work on the same samples; empty if none is.
    """
    num_devices = jax.lax.axis_size(AXIS)

    def weighted_loss(params: Any, activations: Blocks) -> tuple[jax.Array, tuple[Any, Any]]:
        batch = _batch(job, replace(inputs, activations=activations), longest)
        context = _context(job, shares, params, state, inputs.weights, step, training=True)
        outputs, after = outputs_of(job, params, batch, context)
        losses = losses_of(job, outputs, batch, context)
        total = jnp.sum(losses.per_sample * inputs.weights)
        if isinstance(losses.batch, jax.Array) or losses.batch != 0:
            # It is there once on every device, and is divided by the weight with all else.
            total += losses.batch / (num_devices * jnp.where(scale > 0, scale, 1.0))
        return total, (after, scored(job, outputs, batch))

    differentiated = jax.value_and_grad(weighted_loss, argnums=(0, 1), has_aux=True)
    (loss, (after, found)), (dense_gradients, gradients) = differentiated(params, inputs.activations)
    # One all-reduce a step: the loss travels with the gradients. It comes after the activations' gradients,
    # which need no other host and can be handed back while it runs.
    gradients = tuple(compress(gradients, job.trained_features))
    leaves, structure = jax.tree.flatten(dense_gradients)
    is_cut = cut or (False,) * len(leaves)
    flat, unravel = ravel_pytree([leaf for leaf, is_part in zip(leaves, is_cut, strict=True) if not is_part])
    total = jax.lax.psum(jnp.concatenate([flat, loss[None]]), AXIS) * scale
    # What is cut stays so: put into one array with the others, it would be whole on every device.
    parts = (jax.lax.psum(leaf.astype(jnp.float32), AXIS) * scale for leaf in compress(leaves, is_cut))
    others = iter(unravel(total[:-1]))
    sums = jax.tree.unflatten(structure, [next(parts if is_part else others) for is_part in is_cut])
    # Summed as float32, they come back in the types of the parameters, which the optimizer's state has too.
    summed = jax.tree.map(lambda gradient, leaf: gradient.astype(leaf.dtype), sums, params)
    updates, optimizer_state = optimizer.update(summed, optimizer_state, params)
    if job.schedule is not None:
        factor = scheduled(job.schedule, step)
        updates = jax.tree.map(lambda update: (factor * update).astype(update.dtype), updates)
    measured = Measured(found, norms(summed, updates, params, step))
    after = _of_first_device(after)
    return optax.apply_updates(params, updates), optimizer_state, after, gradients, total[-1], measured


def _batch(job: JobConfig, inputs: Inputs, longest: Mapping[str, int]) -> ModelBatch:
    """The batch as a model sees it."""
    lists = {name: inputs.columns[column.length_key] for name, column in job.data.list_columns.items()}
    labels, masks = {}, {}
    for label in job.data.label_columns:
        values = inputs.labels if label.name == job.data.label else inputs.columns[label.name]
        masks[label.name] = inputs.weights > 0
        if label.missing == "mask":
            masks[label.name] &= ~jnp.isnan(values)
            values = jnp.nan_to_num(values)
        labels[label.name] = values
    chances = {
        kind: {name: inputs.columns[key] for name, key in by_feature.items()}
        for kind, by_feature in chance_columns(job.data.id_columns).items()
    }
    named = dict(zip(job.widths, inputs.activations, strict=True))
    sequences = {name: Jagged.of(named[name], inputs.lengths[name], longest=length) for name, length in longest.items()}
    # The compiler leaves out what a model does not read.
    padded = {name: sequence.padded(job.sequences[name]) for name, sequence in sequences.items()}
    return ModelBatch(
        dense=inputs.dense,
        activations=Activations(named | padded),
        sequences=sequences,
        labels=labels,
        weights=inputs.weights,
        label_masks=masks,
        lengths={**lists, **inputs.lengths},
        columns={column.name: inputs.columns[column.name] for column in job.data.extra_columns},
        **chances,
    )


def _context(
    job: JobConfig, shares: Shares, params: Any, state: Any, weights: jax.Array, step: jax.Array, *, training: bool
) -> StepContext:
    by_device = jnp.asarray(shares.positions.reshape(-1, weights.shape[0]))
    positions = by_device[jax.lax.axis_index(AXIS)]
    # Apart from the key of the first values.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(job.seed), _STEPS), step)
    return StepContext(
        training=training,
        step=step,
        key=with_positions(key, positions),
        positions=positions,
        batch_size=shares.batch_size,
        weights=weights,
        params=params,
        state=state,
        axis=AXIS,
        _plain_key=key,
        _order=shares.order,
    )


def _of_first_device(state: Any) -> Any:
    """The state of a model as the first device has it, so that it is the same on all of them to the last bit."""
    is_first = jax.lax.axis_index(AXIS) == 0

    def taken(leaf: jax.Array) -> jax.Array:
        if _is_key(leaf):
            return jax.random.wrap_key_data(taken(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if leaf.dtype == jnp.bool_:
            return taken(leaf.astype(jnp.uint8)).astype(jnp.bool_)
        return jax.lax.psum(jnp.where(is_first, leaf, jnp.zeros_like(leaf)), AXIS)

    return jax.tree.map(taken, state)


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
