"""Matrix factorization: ratings from a user's and an item's vector and bias, and likes ordered by BPR.

The first is from Koren, Bell and Volinsky, Matrix factorization techniques for recommender systems, 2009. The second is
from Rendle et al., BPR: Bayesian personalized ranking from implicit feedback, 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podembed import (
    MAE,
    RMSE,
    FeatureConfig,
    GroupedAUC,
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
)
from podembed import (
    bpr as bpr_loss,
)
from podembed.embedding import TruncatedNormal
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.adam import adam
from podembed.jobs.papers.ratings import RatingsSpec, write_ratings


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The product of a user's and an item's vector, with a bias of each and one of all.

    The last number of a vector is its bias.

    Attributes:
      mean: first value of the bias of all.
      penalty: penalty of the squared vectors and biases that a sample uses, half of it counted.
      is_ranked: whether samples have candidates, which BPR orders. Otherwise the label is a rating.
    """

    mean: float = 0.0
    penalty: float = 0.0
    is_ranked: bool = False

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """The bias of all."""
        return {"bias": jnp.asarray(self.mean, jnp.float32)}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        """Ratings `[n]`, or scores `[n, c]`."""
        user, item = batch.activations["user"], batch.activations["item"]
        if self.is_ranked:
            # A user's bias is the same for all candidates, and orders nothing.
            return jnp.einsum("nd,ncd->nc", user[:, :-1], item[..., :-1]) + item[..., -1] + params["bias"]
        return jnp.sum(user[:, :-1] * item[:, :-1], axis=1) + user[:, -1] + item[:, -1] + params["bias"]

    def loss(self, outputs: jax.Array, batch: ModelBatch, context: StepContext) -> jax.Array:
        """`[n]`, with the penalty."""
        squares = sum(
            jnp.sum(vectors.reshape(batch.weights.shape[0], -1) ** 2, 1) for vectors in batch.activations.values()
        )
        fit = bpr_loss(outputs) if self.is_ranked else jnp.square(outputs - batch.label)
        return fit + 0.5 * self.penalty * squares


def mf(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 32,
    penalty: float = 0.1,
    held_out_share: float = 0.1,
    batch_size: int = 512,
    epochs: int = 10,
    learning_rate: float = 3e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """Biased matrix factorization on the ratings themselves, evaluated by RMSE on a random share.

    Args:
      data: folder of the ratings, see `write_ratings`.
      cache: folder where the samples are written, or found.
      penalty: penalty of squared vectors and biases. Its default was chosen by the held-out RMSE on `ml-latest-small`.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    samples = write_ratings(data, cache, RatingsSpec(held_out="random", held_out_share=held_out_share))
    return JobConfig(
        name="mf",
        features={
            "user": FeatureConfig(_table("users", samples.num_users, dim)),
            "item": FeatureConfig(_table("items", samples.num_items, dim)),
        },
        model=Factors(mean=samples.mean_rating, penalty=penalty),
        data=ParquetData(samples.train, eval_paths=samples.evaluation, label="rating"),
        batch_size=batch_size,
        optimizer=adam(learning_rate, is_lazy=is_lazy),
        dense_optimizer=optax.adam(learning_rate),
        num_epochs=epochs,
        seed=seed,
        metrics=(RMSE(), MAE()),
    )


def bpr(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 32,
    penalty: float = 0.01,
    candidates: int | str = 99,
    least_ratings: int = 1,
    batch_size: int = 512,
    epochs: int = 20,
    learning_rate: float = 3e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """Matrix factorization ordered by BPR, with each user's last rating held out, and one negative a sample.

    Args:
      data, cache, penalty: as those of `mf`.
      candidates: items among which the held-out one is ranked, besides itself; `all` ranks it among all that the user
        did not rate.
      least_ratings: users and items with fewer are left out.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    samples = write_ratings(data, cache, RatingsSpec(least_ratings=least_ratings))
    drawn = Negatives(1, without_positives_of="user", evaluation=candidates)
    return JobConfig(
        name="bpr",
        features={
            "user": FeatureConfig(_table("users", samples.num_users, dim)),
            "item": FeatureConfig(_table("items", samples.num_items, dim), max_sequence_length=2),
        },
        model=Factors(penalty=penalty, is_ranked=True),
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
        metrics=(HitRateAt(10), NDCGAt(10), GroupedAUC()),
    )


def _table(name: str, num_rows: int, dim: int) -> TableConfig:
    return TableConfig(num_rows, dim + 1, TruncatedNormal(stddev=0.05), combiner="sum", name=name)
