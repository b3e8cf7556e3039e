"""Factorization machines on ratings: FM predicts the stars, and DeepFM whether there are four or more.

The sources are Rendle, Factorization machines, 2010, and Guo, Tang, Ye, Li and He, DeepFM: a factorization-machine
based neural network for CTR prediction, 2017. Features are the user, the item, and the user's other items as one bag,
divided by the square root of their number. A random share of the ratings is held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podembed import MAE, RMSE, FeatureConfig, JobConfig, Model, ModelBatch, ParquetData, StepContext, TableConfig
from podembed.embedding import TruncatedNormal
from podembed.jobs.models import FM, DeepFM
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.adam import adam
from podembed.jobs.papers.ratings import RatingsSpec, write_ratings


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingFM(FM):
    """FM with squared error and a penalty.

    Attributes:
      penalty: penalty of the squared numbers of all vectors that a sample looks up, half of it counted.
    """

    penalty: float = 0.0

    def loss(self, outputs: jax.Array, batch: ModelBatch, context: StepContext) -> jax.Array:
        """`[n]`."""
        squares = sum(jnp.sum(vectors**2, axis=1) for vectors in batch.activations.values())
        return jnp.square(outputs - batch.label) + 0.5 * self.penalty * squares


def fm(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 16,
    penalty: float = 0.05,
    held_out_share: float = 0.1,
    history_length: int = 100,
    batch_size: int = 512,
    epochs: int = 10,
    learning_rate: float = 3e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """FM on the ratings themselves, evaluated by RMSE.

    Args:
      data: folder of the ratings, see `write_ratings`.
      cache: folder where the samples are written, or found.
      dim: factors.
      penalty: penalty of squared vectors.
      history_length: most other items of a user, the last ones.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    spec = RatingsSpec(held_out="random", held_out_share=held_out_share, history_length=history_length)
    samples = write_ratings(data, cache, spec)
    model = RatingFM(bias=samples.mean_rating, penalty=penalty)
    return _job(
        "fm",
        (samples.num_users, samples.num_items),
        model,
        ParquetData(samples.train, eval_paths=samples.evaluation, label="rating"),
        dim=dim,
        batch_size=batch_size,
        epochs=epochs,
        learning_rate=learning_rate,
        is_lazy=is_lazy,
        seed=seed,
        metrics=(RMSE(), MAE()),
    )


def deepfm(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 8,
    layers: tuple[int, ...] = (64, 32),
    dropout: float = 0.5,
    is_normalized: bool = True,
    held_out_share: float = 0.1,
    history_length: int = 100,
    batch_size: int = 512,
    epochs: int = 5,
    learning_rate: float = 1e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """DeepFM on whether a rating has four stars or more, evaluated by AUC and log loss.

    Args:
      data, cache, history_length, is_lazy: as those of `fm`.
      dim: factors.
      layers, dropout, is_normalized: as in `DeepFM`.
    """
    spec = RatingsSpec(held_out="random", held_out_share=held_out_share, history_length=history_length)
    samples = write_ratings(data, cache, spec)
    return _job(
        "deepfm",
        (samples.num_users, samples.num_items),
        DeepFM(layers=tuple(layers), dropout=dropout, is_normalized=is_normalized),
        ParquetData(samples.train, eval_paths=samples.evaluation, label="liked"),
        dim=dim,
        batch_size=batch_size,
        epochs=epochs,
        learning_rate=learning_rate,
        is_lazy=is_lazy,
        seed=seed,
    )


def _job(
    name: str,
    sizes: tuple[int, int],
    model: Model,
    data: ParquetData,
    *,
    dim: int,
    epochs: int,
    learning_rate: float,
    is_lazy: bool,
    **settings: Any,
) -> JobConfig:
    num_users, num_items = sizes

    def feature(table: str, num_rows: int) -> FeatureConfig:
        # The last number of a vector is the weight of its linear term.
        made = TableConfig(num_rows, dim + 1, TruncatedNormal(stddev=0.05), combiner="sqrtn", name=table)
        return FeatureConfig(made)

    return JobConfig(
        name=name,
        features={
            "user": feature("users", num_users),
            "item": feature("items", num_items),
            "history": feature("rated", num_items),
        },
        model=model,
        data=data,
        optimizer=adam(learning_rate, is_lazy=is_lazy),
        dense_optimizer=optax.adam(learning_rate),
        num_epochs=epochs,
        **settings,
    )
