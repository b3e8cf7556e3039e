"""SASRec: the next item of a user's history, foretold by self-attention (Kang and McAuley 2018).

The model is `jobs.models.sasrec`. Each position of a history is trained against one item that the user did not rate,
which is new in every epoch. An evaluation ranks the held-out item by the state after the last position.
"""

from __future__ import annotations

from podembed import JobConfig
from podembed.jobs.models.sasrec import SASRec
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.next_item import next_item_job


def sasrec(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    dim: int = 50,
    length: int = 50,
    blocks: int = 2,
    heads: int = 1,
    dropout: float = 0.5,
    candidates: int = 99,
    batch_size: int = 128,
    epochs: int = 100,
    learning_rate: float = 1e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """SASRec on the ratings of MovieLens as likes, with each user's last one held out.

    Args:
      data: folder of the ratings, see `ratings.write_ratings`.
      cache: folder where the rows are written, or found.
      length: most items of a history, the last ones.
      candidates: items among which the held-out one is ranked, besides itself.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
    """
    model = SASRec(
        history="history",
        item="item",
        positives="positives",
        negatives="negatives",
        blocks=blocks,
        heads=heads,
        dropout=dropout,
    )
    return next_item_job(
        "sasrec",
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
    )
