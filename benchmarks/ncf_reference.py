"""NeuMF of `podembed train --job ncf` as one would write it for one process in plain JAX, to compare what both reach.

It shares the files and the candidates of the evaluation with the job. Sampling, the order of the samples, the model and
the optimizer are its own. Prints one JSON line a seed, with HR@10 and NDCG@10 after each
epoch, and those of ranking by popularity.

    python benchmarks/ncf_reference.py --data ml-latest-small --epochs 5 --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet as pq

from podembed.embedding import Ragged
from podembed.jobs.papers.ncf import ncf
from podembed.workers.data.batch import Batch
from podembed.workers.input.candidates import samplers_of

DIM, LAYERS, NEGATIVES, BATCH_SIZE, LEARNING_RATE = 8, (64, 32, 16, 8), 4, 256, 1e-3


def candidates_of(data: str, cache: str, user: np.ndarray, item: np.ndarray, *, seed: int) -> np.ndarray:
    """int64 `[n, 100]`, the held-out item of each user first."""
    job, count = ncf(data=data, cache=cache, seed=seed), len(user)
    batch = Batch(
        dense=np.zeros((count, 0), np.float32),
        labels=np.ones(count, np.float32),
        weights=np.ones(count, np.float32),
        features={"user": Ragged.of_dense(user), "item": Ragged.of_dense(item)},
        sample_ids=np.arange(count),
    )
    sampler = samplers_of(job.resolved_data, None, seed=seed, is_evaluation=True)["item"]
    return sampler.extend(batch).values.reshape(count, -1)


def first_values(seed: int, num_users: int, num_items: int) -> dict[str, Any]:
    """Vectors of users and items, the layers, and the weights of the last one."""
    keys = jax.random.split(jax.random.key(seed), 3 + len(LAYERS))
    width = DIM + LAYERS[0] // 2
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "users": 0.01 * jax.random.truncated_normal(keys[0], -2, 2, (num_users, width)),
        "items": 0.01 * jax.random.truncated_normal(keys[1], -2, 2, (num_items, width)),
        "hidden": [
            (glorot(key, (before, after)), jnp.zeros(after))
            for key, before, after in zip(keys[3:], LAYERS[:-1], LAYERS[1:], strict=False)
        ],
        "w": jax.nn.initializers.lecun_uniform()(keys[2], (DIM + LAYERS[-1], 1))[:, 0],
        "b": jnp.zeros(()),
    }


def scores(params: Any, user: jax.Array, items: jax.Array) -> jax.Array:
    """`[n, c]` of users `[n]` and items `[n, c]`."""
    right = params["items"][items]
    left = jnp.broadcast_to(params["users"][user][:, None], right.shape)
    values = jnp.concatenate([left[..., DIM:], right[..., DIM:]], axis=-1)
    for w, b in params["hidden"]:
        values = jax.nn.relu(values @ w + b)
    return jnp.concatenate([left[..., :DIM] * right[..., :DIM], values], axis=-1) @ params["w"] + params["b"]


def loss(params: Any, user: jax.Array, items: jax.Array) -> jax.Array:
    logits = scores(params, user, items)
    labels = jnp.zeros_like(logits).at[:, 0].set(1.0)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def figures(found: np.ndarray) -> tuple[float, float]:
    """HR@10 and NDCG@10 of scores `[n, c]`; half of what has the score of the held-out item is before it."""
    place = (found[:, 1:] > found[:, :1]).sum(axis=1) + (found[:, 1:] == found[:, :1]).sum(axis=1) / 2
    gain = np.where(place < 10, 1 / np.log2(place + 2), 0.0)
    return round(float((place < 10).mean()), 4), round(float(gain.mean()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--cache", default=".data/movielens")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    folder = Path(ncf(data=given.data, cache=given.cache).data.paths[0]).parent
    (user, item), (eval_user, eval_item) = (
        [pq.read_table(folder / f"{name}-00000.parquet")[column].to_numpy() for column in ("user", "item")]
        for name in ("train", "eval")
    )
    num_users, num_items = max(user.max(), eval_user.max()) + 1, max(item.max(), eval_item.max()) + 1
    is_rated = np.zeros((num_users, num_items), bool)
    is_rated[user, item] = True
    optimizer = optax.adam(LEARNING_RATE)

    @jax.jit
    def step(params: Any, state: Any, user: jax.Array, items: jax.Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, user, items), state, params)
        return optax.apply_updates(params, updates), state

    for seed in given.seeds:
        random, reached = np.random.default_rng(seed), []
        candidates = candidates_of(given.data, given.cache, eval_user, eval_item, seed=seed)
        params = first_values(seed, num_users, num_items)
        state = optimizer.init(params)
        for _ in range(given.epochs):
            drawn = random.integers(0, num_items, (len(user), NEGATIVES))
            while (wrong := is_rated[user[:, None], drawn]).any():
                drawn[wrong] = random.integers(0, num_items, int(wrong.sum()))
            items, order = np.concatenate([item[:, None], drawn], axis=1), random.permutation(len(user))
            for first in range(0, len(user), BATCH_SIZE):
                rows = order[first : first + BATCH_SIZE]
                params, state = step(params, state, jnp.asarray(user[rows]), jnp.asarray(items[rows]))
            found = scores(params, jnp.asarray(eval_user), jnp.asarray(candidates))
            reached.append(figures(np.asarray(found)))
        popularity = figures(np.bincount(item, minlength=num_items)[candidates])
        print(json.dumps({"seed": seed, "hr_and_ndcg": reached, "popularity": popularity}), flush=True)


if __name__ == "__main__":
    main()
