"""Losses over the candidates of a sample: pointwise, BPR, and softmax, sampled or over the other samples of the batch.

Scores are `[n, c]`, the first candidate of each sample being the positive one. Each function returns one loss a sample,
`[n]`, as `model.loss` may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

if TYPE_CHECKING:
    from podembed.workers.model.batch import ModelBatch
    from podembed.workers.model.context import StepContext

_Loss = Callable[[jax.Array, jax.Array], jax.Array]


def pointwise(
    scores: jax.Array, label: jax.Array | None = None, *, loss: _Loss = optax.sigmoid_binary_cross_entropy
) -> jax.Array:
    """The mean over the candidates of a sample, each judged by itself.

    Args:
      scores: `[n, c]`.
      label: `[n]`, of the first candidate; 1 if left out. That of the others is 0.
      loss: loss of scores and labels of one shape.
    """
    labels = jnp.zeros_like(scores).at[:, 0].set(1.0 if label is None else label)
    losses = loss(scores.reshape(-1), labels.reshape(-1))
    return losses.reshape(scores.shape).mean(axis=1)


def bpr(scores: jax.Array) -> jax.Array:
    """The mean over negatives of -log sigmoid(positive - negative). Source: Rendle et al., BPR: Bayesian personalized
    ranking from implicit feedback, 2009.

    Args:
      scores: `[n, 1 + k]`.
    """
    return jax.nn.softplus(scores[:, 1:] - scores[:, :1]).mean(axis=1)


def sampled_softmax(scores: jax.Array, *, log_q: jax.Array | None = None) -> jax.Array:
    """The cross entropy of a softmax over the candidates of a sample.

    Args:
      scores: `[n, 1 + k]`.
      log_q: `[n, 1 + k]` or `[1 + k]`, the logarithm of how likely each is drawn, such as `batch.log_q["item"]`. It is
        taken off the scores, so that they learn the logarithm of how likely an item is, and not of how much more
        likely than it is drawn. Source: Bengio and Senécal, Adaptive importance sampling to accelerate training of a
        neural probabilistic language model, 2008. The other source is Jean et al., On using very large target
        vocabulary for neural machine translation, 2014.
    """
    logits = scores if log_q is None else scores - log_q
    return jax.nn.logsumexp(logits, axis=1) - logits[:, 0]


def in_batch_softmax(
    user: jax.Array,
    item: jax.Array,
    context: StepContext,
    batch: ModelBatch,
    *,
    log_q: jax.Array | None = None,
    ids: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """The cross entropy of a softmax over the items of all samples of the batch, those of other hosts too. Source: Yi
    et al., Sampling-bias-corrected neural modeling for large corpus item recommendations, 2019.

    Padding and samples of weight 0 count neither as samples nor as items.

    Args:
      user, item: `[n, width]`, the vectors of each sample.
      log_q: `[n]`, the logarithm of how likely the item of a sample is in a batch, such as
        `batch.log_frequency["item"][:, 0]`. It is taken off the scores of that item.
      ids: integers `[n]`, of the items. The item of a sample then is no negative where another sample has it too.
      temperature: temperature by which scores are divided.
    """
    counts = context.all_gather(batch.weights) > 0
    logits = user @ context.all_gather(item).T / temperature
    own = jnp.sum(user * item, axis=1) / temperature
    if log_q is not None:
        logits, own = logits - context.all_gather(log_q), own - log_q
    is_own = context.positions[:, None] == jnp.arange(logits.shape[1])
    if ids is not None:
        counts = counts & (is_own | (ids[:, None] != context.all_gather(ids)))
    # Without any weight there is no softmax, and its gradient would be no number.
    counts = counts | ~counts.any(axis=-1, keepdims=True)
    loss = jax.nn.logsumexp(jnp.where(counts, logits, -jnp.inf), axis=1) - own
    return jnp.where(batch.weights > 0, loss, 0.0)
