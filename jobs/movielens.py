"""Movies that a user will like, with two towers, on ratings in MovieLens' form (`jobs.movielens_files` says how samples
are made).

Copy this file to write a retrieval job of your own. It has an id of the user, bags of what the user did before, an
item, and negatives.
"""

from __future__ import annotations

import optax

from podembed import Baseline, FeatureConfig, JobConfig, ParquetData, RecallAt, TableConfig
from podembed.embedding import Adagrad, TruncatedNormal
from podembed.jobs.datasets import MovieLensSpec, write_movielens
from podembed.jobs.models import TwoTowers

DEFAULT_CACHE = ".data/movielens"


def movielens(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    k: int = 10,
    history_length: int = 50,
    train_negatives: int = 4,
    eval_candidates: int = 200,
    batch_size: int = 1024,
    epochs: int = 2,
    dim: int = 32,
    learning_rate: float = 0.1,
    dense_learning_rate: float = 1e-3,
    seed: int = 0,
) -> JobConfig:
    """Two towers on the likes of each user, evaluated on the last of them by AUC and recall@k beside what popularity
    reaches.

    A user's candidates are the held-out likes and `eval_candidates` movies that the user did not rate, drawn evenly.
    Figures are comparable only where the candidates are; with as many candidates as movies, nothing is drawn and the
    whole catalogue is ranked.

    Args:
      data: folder of the ratings, see `write_movielens`.
      cache: folder where the samples are written, or found.
      k: k of recall@k.
      history_length: most movies of a history.
      train_negatives: samples of label 0 for each of label 1.
    """
    spec = MovieLensSpec(
        history_length=history_length, train_negatives=train_negatives, eval_candidates=eval_candidates, recall_k=k
    )
    samples = write_movielens(data, cache, spec)
    recall = RecallAt(k, group_by="user")

    def table(name: str, num_rows: int) -> TableConfig:
        return TableConfig(num_rows, dim, TruncatedNormal(stddev=0.05), combiner="mean", name=name)

    return JobConfig(
        name="movielens",
        features={
            "user": FeatureConfig(table("users", samples.num_users)),
            # The more somebody has liked, the more is known: unlike a mean, this grows with the bag. A movie is another
            # thing as a memory than as a candidate, so it has a row in each of two tables.
            "history": FeatureConfig(table("liked_movies", samples.num_movies), combiner="sqrtn"),
            "history_genres": FeatureConfig(table("liked_genres", samples.num_genres)),
            "movie": FeatureConfig(table("movies", samples.num_movies)),
            "genres": FeatureConfig(table("genres", samples.num_genres)),
        },
        model=TwoTowers(user=("user", "history", "history_genres"), item=("movie", "genres")),
        data=ParquetData(
            str(samples.folder / "train-*.parquet"),
            eval_paths=str(samples.folder / "eval-*.parquet"),
            label="label",
        ),
        batch_size=batch_size,
        optimizer=Adagrad(learning_rate, initial_accumulator_value=1e-6),
        dense_optimizer=optax.adam(dense_learning_rate),
        num_epochs=epochs,
        seed=seed,
        metrics=(recall,),
        baseline=Baseline(
            name="popularity", figures={"AUC": samples.popularity_auc, recall.name: samples.popularity_recall}
        ),
    )
