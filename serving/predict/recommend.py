"""`recommend`: the best items of all for each row of some data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.predict.batches import log_of, read_batches
from podembed.serving.predict.committed_model import KEPT_BYTES, CommittedModel, with_commit
from podembed.serving.predict.full_ranking import BlockScores, FullRanking
from podembed.serving.predict.item_values import ItemValues
from podembed.serving.predict.kept_columns import KeptColumns
from podembed.serving.predict.predict import Predicted
from podembed.serving.predict.predicted_rows import rows_in_order, unlabelled, write_rows
from podembed.workers.declared_types import several
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import place


def recommend(
    run: str | os.PathLike[str],
    *,
    top: int,
    data: str | Sequence[str],
    out: str | os.PathLike[str],
    feature: str | None = None,
    items: str | Sequence[str] = (),
    without: str | Sequence[str] | None = None,
    columns: str | Sequence[str] = (),
    commit: str | None = None,
    job: JobConfig | None = None,
    folder: str = "",
    force: bool = False,
    kept_bytes: int = KEPT_BYTES,
) -> Predicted:
    """Writes the best items of all for each row of the data, which needs no labels and no items.

    The file has a list of items, named by the feature, and a list of their scores as `score`. Items are the values of
    the column's vocabulary, as text. Without a vocabulary they are rows of the items' table. The best comes first, and
    of equal scores the lower row. Lists are shorter where fewer items are left.

    Args:
      top: items of each row.
      data, out, columns, commit, job, folder, force, kept_bytes: as for `predict`.
      feature, items, without: as for `rank_all`.

    Raises:
      As `predict` and `rank_all`.
    """

    def write(model: CommittedModel) -> Predicted:
        ranking = FullRanking(model, feature=feature, items=items, without=without, kept_bytes=kept_bytes)
        paths, kept = tuple(map(place, several(data))), several(columns)
        return _recommended(model, ranking, top=top, data=paths, out=place(out), columns=kept, force=force)

    if top < 1:
        raise ConfigurationError(f"Found --top {top}. Expected at least 1. Write how many items a row shall have.")
    return with_commit(run, write, commit=commit, job=job, folder=folder)


def _recommended(
    model: CommittedModel,
    ranking: FullRanking,
    *,
    top: int,
    data: Sequence[str],
    out: str,
    columns: Sequence[str],
    force: bool,
) -> Predicted:
    read, extra = ranking.context()
    declared = unlabelled(ranking.job.resolved_data, data, features=read, columns=extra)
    index, plan = rows_in_order(model, declared, batch_size=ranking.job.batch_size, out=out)
    log = log_of(declared)
    taken = (ranking.feature, "score")
    kept = KeptColumns(declared, index, columns, taken=taken)
    values = ItemValues(ranking.job.resolved_data.id_columns[ranking.feature])
    ranking.ids = values.known(ranking.ids)
    kinds = zip(taken, (pa.list_(values.kind), pa.list_(pa.from_numpy_dtype(ranking.dtype))), strict=True)
    schema = pa.schema([*kept.schema, *(pa.field(name, kind) for name, kind in kinds)])
    left = index.num_rows

    def best() -> Iterator[pa.RecordBatch]:
        nonlocal left
        for found in ranking.looked_up(read_batches(declared, index, plan, bad_rows=log)):
            count = min(left, ranking.job.batch_size)
            left -= count
            ids, scores = _best(ranking.blocks(found, with_own=True), found.batch.num_samples, top, ranking.dtype)
            lengths = np.count_nonzero(~np.isnan(scores[:count]), axis=1)
            is_filled = np.arange(scores.shape[1]) < lengths[:, None]
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            mask = pa.array(found.batch.is_padding[:count])
            parts = (values.of(ids[:count][is_filled]), pa.array(scores[:count][is_filled]))
            lists = [pa.ListArray.from_arrays(offsets, part, mask=mask) for part in parts]
            yield pa.record_batch([*kept.take(count), *lists], schema=schema)

    write_rows(out, schema, best(), force=force)
    return Predicted(
        path=out,
        commit=model.state.manifest.name,
        num_rows=index.num_rows,
        columns=tuple(schema.names),
        bad_rows=log.take(),
    )


def _best(blocks: Iterator[BlockScores], num_samples: int, top: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Ids and scores `[n, top]`, the best first, and of equal ones the lower id; NaN behind the last."""
    ids, scores = np.zeros((num_samples, 0), np.int64), np.zeros((num_samples, 0), dtype)
    for block in blocks:
        more = np.where(block.is_candidate, block.scores, dtype.type(np.nan))
        scores = np.concatenate([scores, more], axis=1)
        ids = np.concatenate([ids, np.broadcast_to(block.ids, more.shape)], axis=1)
        # Ids rise from block to block, and a stable order keeps them so. NaN comes last.
        order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
        ids, scores = (np.take_along_axis(values, order, axis=1) for values in (ids, scores))
    return ids, scores
