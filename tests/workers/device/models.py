"""Models in the long form, for tests: one that uses all of the context, and a DLRM in each framework."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from podembed.workers.model.batch import Losses, ModelBatch, WithState
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec

MOMENTUM = 0.9


class EveryPart:
    """Vectors of all features, normalized over the batch, thinned by dropout, and scored. The loss is an in-batch
    softmax of two features with a penalty of the parameters.
    """

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        width = spec.num_dense + sum(spec.widths.values())
        params = {"w": jax.random.normal(key, (width,)) / 8, "scale": jnp.ones(width)}
        return WithState(params, {"mean": jnp.zeros(width), "variance": jnp.ones(width)})

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        values = jnp.concatenate([batch.dense, *batch.activations.values()], axis=1)
        state = context.state
        if context.training:
            mean = context.mean(values)
            variance = context.mean((values - mean) ** 2)
            state = {
                "mean": MOMENTUM * state["mean"] + (1 - MOMENTUM) * mean,
                "variance": MOMENTUM * state["variance"] + (1 - MOMENTUM) * variance,
            }
        else:
            mean, variance = state["mean"], state["variance"]
        values = params["scale"] * (values - mean) / jnp.sqrt(variance + 1e-3)
        if context.training:
            values = jnp.where(jax.random.bernoulli(context.key, 0.5, values.shape), 2 * values, 0)
        blocks = list(batch.activations.values())
        first, second = blocks[0], blocks[1][:, : blocks[0].shape[1]]
        return WithState({"scores": values @ params["w"], "first": first, "second": second}, state)

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> Losses:
        every = context.all_gather(outputs["second"])
        counts = context.all_gather(batch.weights) > 0
        logits = jnp.where(counts, outputs["first"] @ every.T, -jnp.inf)
        own = jnp.take_along_axis(logits, jnp.minimum(context.positions, context.batch_size - 1)[:, None], axis=1)[:, 0]
        softmax = jnp.where(batch.weights > 0, jax.nn.logsumexp(logits, axis=1) - own, 0.0)
        cross_entropy = jnp.logaddexp(0.0, outputs["scores"]) - batch.label * outputs["scores"]
        penalty = 0.01 * jnp.sum(context.params["w"] ** 2)
        return Losses(per_sample=cross_entropy + 0.1 * softmax, batch=penalty)


class CutPart(EveryPart):
    """The same with a hidden layer that may be cut over devices."""

    shardings = {"up": P(None, "model"), "down": P("model"), "scale": None, "w": None}  # noqa: RUF012

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        made = super().init(key, spec)
        up, down = jax.random.split(key)
        width = len(made.value["w"])
        hidden = {"up": jax.random.normal(up, (width, 16)) / 8, "down": jax.random.normal(down, (16,)) / 4}
        return WithState(made.value | hidden, made.state)

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        made = super().apply(params, batch, context)
        values = jnp.concatenate([batch.dense, *batch.activations.values()], axis=1)
        more = jnp.tanh(values @ params["up"]) @ params["down"]
        return WithState(made.value | {"scores": made.value["scores"] + more}, made.state)
