"""Two towers with a softmax over the items of the batch, corrected for how often each is in one.

The source is Yi, Yang, Hong, Cheng, Heldt, Kumthekar, Zhao, Wei and Chi, Sampling-bias-corrected neural modeling for
large corpus item recommendations, 2019. The paper estimates how often an item comes; here the training files are
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podembed import (
    FeatureConfig,
    HitRateAt,
    IdColumn,
    IntegerColumn,
    JobConfig,
    ModelBatch,
    ModelSpec,
    NDCGAt,
    Negatives,
    ParquetData,
    StepContext,
    TableConfig,
    in_batch_softmax,
)
from podembed.embedding import TruncatedNormal
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.adam import adam
from podembed.jobs.papers.ratings import RatingsSpec, write_ratings


@dataclass(frozen=True, slots=True, kw_only=True)
class Towers:
    """A vector of length 1 of the user and one of each candidate, and their product.

    The extra column `item` is the item's number.

    Attributes:
      hidden: widths of each tower's layers; the last is that of its vector.
      temperature: temperature by which products are divided.
      is_corrected: whether the logarithm of the item's share of the training samples is taken off in training.
    """

    hidden: tuple[int, ...] = (64, 32)
    temperature: float = 0.1
    is_corrected: bool = True

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """Layers of both towers."""
        user_key, item_key = jax.random.split(key)
        widths = spec.widths
        return {
            "user": _layers(user_key, widths["user"] + widths["history"], self.hidden),
            "item": _layers(item_key, widths["item"], self.hidden),
        }

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        """`scores` `[n, c]`, and the vectors of the `user` `[n, width]` and of the `items` `[n, c, width]`."""
        activations = batch.activations
        user = _tower(params["user"], jnp.concatenate([activations["user"], activations["history"]], axis=-1))
        items = _tower(params["item"], activations["item"])
        return {"scores": jnp.einsum("nd,ncd->nc", user, items) / self.temperature, "user": user, "items": items}

    def loss(self, outputs: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        """`[n]`, over the items of all samples of the batch."""
        log_q = batch.log_frequency["item"][:, 0] if self.is_corrected else None
        ids, item = batch.columns["item"], outputs["items"][:, 0]
        return in_batch_softmax(
            outputs["user"], item, context, batch, log_q=log_q, ids=ids, temperature=self.temperature
        )


def _layers(key: jax.Array, width: int, widths: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    layers = []
    for after in widths:
        key, own = jax.random.split(key)
        layers.append({"w": jax.nn.initializers.glorot_uniform()(own, (width, after)), "b": jnp.zeros(after)})
        width = after
    return layers


def _tower(layers: list[dict[str, jax.Array]], values: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        values = jax.nn.relu(values @ layer["w"] + layer["b"])
    values = values @ layers[-1]["w"] + layers[-1]["b"]
    return values / jnp.sqrt(jnp.sum(values**2, axis=-1, keepdims=True) + 1e-12)


def two_tower(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 32,
    hidden: tuple[int, ...] = (64, 32),
    temperature: float = 0.1,
    is_corrected: bool = True,
    history_length: int = 50,
    candidates: int | str = 99,
    least_ratings: int = 1,
    batch_size: int = 512,
    epochs: int = 10,
    learning_rate: float = 1e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """Two towers on the ratings of MovieLens as likes, with each user's last one held out.

    Args:
      data: folder of the ratings, see `write_ratings`.
      cache: folder where the samples are written, or found.
      hidden, temperature, is_corrected: as in `Towers`.
      history_length: most other items of a user that its tower gets.
      candidates: items among which the held-out one is ranked, besides itself; `all` ranks it among all that the user
        did not rate.
      least_ratings: users and items with fewer are left out.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    samples = write_ratings(data, cache, RatingsSpec(least_ratings=least_ratings, history_length=history_length))

    def table(name: str, num_rows: int) -> TableConfig:
        return TableConfig(num_rows, dim, TruncatedNormal(stddev=0.05), combiner="mean", name=name)

    items = table("items", samples.num_items)
    # In training the other samples of a batch have the negatives.
    drawn = Negatives(0, without_positives_of="user", evaluation=candidates, log_frequency=True)
    return JobConfig(
        name="two_tower",
        features={
            "user": FeatureConfig(table("users", samples.num_users)),
            "history": FeatureConfig(items),
            "item": FeatureConfig(items, max_sequence_length=1),
        },
        model=Towers(hidden=tuple(hidden), temperature=temperature, is_corrected=is_corrected),
        data=ParquetData(
            samples.train,
            eval_paths=samples.evaluation,
            label="label",
            extra=(IntegerColumn("item"),),
            features={"item": IdColumn("item", negatives=drawn)},
        ),
        batch_size=batch_size,
        optimizer=adam(learning_rate, is_lazy=is_lazy),
        dense_optimizer=optax.adam(learning_rate),
        num_epochs=epochs,
        seed=seed,
        candidates="item",
        metrics=(HitRateAt(10), NDCGAt(10)),
    )
