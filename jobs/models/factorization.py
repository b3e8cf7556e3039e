"""Factorization machines (Rendle 2010, "Factorization Machines"), alone and with layers beside them.

The latter is DeepFM (Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction").

Each feature's vector has the weight of its linear term as its last number, and the others are the factors. All features
have one width, and combine with `sum`, or with `mean` or `sqrtn` where a bag's ids share one unit of weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed import ModelBatch, ModelSpec, StepContext, WithState
from podembed.jobs.models.layers import init_layers, linear


@dataclass(frozen=True, slots=True, kw_only=True)
class FM:
    """Log odds or a rating `[n]`: a bias, linear terms, and the products of all pairs of features (equation 1).

    Attributes:
      bias: its first value, such as the mean rating.
    """

    bias: float = 0.0

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """The bias, and a vector for each dense number."""
        shape = (spec.num_dense, _width(spec))
        return {"bias": jnp.asarray(self.bias, jnp.float32), "dense": 0.05 * jax.random.normal(key, shape)}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        """`[n]`."""
        return _machine(params, _terms(params, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepFM:
    """Log odds `[n]`: a factorization machine, and layers that read the same factors.

    Each layer is followed by batch normalization, a rectifier and dropout. The normalization keeps running means and
    variances, by which evaluations normalize.

    Attributes:
      layers: widths.
      dropout: share of numbers that is left out in training.
      is_normalized: whether there is batch normalization.
      momentum: share of the running means that a step keeps.
    """

    layers: tuple[int, ...] = (64, 32)
    dropout: float = 0.2
    is_normalized: bool = True
    momentum: float = 0.99

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        """The parameters of both parts, and means and variances."""
        machine_key, layer_key = jax.random.split(key)
        factors = _width(spec) - 1
        width = factors * len(spec.activation_shapes) + spec.num_dense
        params: dict[str, Any] = {
            "machine": FM().init(machine_key, spec),
            "layers": init_layers(layer_key, width, (*self.layers, 1)),
        }
        if not self.is_normalized:
            return WithState(params, {})
        params["norms"] = [{"scale": jnp.ones(width), "shift": jnp.zeros(width)} for width in self.layers]
        return WithState(params, [{"mean": jnp.zeros(width), "variance": jnp.ones(width)} for width in self.layers])

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        """`[n]`, and the means and variances after this batch."""
        terms = _terms(params["machine"], batch)
        features = terms[:, : len(batch.activations), :-1]
        values = jnp.concatenate([features.reshape(features.shape[0], -1), batch.dense], axis=1)
        *hidden, last = params["layers"]
        kept = []
        for at, (layer, key) in enumerate(zip(hidden, jax.random.split(context.key, len(hidden)), strict=True)):
            values = linear(layer, values)
            if self.is_normalized:
                values, state = self._normalized(params["norms"][at], context.state[at], values, context)
                kept.append(state)
            values = jax.nn.relu(values)
            if context.training and self.dropout:
                is_kept = jax.random.bernoulli(key, 1 - self.dropout, values.shape)
                values = jnp.where(is_kept, values / (1 - self.dropout), 0.0)
        scores = _machine(params["machine"], terms) + linear(last, values)[:, 0]
        return WithState(scores, kept if self.is_normalized else context.state)

    def _normalized(self, norm: Any, state: Any, values: jax.Array, context: StepContext) -> tuple[jax.Array, Any]:
        """In training by the samples of the whole batch, without padding."""
        mean, variance = state["mean"], state["variance"]
        if context.training:
            mean = context.mean(values)
            variance = context.mean((values - mean) ** 2)
            state = {
                name: self.momentum * state[name] + (1 - self.momentum) * now
                for name, now in (("mean", mean), ("variance", variance))
            }
        return norm["scale"] * (values - mean) * jax.lax.rsqrt(variance + 1e-5) + norm["shift"], state


def _width(spec: ModelSpec) -> int:
    widths = {*spec.widths.values()}
    if len(widths) != 1 or any(len(shape) > 1 for shape in spec.activation_shapes.values()):
        raise ValueError(
            f"Found features of the shapes {dict(spec.activation_shapes)}. Expected one vector a sample for each, all "
            "of one width. Declare tables of one dim, and no sequences."
        )
    return widths.pop()


def _terms(params: Any, batch: ModelBatch) -> jax.Array:
    """`[n, terms, width]`: the vectors of the features, then those of dense numbers, times these."""
    features = jnp.stack([*batch.activations.values()], axis=1)
    return jnp.concatenate([features, batch.dense[:, :, None] * params["dense"]], axis=1)


def _machine(params: Any, terms: jax.Array) -> jax.Array:
    """`[n]`, pairs by lemma 3.1: half of the squared sum less the sum of squares."""
    factors = terms[..., :-1]
    pairs = 0.5 * (factors.sum(axis=1) ** 2 - (factors**2).sum(axis=1)).sum(axis=1)
    return params["bias"] + terms[..., -1].sum(axis=1) + pairs
