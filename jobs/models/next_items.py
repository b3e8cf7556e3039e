"""What models share that foretell the next item of a history: the state that judges, and the positions that train.

`SASRec` and `HSTU` are such models. A position trains if it has a next item, among `positives`. Its negatives are
items that the state shall score lower than the next one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podembed import ModelBatch, ModelSpec


def check_negatives(spec: ModelSpec, *, positives: str | None, negatives: str | None) -> None:
    """Raises `ValueError` where negatives would come to other positions than those of the positives."""
    if positives is None or negatives is None:
        return
    each, longest, room = spec.negatives.get(negatives, 1), spec.sequences[positives], spec.sequences[negatives]
    if room != each * longest:
        raise ValueError(
            f"Found room for {room} vectors in '{negatives}', with {each} for each of the {longest} positions of "
            f"'{positives}'. Expected {each * longest}. Write max_sequence_length={each * longest} for '{negatives}'."
        )


def last_of(states: jax.Array, lengths: jax.Array) -> jax.Array:
    """`[n, longest, width]` → `[n, width]`: what each sample's last position has; the first one of empty samples."""
    last = jnp.maximum(lengths - 1, 0)
    return jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]


def scores_of(user: jax.Array, items: jax.Array) -> jax.Array:
    """`[n, width]` times `[n, width]` or `[n, c, width]` → scores `[n]` or `[n, c]`."""
    return jnp.einsum("nd,nd->n" if items.ndim == 2 else "nd,ncd->nc", user, items)


def next_and_others(batch: ModelBatch, *, positives: str, negatives: str, length: int) -> tuple[jax.Array, jax.Array]:
    """The next item `[n, length, width]` of each position, and its negatives `[n, length, k, width]`."""
    up, down = batch.activations[positives], batch.activations[negatives]
    num_samples, longest, width = up.shape
    return up[:, :length], down.reshape(num_samples, longest, -1, width)[:, :length]


def mean_of_positions(losses: jax.Array, batch: ModelBatch, *, history: str, positives: str) -> jax.Array:
    """`[n, length]` → `[n]`: the mean over the positions that have a next item; 0 of samples without any."""
    both = jnp.minimum(batch.lengths[positives], batch.lengths[history])
    counts = jnp.arange(losses.shape[1]) < both[:, None]
    return jnp.where(counts, losses, 0.0).sum(axis=1) / jnp.maximum(counts.sum(axis=1), 1)


def loss_of_scores(scores: jax.Array, label: jax.Array) -> jax.Array:
    """`[n]`: the sigmoid cross-entropy of scores `[n]` or `[n, c]`, where the first candidate has the label."""
    labels = jnp.zeros_like(scores).at[:, 0].set(label) if scores.ndim == 2 else label
    losses = jax.nn.softplus(scores) - labels * scores
    return losses.mean(axis=1) if losses.ndim == 2 else losses
