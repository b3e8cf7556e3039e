"""One training step of `EveryPart` over 1, 3 and 4 devices of the processor. Prints its results as JSON.

The batch is spread as over hosts, with padding where a host has fewer samples.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podembed.workers.device.dense_half import initial
from podembed.workers.device.measures.step_measures import Measured
from podembed.workers.device.options import AXIS
from podembed.workers.device.programs import Inputs, training_step
from podembed.workers.job.job import JobConfig
from podembed.workers.model.context import Shares
from tests.small_job import small_job
from tests.workers.device.models import EveryPart

BATCH_SIZE = 12
SHARES = [(12,), (4, 4, 4), (4, 4, 2, 2)]
STEP = 5


def spread(values: np.ndarray, shares: Shares) -> np.ndarray:
    """Samples `[batch_size, ...]` as the rows of all hosts, with zeros as padding."""
    rows = np.zeros((len(shares.positions), *values.shape[1:]), values.dtype)
    rows[shares.order] = values
    return rows


def main(folder: str) -> None:
    job = replace(small_job(folder=folder, audit=False), model=EveryPart())
    optimizer = optax.sgd(0.1)
    random = np.random.default_rng(0)
    dense = random.random((BATCH_SIZE, job.data.num_dense), np.float32)
    activations = [random.random((BATCH_SIZE, *shape), np.float32) for shape in job.activation_shapes.values()]
    labels = (random.random(BATCH_SIZE) < 0.5).astype(np.float32)
    weights = np.where(np.arange(BATCH_SIZE) == 7, 0.0, 1.0 + random.random(BATCH_SIZE)).astype(np.float32)
    found: list[dict[str, Any]] = []
    for real in SHARES:
        shares = Shares(num_samples=max(real), real=real)
        params, state = initial(job, jax.random.key(0))
        mesh = Mesh(np.asarray(jax.devices()[: len(real)]), (AXIS,))
        step = jax.jit(
            jax.shard_map(
                partial(training_step, job, optimizer, shares, {}),
                mesh=mesh,
                in_specs=(P(), P(), P(), P(AXIS), P(), P()),
                out_specs=(P(), P(), P(), P(AXIS), P(), Measured.lying(P(AXIS), P())),
                check_vma=False,
            )
        )
        inputs = Inputs(
            dense=spread(dense, shares),
            activations=tuple(spread(values, shares) for values in activations),
            labels=spread(labels, shares),
            weights=spread(weights, shares),
        )
        scale = np.float32(1 / weights.sum())
        after, _, state, gradients, loss, _ = step(
            params, optimizer.init(params), state, inputs, np.uint32(STEP), scale
        )
        found.append(results(loss, after, state, [np.asarray(one)[shares.order] * scale for one in gradients]))
    json.dump({"shares": found, "plain": plain(job, dense, activations, labels, weights)}, sys.stdout)


def plain(
    job: JobConfig, dense: np.ndarray, activations: list[np.ndarray], labels: np.ndarray, weights: np.ndarray
) -> dict[str, Any]:
    """The same step as one would write it for one process, without anything of `workers.model` but the random key."""
    params, state = initial(job, jax.random.key(0))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(job.seed), 1), STEP)
    each = [jax.random.fold_in(key, at) for at in range(BATCH_SIZE)]
    total = weights.sum()
    counts = weights > 0

    def loss_of(params: Any, activations: list[Any]) -> tuple[Any, Any]:
        values = jnp.concatenate([dense, *activations], axis=1)
        mean = values[counts].mean(axis=0)
        variance = ((values[counts] - mean) ** 2).mean(axis=0)
        kept = {"mean": 0.9 * state["mean"] + 0.1 * mean, "variance": 0.9 * state["variance"] + 0.1 * variance}
        values = params["scale"] * (values - mean) / jnp.sqrt(variance + 1e-3)
        mask = jnp.stack([jax.random.bernoulli(one, 0.5, values.shape[1:]) for one in each])
        scores = jnp.where(mask, 2 * values, 0) @ params["w"]
        first = activations[0]
        second = activations[1][:, : first.shape[1]]
        softmax = jax.nn.logsumexp((first @ second.T)[:, counts], axis=1) - (first * second).sum(axis=1)
        losses = optax.sigmoid_binary_cross_entropy(scores, labels) + 0.1 * softmax
        return (losses * weights).sum() / total + 0.01 * (params["w"] ** 2).sum(), kept

    differentiated = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (loss, kept), (dense_gradients, gradients) = differentiated(params, [jnp.asarray(one) for one in activations])
    after = {name: params[name] - 0.1 * dense_gradients[name] for name in params}
    return results(loss, after, kept, gradients)


def results(loss: Any, params: Any, state: Any, gradients: Any) -> dict[str, Any]:
    return {
        "loss": float(loss),
        "params": {name: np.asarray(leaf).tolist() for name, leaf in params.items()},
        "state": {name: np.asarray(leaf).tolist() for name, leaf in state.items()},
        "gradients": [np.asarray(one).tolist() for one in gradients],
    }


if __name__ == "__main__":
    main(sys.argv[1])
