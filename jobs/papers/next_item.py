"""What jobs declare alike whose models foretell the next item of a history, as `sasrec` and `hstu` do."""

from __future__ import annotations

from typing import Any

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
from podembed.jobs.papers.adam import adam
from podembed.jobs.papers.histories import HistoriesSpec, write_histories

# Candidates that one pass of an evaluation judges; a training sample has as many, which its loss does not read.
SCORED_AT_ONCE = 25


def next_item_job(
    name: str,
    model: Any,
    *,
    data: str,
    cache: str,
    dim: int,
    length: int,
    candidates: int,
    batch_size: int,
    epochs: int,
    learning_rate: float,
    is_lazy: bool,
    seed: int,
    negatives: int = 1,
    times: str | None = None,
) -> JobConfig:
    """Each position of a history against items that the user did not rate; each user's last item is held out.

    Args:
      model: model of the features `history`, `item`, `positives` and `negatives`.
      data: folder of the ratings, see `ratings.write_ratings`.
      cache: folder where the rows are written, or found.
      length: most items of a history, the last ones.
      candidates: items among which the held-out one is ranked, besides itself.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
      negatives: items that each next item is set against.
      times: the column of times that the model reads.
    """
    rows = write_histories(data, cache, HistoriesSpec(length=length, candidates=candidates))
    items = TableConfig(rows.num_items, dim, TruncatedNormal(stddev=0.02), combiner="sum", name="items")
    unseen = Negatives(negatives, without_positives_of="user", only=True)
    return JobConfig(
        name=name,
        features={
            "history": FeatureConfig(items, max_sequence_length=length),
            "positives": FeatureConfig(items, max_sequence_length=length),
            "negatives": FeatureConfig(items, max_sequence_length=length * negatives),
            "item": FeatureConfig(items, max_sequence_length=SCORED_AT_ONCE),
            # For the user's positives alone, which are no negatives. The model does not read it.
            "user": FeatureConfig(TableConfig(rows.num_users, 1, combiner="sum", name="users")),
        },
        model=model,
        data=ParquetData(
            rows.train,
            eval_paths=rows.evaluation,
            label="label",
            features={
                "negatives": IdColumn("positives", negatives=unseen),
                "item": IdColumn("item", negatives=Negatives(SCORED_AT_ONCE - 1, given=1 + candidates)),
            },
            extra=() if times is None else (ListColumn(times, length, "int32"),),
        ),
        batch_size=batch_size,
        optimizer=adam(learning_rate, is_lazy=is_lazy),
        dense_optimizer=optax.adam(learning_rate, b2=0.98),
        num_epochs=epochs,
        seed=seed,
        candidates="item",
        metrics=(HitRateAt(10), NDCGAt(10)),
    )
