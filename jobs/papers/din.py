"""DIN: whether a user likes an item, judged by the items of the history that matter for it (Zhou et al. 2018).

The model is `jobs.models.din`. Each rating is a sample, with the ratings before it as the history. Items that the user
did not rate stand beside it, new in every epoch. The loss judges each by itself, as a click or none.
"""

from __future__ import annotations

import optax

from podembed import FeatureConfig, HitRateAt, IdColumn, JobConfig, NDCGAt, Negatives, ParquetData, TableConfig
from podembed.embedding import TruncatedNormal
from podembed.jobs.models.din import DIN
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.adam import adam
from podembed.jobs.papers.ratings import RatingsSpec, write_ratings


def din(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 16,
    length: int = 50,
    attention: tuple[int, ...] = (36,),
    hidden: tuple[int, ...] = (80, 40),
    negatives: int = 1,
    candidates: int | str = 99,
    least_ratings: int = 1,
    batch_size: int = 256,
    epochs: int = 3,
    learning_rate: float = 0.02,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """DIN on the ratings of MovieLens as clicks, with each user's last one held out.

    Args:
      data: folder of the ratings, see `ratings.write_ratings`.
      cache: folder where the samples are written, or found.
      length: most items of a history, the last ones before the sample.
      attention: hidden widths of the layers that weigh the history.
      hidden: hidden widths of the layers that score.
      candidates: items among which the held-out one is ranked, besides itself; `all` ranks it among all that the user
        did not rate.
      least_ratings: users and items with fewer are left out.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    spec = RatingsSpec(least_ratings=least_ratings, history_length=length, history_of="before")
    samples = write_ratings(data, cache, spec)
    items = TableConfig(samples.num_items, dim, TruncatedNormal(stddev=0.05), combiner="sum", name="items")
    drawn = Negatives(negatives, without_positives_of="user", evaluation=candidates)
    return JobConfig(
        name="din",
        features={
            "history": FeatureConfig(items, max_sequence_length=length),
            "item": FeatureConfig(items, max_sequence_length=1 + negatives),
            # The paper's features of the user's profile.
            "user": FeatureConfig(
                TableConfig(samples.num_users, dim, TruncatedNormal(stddev=0.05), combiner="sum", name="users")
            ),
        },
        model=DIN(target="item", history="history", attention=tuple(attention), hidden=tuple(hidden)),
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
