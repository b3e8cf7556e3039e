"""HSTU: the next item of a user's history, foretold by attention without a softmax (Zhai et al. 2024).

The model is `jobs.models.hstu`. The next item of each position is set against items that the user did not rate. These
are new in every epoch. How long ago an item was rated counts, too. An evaluation ranks the held-out item by the state
after the last position.
"""

from __future__ import annotations

import optax

from podembed import (
    FeatureConfig,
    HitRateAt,
    IdColumn,
    JobConfig,
    ListColumn,
    NDCGAt,
    Negatives,
    ParquetData,
    TableConfig,
)
from podembed.embedding import TruncatedNormal
from podembed.jobs.models.hstu import HSTU
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.adam import adam
from podembed.jobs.papers.histories import HistoriesSpec, write_histories

# Candidates that one pass of an evaluation judges; a training sample has as many, which its loss does not read.
SCORED_AT_ONCE = 25


def hstu(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 50,
    length: int = 50,
    blocks: int = 2,
    heads: int = 1,
    temperature: float = 0.05,
    dropout: float = 0.2,
    negatives: int = 16,
    has_times: bool = True,
    candidates: int = 99,
    batch_size: int = 128,
    epochs: int = 100,
    learning_rate: float = 1e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """HSTU on the ratings of MovieLens as likes, with each user's last one held out.

    Args:
      data: folder of the ratings, see `ratings.write_ratings`.
      cache: folder where the rows are written, or found.
      length: most items of a history, the last ones.
      negatives: items that each next item is set against.
      has_times: whether the time between two ratings counts, besides the places between them.
      candidates: items among which the held-out one is ranked, besides itself.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    rows = write_histories(data, cache, HistoriesSpec(length=length, candidates=candidates))
    items = TableConfig(rows.num_items, dim, TruncatedNormal(stddev=0.02), combiner="sum", name="items")
    unseen = Negatives(negatives, without_positives_of="user", only=True)
    return JobConfig(
        name="hstu",
        features={
            "history": FeatureConfig(items, max_sequence_length=length),
            "positives": FeatureConfig(items, max_sequence_length=length),
            "negatives": FeatureConfig(items, max_sequence_length=length * negatives),
            "item": FeatureConfig(items, max_sequence_length=SCORED_AT_ONCE),
            # For the user's positives alone, which are no negatives. The model does not read it.
            "user": FeatureConfig(TableConfig(rows.num_users, 1, combiner="sum", name="users")),
        },
        model=HSTU(
            history="history",
            item="item",
            positives="positives",
            negatives="negatives",
            times="times" if has_times else None,
            blocks=blocks,
            heads=heads,
            temperature=temperature,
            dropout=dropout,
        ),
        data=ParquetData(
            rows.train,
            eval_paths=rows.evaluation,
            label="label",
            features={
                "negatives": IdColumn("positives", negatives=unseen),
                "item": IdColumn("item", negatives=Negatives(SCORED_AT_ONCE - 1, given=1 + candidates)),
            },
            extra=(ListColumn("times", length, "int32"),) if has_times else (),
        ),
        batch_size=batch_size,
        optimizer=adam(learning_rate, is_lazy=is_lazy),
        dense_optimizer=optax.adam(learning_rate, b2=0.98),
        num_epochs=epochs,
        seed=seed,
        candidates="item",
        metrics=(HitRateAt(10), NDCGAt(10)),
    )
