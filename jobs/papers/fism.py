"""FISM: an item is as good as it fits the user's other items.

The source is Kabbur, Ning and Karypis, FISM: factored item similarity models for top-N recommender systems, 2013. The
items of the user are looked up once for all candidates of a sample. The loss is BPR, as in FISMauc up to its form.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from podembed import (
    FeatureConfig,
    HitRateAt,
    IdColumn,
    JobConfig,
    ModelBatch,
    ModelSpec,
    NDCGAt,
    Negatives,
    ParquetData,
    StepContext,
    TableConfig,
    bpr,
)
from podembed.embedding import TruncatedNormal
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.adam import adam
from podembed.jobs.papers.ratings import RatingsSpec, write_ratings


class FISM:
    """Scores `[n, c]`: the user's other items times the candidate, and the candidate's bias.

    The vectors of these items are added and divided by the square root of their number. The last number of a
    candidate's vector is its bias.
    """

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """A scale of all scores, first 1."""
        return {"scale": jnp.ones(())}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        """Scores `[n, c]`."""
        history, item = batch.activations["history"], batch.activations["item"]
        return params["scale"] * (jnp.einsum("nd,ncd->nc", history, item[..., :-1]) + item[..., -1])

    def loss(self, outputs: jax.Array, batch: ModelBatch, context: StepContext) -> jax.Array:
        """`[n]`."""
        return bpr(outputs)


def fism(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 16,
    negatives: int = 4,
    history_length: int = 100,
    candidates: int | str = 99,
    least_ratings: int = 1,
    batch_size: int = 256,
    epochs: int = 15,
    learning_rate: float = 1e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """FISM on the ratings of MovieLens as likes, with each user's last one held out.

    Args:
      data: folder of the ratings, see `write_ratings`.
      cache: folder where the samples are written, or found.
      history_length: most other items of a user, the last ones.
      candidates: items among which the held-out one is ranked, besides itself; `all` ranks it among all that the user
        did not rate.
      least_ratings: users and items with fewer are left out.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    samples = write_ratings(data, cache, RatingsSpec(least_ratings=least_ratings, history_length=history_length))

    def table(name: str, width: int) -> TableConfig:
        return TableConfig(samples.num_items, width, TruncatedNormal(stddev=0.05), combiner="sum", name=name)

    drawn = Negatives(negatives, without_positives_of="user", evaluation=candidates)
    return JobConfig(
        name="fism",
        features={
            "history": FeatureConfig(table("rated", dim), combiner="sqrtn"),
            "item": FeatureConfig(table("candidates", dim + 1), max_sequence_length=1 + negatives),
            # For the user's positives alone, which are no negatives. The model does not read it.
            "user": FeatureConfig(TableConfig(samples.num_users, 1, combiner="sum", name="users")),
        },
        model=FISM(),
        data=ParquetData(
            samples.train,
            eval_paths=samples.evaluation,
            label="label",
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
