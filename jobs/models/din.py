"""Deep Interest Network (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction").

How much an item of the history counts depends on the item that is judged: a small MLP sees both, their difference and
their product. Its outputs weigh the history, without a softmax, so that many matching items count more than one. All of
it is done by position, so a batch costs as much as its histories are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed import Jagged, ModelBatch, ModelSpec, StepContext
from podembed.jobs.models.layers import init_layers, linear, rectified


@dataclass(frozen=True, slots=True, kw_only=True)
class DIN:
    """The history and the target should look up in one table. All other features must have one vector a sample.

    Attributes:
      target: feature of the item that is judged, or of candidates.
      history: feature with `max_sequence_length`.
      attention: hidden widths of the MLP that weighs the history.
      hidden: hidden widths of the MLP that scores.
    """

    target: str
    history: str
    attention: tuple[int, ...] = (36,)
    hidden: tuple[int, ...] = (80, 40)

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """Layers of both MLPs.

        Raises:
          ValueError: history and target differ in width.
        """
        widths = spec.widths
        if widths[self.history] != widths[self.target]:
            raise ValueError(
                f"Found the widths {widths[self.history]} of '{self.history}' and {widths[self.target]} of "
                f"'{self.target}'. Expected the same. Let them share a table."
            )
        attention_key, top_key = jax.random.split(key)
        return {
            "attention": init_layers(attention_key, 4 * widths[self.target], (*self.attention, 1)),
            "top": init_layers(top_key, sum(widths.values()) + spec.num_dense, (*self.hidden, 1)),
        }

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        """Logits `[n]`, or `[n, c]` of candidates."""
        target = batch.activations[self.target]
        if target.ndim == 2:
            return self._scores(params, batch, target)
        return jax.vmap(lambda one: self._scores(params, batch, one), in_axes=1, out_axes=1)(target)

    def _scores(self, params: Any, batch: ModelBatch, target: jax.Array) -> jax.Array:
        rest = [vectors for name, vectors in batch.activations.items() if name not in (self.target, self.history)]
        interest = interest_in(params["attention"], batch.sequences[self.history], target)
        *hidden, last = params["top"]
        seen = jnp.concatenate([batch.dense, target, interest, *rest], axis=1)
        return linear(last, rectified(hidden, seen))[:, 0]


def interest_in(layers: Any, history: Jagged, target: jax.Array) -> jax.Array:
    """`[n, width]`: the history of each sample, weighed by its target `[n, width]`."""
    items, wanted = history.values, history.of_samples(target)
    *hidden, last = layers
    seen = jnp.concatenate([items, wanted, items - wanted, items * wanted], axis=1)
    weights = linear(last, rectified(hidden, seen))
    # Biases give filling a weight, too. `sum` leaves it out.
    return history.with_values(weights * items).sum()
