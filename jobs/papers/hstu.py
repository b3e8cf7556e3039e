"""HSTU: the next item of a user's history, foretold by attention without a softmax (Zhai et al. 2024).

The model is `jobs.models.hstu`. The next item of each position is set against items that the user did not rate. These
are new in every epoch. How long ago an item was rated counts, too. An evaluation ranks the held-out item by the state
after the last position.
"""

from __future__ import annotations

from podembed import JobConfig
from podembed.jobs.models.hstu import HSTU
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.next_item import next_item_job


def hstu(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 50,
    length: int = 50,
    blocks: int = 2,
    heads: int = 1,
    temperature: float = 0.2,
    dropout: float = 0.5,
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
      temperature, dropout: temperature and dropout of the model. The authors have 0.05 and 0.2 for a million ratings
        and more, beside 128 negatives and histories of 200. With so few ratings as in `ml-latest-small` these learn the
        histories by heart.
      negatives: items that each next item is set against.
      has_times: whether the time between two ratings counts, besides the places between them.
      candidates: items among which the held-out one is ranked, besides itself.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    model = HSTU(
        history="history",
        item="item",
        positives="positives",
        negatives="negatives",
        times="times" if has_times else None,
        blocks=blocks,
        heads=heads,
        temperature=temperature,
        dropout=dropout,
    )
    return next_item_job(
        "hstu",
        model,
        data=data,
        cache=cache,
        dim=dim,
        length=length,
        candidates=candidates,
        batch_size=batch_size,
        epochs=epochs,
        learning_rate=learning_rate,
        is_lazy=is_lazy,
        seed=seed,
        negatives=negatives,
        times="times" if has_times else None,
    )
