"""One training step with corrected softmaxes over 1, 2 and 3 devices of the processor, and in plain JAX. Prints JSON.

The sampled softmax takes the chances of the draws off, the one of the batch the frequencies of the items.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.workers.data.columns import IdColumn, Negatives
from podembed.workers.data.config import ParquetData
from podembed.workers.device.dense_half import initial
from podembed.workers.device.measures.step_measures import Measured
from podembed.workers.device.options import AXIS
from podembed.workers.device.programs import Inputs, training_step
from podembed.workers.job.job import JobConfig
from podembed.workers.model.batch import ModelBatch
from podembed.workers.model.context import Shares, StepContext
from podembed.workers.model.losses import in_batch_softmax, sampled_softmax

BATCH_SIZE, WIDTH, C = 12, 4, 5
SHARES = [(12,), (7, 5), (4, 4, 4), (6, 4, 2)]


class Towers:
    """The users' vectors are scaled, so that there is a parameter."""

    def init(self, key: jax.Array, spec: Any) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (spec.widths["user"],))}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        user, items = batch.activations["user"] * params["w"], batch.activations["item"]
        return {"scores": jnp.einsum("nd,ncd->nc", user, items), "user": user, "item": items[:, 0]}

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        log_share = batch.log_frequency["item"][:, 0]
        of_batch = in_batch_softmax(outputs["user"], outputs["item"], context, batch, log_q=log_share, temperature=0.5)
        return sampled_softmax(outputs["scores"], log_q=batch.log_q["item"]) + of_batch


def job() -> JobConfig:
    declared = Negatives(C - 1, by="popularity", log_q=True, log_frequency=True)
    return JobConfig(
        name="towers",
        features={
            "user": FeatureConfig(TableConfig(50, WIDTH, combiner="sum")),
            "item": FeatureConfig(TableConfig(50, WIDTH, combiner="sum"), max_sequence_length=C),
        },
        model=Towers(),
        data=ParquetData("none", label="y", features={"item": IdColumn("item", negatives=declared)}),
        batch_size=BATCH_SIZE,
        num_lanes=1,
        candidates="item",
    )


def spread(values: np.ndarray, shares: Shares) -> np.ndarray:
    """Samples `[batch_size, ...]` as the rows of all devices, with zeros as padding."""
    rows = np.zeros((len(shares.positions), *values.shape[1:]), values.dtype)
    rows[shares.order] = values
    return rows


def main() -> None:
    random = np.random.default_rng(0)
    users = random.normal(size=(BATCH_SIZE, WIDTH)).astype(np.float32)
    items = random.normal(size=(BATCH_SIZE, C, WIDTH)).astype(np.float32)
    chances = {f"item/{kind}": np.log(random.random((BATCH_SIZE, C))).astype(np.float32) for kind in KINDS}
    weights = np.where(np.arange(BATCH_SIZE) == 7, 0.0, 1.0 + random.random(BATCH_SIZE)).astype(np.float32)
    found = [over_devices(real, users, items, chances, weights) for real in SHARES]
    json.dump({"shares": found, "plain": plain(users, items, chances, weights)}, sys.stdout)


KINDS = ("log_q", "log_frequency")
Chances = dict[str, np.ndarray]


def over_devices(
    real: tuple[int, ...], users: np.ndarray, items: np.ndarray, chances: Chances, weights: np.ndarray
) -> Any:
    declared, shares = job(), Shares(num_samples=max(real), real=real)
    params, state = initial(declared, jax.random.key(0))
    optimizer = optax.sgd(0.1)
    step = jax.jit(
        jax.shard_map(
            partial(training_step, declared, optimizer, shares, {"item": C}),
            mesh=Mesh(np.asarray(jax.devices()[: len(real)]), (AXIS,)),
            in_specs=(P(), P(), P(), P(AXIS), P(), P()),
            out_specs=(P(), P(), P(), P(AXIS), P(), Measured.lying(P(AXIS), P())),
            check_vma=False,
        )
    )
    inputs = Inputs(
        dense=spread(np.zeros((BATCH_SIZE, 0), np.float32), shares),
        # Padding comes behind the samples of a device, so its positions follow those of the samples.
        activations=(spread(users, shares), spread(items, shares).reshape(-1, WIDTH)),
        labels=spread(np.ones(BATCH_SIZE, np.float32), shares),
        weights=spread(weights, shares),
        lengths={"item": spread(np.full(BATCH_SIZE, C, np.int32), shares)},
        columns={key: spread(values, shares) for key, values in chances.items()},
    )
    scale = np.float32(1 / weights.sum())
    after, _, _, (of_users, of_items), loss, _ = step(
        params, optimizer.init(params), state, inputs, np.uint32(0), scale
    )
    of_items = np.asarray(of_items).reshape(-1, C, WIDTH)
    return results(loss, after["w"], np.asarray(of_users)[shares.order] * scale, of_items[shares.order] * scale)


def plain(users: np.ndarray, items: np.ndarray, chances: Chances, weights: np.ndarray) -> Any:
    """The same step as one would write it for one process."""
    first, _ = initial(job(), jax.random.key(0))
    counts = weights > 0
    log_q, log_share = chances["item/log_q"], chances["item/log_frequency"][:, 0]

    def loss_of(w: Any, users: Any, items: Any) -> Any:
        user = users * w
        sampled = jnp.einsum("nd,ncd->nc", user, items) - log_q
        of_batch = user @ items[:, 0].T / 0.5 - log_share
        own = jnp.diagonal(of_batch)
        losses = jax.nn.logsumexp(sampled, axis=1) - sampled[:, 0]
        losses += jax.nn.logsumexp(of_batch[:, counts], axis=1) - own
        return (losses * weights).sum() / weights.sum()

    loss, (of_w, of_users, of_items) = jax.value_and_grad(loss_of, argnums=(0, 1, 2))(
        first["w"], jnp.asarray(users), jnp.asarray(items)
    )
    return results(loss, first["w"] - 0.1 * of_w, of_users, of_items)


def results(loss: Any, *arrays: Any) -> dict[str, Any]:
    return {"loss": float(loss), "arrays": [np.asarray(one).tolist() for one in arrays]}


if __name__ == "__main__":
    main()
