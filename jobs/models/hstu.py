"""HSTU (Zhai et al. 2024, "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations").

Attention without a softmax: each position adds up what came before it, weighed by a SiLU of the product and of a bias.
So many matching items count more than one. The sum is divided by the most positions of a history, as in the authors'
program, and normalized. It is then gated by the position itself. Write histories from the first item to the last.

As in that program, items come in times the root of their width, with a vector of their place. Otherwise they are small
beside what the blocks add to them, and the state hardly says which items there were. For the same reason the layers of
a block begin near zero, as there. `benchmarks/hstu_reference.py` has what the other choices cost.
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
    init_near_zero,
    linear,
    linear_each,
    of_heads,
    standardized,
    unit,
)
from podembed.jobs.models.positions import Padded, on_positions

# Of times between two positions: one for each power of two of an int32.
TIME_BUCKETS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTU:
    """Scores candidates by the state after the last item; trains all positions if positives and negatives are there.

    Attributes:
      history: feature with `max_sequence_length`.
      item: feature of the items that are judged, one or candidates.
      positives, negatives: features as of `SASRec`. The loss is a softmax over the next item and its negatives.
      times: int32 list column beside the history, such as seconds, for the bias of time; None for that of places alone.
      segments: int32 list column beside the history. Positions of different segments do not see each other.
      blocks, heads: blocks and heads of attention.
      temperature: scores are cosines divided by it. The authors have 0.05, on data that is larger.
      dropout: share of numbers left out in training, of what comes in and of what each block adds.
    """

    history: str
    item: str
    positives: str | None = None
    negatives: str | None = None
    times: str | None = None
    segments: str | None = None
    blocks: int = 2
    heads: int = 1
    temperature: float = 0.05
    dropout: float = 0.2

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """The layers and biases of all blocks.

        Raises:
          ValueError: heads do not divide the width, a column does not stand beside the history, or negatives do not
            stand beside the positives.
        """
        width, longest = spec.widths[self.history], spec.sequences[self.history]
        next_items.check_negatives(spec, positives=self.positives, negatives=self.negatives)
        if width % self.heads:
            raise ValueError(f"Found {self.heads} heads for the width {width}. Expected a divisor. Choose another dim.")
        for name in filter(None, (self.times, self.segments)):
            if spec.columns[name].inner != (longest,) or spec.columns[name].dtype != "int32":
                raise ValueError(
                    f"Found column '{name}' as {spec.columns[name]}. Expected int32 for {longest} positions, as "
                    f"'{self.history}' has. Declare ListColumn('{name}', {longest}, 'int32')."
                )
        place_key, *keys = jax.random.split(key, 1 + self.blocks)
        return {
            "places": width**-0.5 * jax.random.normal(place_key, (longest, width)),
            "blocks": [self._init_block(one, width, longest) for one in keys],
        }

    def _init_block(self, key: jax.Array, width: int, longest: int) -> dict[str, Any]:
        first, second, place, time = jax.random.split(key, 4)
        return {
            "uvqk": [init_near_zero(first, width, 4 * width)],
            "out": [init_near_zero(second, width, width)],
            "place_bias": 0.02 * jax.random.normal(place, (longest,)),
            "time_bias": 0.02 * jax.random.normal(time, (TIME_BUCKETS if self.times else 0,)),
        }

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        """`scores` `[n]`, or `[n, c]` of candidates; where all positions are trained also `states`, `[n, longest,
        width]`.
        """
        trains_all = context.training and self.positives is not None and self.negatives is not None
        is_last = not trains_all and self.blocks > 0
        states = self.states(params, batch, context, is_last=is_last)
        user = states[:, 0] if is_last else next_items.last_of(states, batch.lengths[self.history])
        scores = next_items.scores_of(user, unit(batch.activations[self.item])) / self.temperature
        return {"scores": scores, "states": states} if trains_all else {"scores": scores}

    def states(self, params: Any, batch: ModelBatch, context: StepContext, *, is_last: bool = False) -> jax.Array:
        """`[n, longest, width]`: what each position foretells, of length 1; zeros behind a history.

        Args:
          is_last: only the last position of each history, `[n, 1, width]`. The last block then works on it alone.
        """
        return on_positions(
            batch.sequences[self.history], lambda at: self._states(params, at, batch, context, is_last=is_last)
        )

    def _states(self, params: Any, at: Padded, batch: ModelBatch, context: StepContext, *, is_last: bool) -> jax.Array:
        x, mask, lengths = at.values, at.mask, at.history.lengths
        places = jnp.arange(at.history.longest)
        sees = (places[:, None] >= places) & at.history.mask_padded()[:, None, :]
        if self.segments:
            segments = batch.columns[self.segments][:, : len(places)]
            sees &= segments[:, :, None] == segments[:, None, :]
        between = jnp.maximum(places[:, None] - places, 0)
        buckets = None
        if self.times:
            times = batch.columns[self.times][:, : len(places)]
            buckets = _time_buckets(times[:, :, None] - times[:, None, :])
        drop = self.dropout if context.training else 0.0
        first, *keys = jax.random.split(context.key, 1 + self.blocks)
        x = at.dropped(first, x * x.shape[2] ** 0.5 + params["places"][at.places], drop)
        for number, (block, key) in enumerate(zip(params["blocks"], keys, strict=True)):
            here = None
            if is_last and number == self.blocks - 1:
                between = jnp.broadcast_to(between, sees.shape)
                sees, between = (next_items.last_of(one, lengths)[:, None] for one in (sees, between))
                here, mask = at.last(x), (lengths > 0)[:, None, None]
                buckets = None if buckets is None else next_items.last_of(buckets, lengths)[:, None]
            bias = block["place_bias"][between]
            bias = bias if buckets is None else bias + _chosen(block["time_bias"], buckets)
            u, v, q, k = self._projected(block["uvqk"][0], at, x, here)
            by_head = (bias, sees) if self.heads == 1 else (bias[..., None, :, :], sees[:, None])
            logits = jnp.einsum("...qd,...kd->...qk", q, k) + by_head[0]
            weights = jnp.where(by_head[1], jax.nn.silu(logits) / len(block["place_bias"]), 0.0)
            seen = of_heads(jnp.einsum("...qk,...kd->...qd", weights, v))
            if here is None:
                x = x + linear(block["out"][0], at.dropped(key, u * standardized(at.of_padded(seen)), drop))
            else:
                x = here + linear(block["out"][0], dropped(key, u * standardized(seen), drop))
        states = unit(x) * mask
        return states if is_last else at.padded(states)

    def _projected(
        self, layer: dict[str, jax.Array], at: Padded, x: jax.Array, here: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """U and Q of all positions, or of those `here`, V and K of all; all but U padded and by head."""
        if here is None:
            u, *others = jnp.split(jax.nn.silu(linear(layer, standardized(x))), 4, axis=2)
            v, q, k = (at.padded(one) for one in others)
        else:
            each = {name: jnp.split(values, 4, axis=-1) for name, values in layer.items()}
            u, v, q, k = ({name: values[part] for name, values in each.items()} for part in range(4))
            (u, q), (v, k) = (
                [jax.nn.silu(found) for found in linear_each(layers, standardized(given))]
                for layers, given in (((u, q), here), ((v, k), x))
            )
            v, k = at.padded(v), at.padded(k)
        return u, *(in_heads(one, self.heads) for one in (v, q, k))

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        """`[n]`: of positions, their mean by sample. A position counts that has a next item."""
        if self.positives is None or self.negatives is None:
            return next_items.loss_of_scores(outputs["scores"], batch.label)
        states = outputs["states"]
        up, down = next_items.next_and_others(
            batch, positives=self.positives, negatives=self.negatives, length=states.shape[1]
        )
        items = unit(jnp.concatenate([up[:, :, None], down], axis=2))
        logits = jnp.einsum("nld,nlkd->nlk", states, items) / self.temperature
        losses = jax.nn.logsumexp(logits, axis=2) - logits[:, :, 0]
        return next_items.mean_of_positions(losses, batch, history=self.history, positives=self.positives)


def _time_buckets(between: jax.Array) -> jax.Array:
    """The power of two below each time: 0 for 0 and 1, 1 for 2 and 3, and so on. Whole numbers round alike anywhere."""
    return TIME_BUCKETS - jax.lax.clz(jnp.maximum(jnp.abs(between), 1))


def _chosen(bias: jax.Array, buckets: jax.Array) -> jax.Array:
    """`bias[buckets]`. Written as a sum, its gradient adds up in one order, and is quicker than a scatter."""
    return jnp.where(buckets[..., None] == jnp.arange(len(bias)), bias, 0.0).sum(axis=-1)
