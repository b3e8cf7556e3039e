"""SASRec (Kang and McAuley 2018, "Self-Attentive Sequential Recommendation").

Every position of a history sees itself and what came before it, and foretells the next item. One table has the items of
the history, the positives and the negatives. Write histories from the first item to the last.

Positions are counted back from the last item, as with padding in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed import ModelBatch, ModelSpec, StepContext
from podembed.jobs.models import next_items
from podembed.jobs.models.layers import (
    dropped,
    in_heads,
    init_layers,
    linear,
    linear_each,
    of_heads,
    standardized,
)
from podembed.jobs.models.positions import Padded, on_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class SASRec:
    """Scores candidates by the state after the last item; trains all positions if positives and negatives are there.

    Attributes:
      history: feature with `max_sequence_length`.
      item: feature of the items that are judged, one or candidates.
      positives: feature of the next items, as long as the history.
      negatives: feature of as many items to tell each of them from, of `Negatives(k, only=True)`. So its
        `max_sequence_length` is k times that of the positives. Without these two features the loss is that of the
        scores: the label's, or of candidates one by one.
      blocks, heads: blocks and heads of attention.
      dropout: share of numbers left out in training.
    """

    history: str
    item: str
    positives: str | None = None
    negatives: str | None = None
    blocks: int = 2
    heads: int = 1
    dropout: float = 0.2

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """Positions, and the layers of all blocks.

        Raises:
          ValueError: negatives do not stand beside the positives.
        """
        next_items.check_negatives(spec, positives=self.positives, negatives=self.negatives)
        width, longest = spec.widths[self.history], spec.sequences[self.history]
        position_key, *keys = jax.random.split(key, 1 + self.blocks)
        return {
            "positions": 0.02 * jax.random.normal(position_key, (longest, width)),
            "blocks": [_init_block(block_key, width) for block_key in keys],
            "norm": _init_norm(width),
        }

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        """`scores` `[n]`, or `[n, c]` of candidates; where all positions are trained also `states`, `[n, longest,
        width]`.
        """
        trains_all = context.training and self.positives is not None and self.negatives is not None
        is_last = not trains_all and self.blocks > 0
        states = self.states(params, batch, context, is_last=is_last)
        user = states[:, 0] if is_last else next_items.last_of(states, batch.lengths[self.history])
        scores = next_items.scores_of(user, batch.activations[self.item])
        return {"scores": scores, "states": states} if trains_all else {"scores": scores}

    def states(self, params: Any, batch: ModelBatch, context: StepContext, *, is_last: bool = False) -> jax.Array:
        """`[n, longest, width]`: what each position foretells; zeros behind a history.

        Args:
          is_last: only the last position of each history, `[n, 1, width]`. The last block then works on it alone.
        """
        return on_positions(
            batch.sequences[self.history], lambda at: self._states(params, at, context, is_last=is_last)
        )

    def _states(self, params: Any, at: Padded, context: StepContext, *, is_last: bool) -> jax.Array:
        x, mask, lengths = at.values, at.mask, at.history.lengths
        places = jnp.arange(at.history.longest)
        ages = jnp.minimum(at.ages, len(params["positions"]) - 1)
        keys = jax.random.split(context.key, 1 + 3 * self.blocks)
        drop = self.dropout if context.training else 0.0
        x = at.dropped(keys[0], x * x.shape[2] ** 0.5 + params["positions"][ages], drop) * mask
        sees = (places[:, None] >= places) & at.history.mask_padded()[:, None, :]
        for number, block in enumerate(params["blocks"]):
            attends, first, second = keys[1 + 3 * number : 4 + 3 * number]
            here, dropped_here = x, at.dropped
            is_here = is_last and number == self.blocks - 1
            if is_here:
                here, mask, sees = at.last(x), (lengths > 0)[:, None, None], next_items.last_of(sees, lengths)[:, None]
                dropped_here = dropped
            query = _normed(block["norm_1"], here)
            q = linear(block["query"][0], query)
            k, v = (at.padded(one) for one in linear_each([block["key"][0], block["value"][0]], x))
            found = self._attention(q if is_here else at.padded(q), k, v, sees, attends, drop)
            here = _normed(block["norm_2"], query + (found if is_here else at.of_padded(found)))
            inner = dropped_here(first, jax.nn.relu(linear(block["inner"][0], here)), drop)
            x = (here + dropped_here(second, linear(block["outer"][0], inner), drop)) * mask
        states = _normed(params["norm"], x) * mask
        return states if is_last else at.padded(states)

    def _attention(self, q: jax.Array, k: jax.Array, v: jax.Array, sees: jax.Array, key: Any, drop: float) -> Any:
        """As `q`, `[n, positions, width]`. `sees` is bool `[n, positions, longest]`."""
        q, k, v = (in_heads(one, self.heads) for one in (q, k, v))
        logits = jnp.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
        # Rows behind a history see nothing; a large number keeps their softmax finite.
        weights = dropped(
            key, jax.nn.softmax(jnp.where(sees if self.heads == 1 else sees[:, None], logits, -1e9)), drop
        )
        return of_heads(jnp.einsum("...qk,...kd->...qd", weights, v))

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        """`[n]`: of positions, their mean by sample. A position counts that has a next item."""
        if self.positives is None or self.negatives is None:
            return next_items.loss_of_scores(outputs["scores"], batch.label)
        states = outputs["states"]
        up, down = next_items.next_and_others(
            batch, positives=self.positives, negatives=self.negatives, length=states.shape[1]
        )
        losses = jax.nn.softplus(-(states * up).sum(axis=2))
        losses += jax.nn.softplus(jnp.einsum("nld,nlkd->nlk", states, down)).sum(axis=2)
        return next_items.mean_of_positions(losses, batch, history=self.history, positives=self.positives)


def _init_block(key: jax.Array, width: int) -> dict[str, Any]:
    names = ("query", "key", "value", "inner", "outer")
    layers = {
        name: init_layers(one, width, (width,)) for name, one in zip(names, jax.random.split(key, 5), strict=True)
    }
    return {**layers, "norm_1": _init_norm(width), "norm_2": _init_norm(width)}


def _init_norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


def _normed(norm: Any, x: jax.Array) -> jax.Array:
    return norm["scale"] * standardized(x, 1e-8) + norm["shift"]
