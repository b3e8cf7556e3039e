"""HSTU of `podembed train --job hstu` as one would write it for one process in plain JAX, and what single choices are
worth. Prints one JSON line: by choice, HR@10 and NDCG@10 of each seed after some epochs.

    python benchmarks/hstu_reference.py --data ml-latest-small --seeds 0 1 2 3 4 --choices job first_values=glorot

It shares the histories and the candidates of the evaluation with the job. Negatives, the order of the users, the model
and the optimizer are its own. A run is `job`, or differs from it as a choice says, such as
`first_values=glorot,time=own`:

first_values  `small`: weights of standard deviation 0.02 and no biases; `glorot`: Glorot's, and small random biases.
time          what a position compares the times of others with: its `own`, or the `next` item's, which is when the
              model is asked.
rows_b2       b2 of Adam for the vectors of items; that of all else is 0.98.
mean          of losses: over all `positions` of a batch, or over `users`, of the mean of each.
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

from podembed.jobs.papers.hstu import hstu
from podembed.jobs.papers.ratings import read_ratings

DIM, LENGTH, BLOCKS, NEGATIVES, BATCH_SIZE = 50, 50, 2, 16, 128
TEMPERATURE, DROPOUT, LEARNING_RATE, TIME_BUCKETS = 0.2, 0.5, 1e-3, 31
JOB = {"first_values": "small", "time": "own", "rows_b2": "0.999", "mean": "users"}


def read(data: str, cache: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Of users that have a held-out item: `train` and `eval` `[n, LENGTH + 1]` items from the first to the last, filled
    with -1 from the left, and the times of each; candidates `[n, 100]`; and whether a user rated an item.
    """
    ratings = read_ratings(data)[1]()
    user, item = (np.unique(ratings[name].to_numpy(), return_inverse=True)[1] for name in ("user", "item"))
    time = ratings["time"].to_numpy().astype(np.int64)
    is_rated = np.zeros((user.max() + 1, item.max() + 1), bool)
    is_rated[user, item] = True
    folder = Path(hstu(data=data, cache=cache).data.eval_paths[0]).parent
    held_out = pq.read_table(folder / "eval-00000.parquet")
    users = held_out["user"].to_numpy()
    order = np.lexsort((item, time, user))
    rows: dict[str, np.ndarray] = {}
    for name, without in (("train", 1), ("eval", 0)):
        for column, values in (("items", item), ("times", time)):
            rows[f"{name} {column}"] = np.full((len(users), LENGTH + 1), -1)
            for row, number in enumerate(users):
                own = values[order][user[order] == number]
                own = own[: len(own) - without][-(LENGTH + 1) :]
                rows[f"{name} {column}"][row, LENGTH + 1 - len(own) :] = own
    return rows, np.stack(held_out["item"].to_numpy()), is_rated[users]


def first_values(key: jax.Array, num_items: int, choice: dict[str, str]) -> dict[str, Any]:
    """Vectors of items and places, and the blocks."""

    def layer(key: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        if choice["first_values"] == "small":
            return 0.02 * jax.random.normal(key, (DIM, width)), jnp.zeros(width)
        weight_key, bias_key = jax.random.split(key)
        spread = np.sqrt(2 / (DIM + width))
        return spread * jax.random.normal(weight_key, (DIM, width)), width**-0.5 * jax.random.normal(bias_key, (width,))

    keys = jax.random.split(key, 2 + 4 * BLOCKS)
    return {
        "items": 0.02 * jax.random.truncated_normal(keys[0], -2, 2, (num_items, DIM)),
        "dense": {
            "places": DIM**-0.5 * jax.random.normal(keys[1], (LENGTH, DIM)),
            "blocks": [
                {
                    "uvqk": layer(keys[at], 4 * DIM),
                    "out": layer(keys[at + 1], DIM),
                    "place": 0.02 * jax.random.normal(keys[at + 2], (LENGTH,)),
                    "time": 0.02 * jax.random.normal(keys[at + 3], (TIME_BUCKETS,)),
                }
                for at in range(2, 2 + 4 * BLOCKS, 4)
            ],
        },
    }


def standardized(x: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-12)


def states(params: Any, items: jax.Array, times: jax.Array, time: str, key: jax.Array | None) -> jax.Array:
    """`[n, LENGTH, DIM]` of `[n, LENGTH + 1]`, of which the last ones are what is foretold. Without dropout if there is
    no key.
    """

    def dropped(x: jax.Array, number: int) -> jax.Array:
        if key is None:
            return x
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - DROPOUT, x.shape)
        return jnp.where(kept, x / (1 - DROPOUT), 0.0)

    history, mask = items[:, :-1], items[:, :-1] >= 0
    # Histories end at the right here. Places count from a user's first item, as in the job.
    place = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    apart = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    sees = (apart >= 0) & mask[:, None, :]
    asked = times[:, 1:] if time == "next" else times[:, :-1]
    between = jnp.maximum(jnp.abs(asked[:, :, None] - times[:, None, :-1]), 1)
    is_in = jnp.log2(between).astype(int)[..., None] == jnp.arange(TIME_BUCKETS)
    x = dropped(params["items"][history] * DIM**0.5 + params["dense"]["places"][place], 0)
    for number, block in enumerate(params["dense"]["blocks"], start=1):
        w, b = block["uvqk"]
        u, v, q, k = jnp.split(jax.nn.silu(standardized(x) @ w + b), 4, axis=2)
        bias = block["place"][jnp.maximum(apart, 0)] + jnp.where(is_in, block["time"], 0.0).sum(axis=-1)
        weights = jnp.where(sees, jax.nn.silu(jnp.einsum("nqd,nkd->nqk", q, k) + bias) / LENGTH, 0.0)
        w, b = block["out"]
        x = x + dropped(u * standardized(weights @ v), number) @ w + b
    return unit(x)


def loss(params: Any, items: jax.Array, times: jax.Array, negatives: jax.Array, key: jax.Array, choice: Any) -> Any:
    """Of a batch; `negatives` `[n, LENGTH, NEGATIVES]`."""
    found = states(params, items, times, choice["time"], key)
    shown = jnp.concatenate([items[:, 1:, None], negatives], axis=2)
    logits = jnp.einsum("nld,nlkd->nlk", found, unit(params["items"][shown])) / TEMPERATURE
    losses = jax.nn.logsumexp(logits, axis=2) - logits[:, :, 0]
    counts = items[:, :-1] >= 0
    sums = jnp.where(counts, losses, 0.0).sum(axis=1)
    if choice["mean"] == "positions":
        return sums.sum() / counts.sum()
    return (sums / counts.sum(axis=1)).mean()


def figures(found: np.ndarray) -> tuple[float, float]:
    """HR@10 and NDCG@10 of scores `[n, c]`; half of what has the score of the held-out item is before it."""
    place = (found[:, 1:] > found[:, :1]).sum(axis=1) + (found[:, 1:] == found[:, :1]).sum(axis=1) / 2
    gain = np.where(place < 10, 1 / np.log2(place + 2), 0.0)
    return round(float((place < 10).mean()), 4), round(float(gain.mean()), 4)


def choice_of(text: str) -> dict[str, str]:
    pairs = dict(pair.split("=") for pair in text.split(",")) if text != "job" else {}
    if not pairs.keys() <= JOB.keys():
        raise SystemExit(f"Found --choices {text}. Expected `job`, or name=value of {sorted(JOB)}.")
    return JOB | pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--cache", default=".data/movielens")
    parser.add_argument("--epochs", type=int, nargs="+", default=[25, 50, 75], help="after which to evaluate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--choices", nargs="+", default=["job"])
    given = parser.parse_args()
    rows, candidates, is_rated = read(given.data, given.cache)
    reached: dict[str, list[Any]] = {text: [] for text in given.choices}
    for text in given.choices:
        choice = choice_of(text)
        optimizer = optax.multi_transform(
            {
                "items": optax.adam(LEARNING_RATE, b2=float(choice["rows_b2"])),
                "dense": optax.adam(LEARNING_RATE, b2=0.98),
            },
            {"items": "items", "dense": "dense"},
        )

        @jax.jit
        def step(params: Any, state: Any, *batch: jax.Array, choice: Any = choice, optimizer: Any = optimizer) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(params, *batch, choice), state, params)
            return optax.apply_updates(params, updates), state

        @jax.jit
        def scores(params: Any, items: Any, times: Any, shown: Any, choice: Any = choice) -> Any:
            user = states(params, items, times, choice["time"], None)[:, -1]
            return jnp.einsum("nd,ncd->nc", user, unit(params["items"][shown]))

        for seed in given.seeds:
            random, key = np.random.default_rng(seed), jax.random.key(seed)
            params = first_values(key, is_rated.shape[1], choice)
            state, of_seed = optimizer.init(params), []
            for epoch in range(1, max(given.epochs) + 1):
                order = random.permutation(len(candidates))
                for first in range(0, len(order), BATCH_SIZE):
                    users = order[first : first + BATCH_SIZE]
                    drawn = random.integers(0, is_rated.shape[1], (len(users), LENGTH, NEGATIVES))
                    while (wrong := is_rated[users[:, None, None], drawn]).any():
                        drawn[wrong] = random.integers(0, is_rated.shape[1], int(wrong.sum()))
                    key, of_step = jax.random.split(key)
                    params, state = step(
                        params, state, rows["train items"][users], rows["train times"][users], drawn, of_step
                    )
                if epoch in given.epochs:
                    found = scores(params, rows["eval items"], rows["eval times"], candidates)
                    of_seed.append(figures(np.asarray(found)))
            reached[text].append(of_seed)
    print(json.dumps({"epochs": given.epochs, "hr_and_ndcg": reached}), flush=True)


if __name__ == "__main__":
    main()
