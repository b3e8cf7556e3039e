"""A DLRM in each framework, and a small model with dropout and batch normalization in each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

from podembed.workers.model.batch import ModelBatch
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.equinox_model import EquinoxModel
from podembed.workers.model.flax_models import FlaxModel, NnxModel
from podembed.workers.model.haiku_model import HaikuModel

BOTTOM, TOP = (16,), (12,)


def interaction(bottom: jax.Array, batch: ModelBatch) -> jax.Array:
    """The vectors of the bottom MLP, and the dot products of all pairs, those of later vectors last."""
    vectors = jnp.stack([bottom, *batch.activations.values()], axis=1)
    products = jnp.einsum("nif,njf->nij", vectors, vectors)
    left, right = jnp.tril_indices(vectors.shape[1], -1)
    return jnp.concatenate([bottom, products[:, left, right]], axis=1)


class LinenDLRM(linen.Module):
    width: int

    @linen.compact
    def __call__(self, batch: ModelBatch, context: StepContext) -> jax.Array:
        values = batch.dense
        for size in (*BOTTOM, self.width):
            values = linen.relu(linen.Dense(size)(values))
        values = interaction(values, batch)
        for size in TOP:
            values = linen.relu(linen.Dense(size)(values))
        return linen.Dense(1)(values)[:, 0]


class NnxDLRM(nnx.Module):
    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        width, features = next(iter(spec.widths.values())), len(spec.widths)
        pairs = width + features * (features + 1) // 2
        sizes = (spec.num_dense, *BOTTOM, width)
        self.bottom = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        sizes = (pairs, *TOP)
        self.top = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        self.last = nnx.Linear(TOP[-1], 1, rngs=rngs)

    def __call__(self, batch: ModelBatch, context: StepContext) -> jax.Array:
        values = batch.dense
        for layer in self.bottom:
            values = nnx.relu(layer(values))
        values = interaction(values, batch)
        for layer in self.top:
            values = nnx.relu(layer(values))
        return self.last(values)[:, 0]


class EquinoxDLRM(eqx.Module):
    bottom: list[eqx.nn.Linear]
    top: list[eqx.nn.Linear]

    def __init__(self, key: jax.Array, spec: ModelSpec) -> None:
        width, features = next(iter(spec.widths.values())), len(spec.widths)
        pairs = width + features * (features + 1) // 2

        def layers(*sizes: int) -> list[eqx.nn.Linear]:
            return [eqx.nn.Linear(a, b, key=key) for a, b in itertools.pairwise(sizes)]

        self.bottom, self.top = layers(spec.num_dense, *BOTTOM, width), layers(pairs, *TOP, 1)

    def __call__(self, batch: ModelBatch, context: StepContext) -> jax.Array:
        values = batch.dense
        for layer in self.bottom:
            values = jax.nn.relu(jax.vmap(layer)(values))
        values = interaction(values, batch)
        for layer in self.top[:-1]:
            values = jax.nn.relu(jax.vmap(layer)(values))
        return jax.vmap(self.top[-1])(values)[:, 0]


def haiku_dlrm(batch: ModelBatch, context: StepContext) -> jax.Array:
    width = next(iter(batch.activations.values())).shape[1]
    bottom = hk.nets.MLP((*BOTTOM, width), activate_final=True)(batch.dense)
    return hk.nets.MLP((*TOP, 1))(interaction(bottom, batch))[:, 0]


DLRMS: dict[str, Callable[[int], Any]] = {
    "flax.linen": lambda width: FlaxModel(LinenDLRM(width)),
    "flax.nnx": lambda width: NnxModel(lambda rngs, spec: NnxDLRM(spec, rngs)),
    "equinox": lambda width: EquinoxModel(EquinoxDLRM),
    "haiku": lambda width: HaikuModel(haiku_dlrm),
}


class LinenThinned(linen.Module):
    @linen.compact
    def __call__(self, batch: ModelBatch, context: StepContext) -> jax.Array:
        values = joined(batch)
        values = linen.BatchNorm(use_running_average=not context.training, axis_name=context.axis)(values)
        values = linen.Dropout(0.5, deterministic=not context.training)(values)
        return linen.Dense(1)(values)[:, 0]


class NnxThinned(nnx.Module):
    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        width = spec.num_dense + sum(spec.widths.values())
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, batch: ModelBatch, context: StepContext) -> jax.Array:
        self.norm.axis_name = context.axis
        return self.last(self.dropout(self.norm(joined(batch))))[:, 0]


class EquinoxThinned(eqx.Module):
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array, spec: ModelSpec) -> None:
        width = spec.num_dense + sum(spec.widths.values())
        self.norm = eqx.nn.BatchNorm(width, axis_name="samples", mode="batch")
        self.dropout, self.last = eqx.nn.Dropout(0.5), eqx.nn.Linear(width, 1, key=key)

    def __call__(self, batch: ModelBatch, context: StepContext, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        def one(values: jax.Array, key: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
            values, state = self.norm(values, state)
            return self.last(self.dropout(values, key=key))[0], state

        return jax.vmap(one, axis_name="samples", in_axes=(0, 0, None), out_axes=(0, None))(
            joined(batch), context.sample_keys, state
        )


def haiku_thinned(batch: ModelBatch, context: StepContext) -> jax.Array:
    norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9, cross_replica_axis=context.axis)
    values = norm(joined(batch), is_training=context.training)
    if context.training:
        values = hk.dropout(hk.next_rng_key(), 0.5, values)
    return hk.Linear(1)(values)[:, 0]


def joined(batch: ModelBatch) -> jax.Array:
    return jnp.concatenate([batch.dense, *batch.activations.values()], axis=1)


THINNED: dict[str, Any] = {
    "flax.linen": FlaxModel(LinenThinned()),
    "flax.nnx": NnxModel(lambda rngs, spec: NnxThinned(spec, rngs)),
    "equinox": EquinoxModel(eqx.nn.make_with_state(EquinoxThinned)),
    "haiku": HaikuModel(haiku_thinned),
}
