"""All items of a table as candidates of every sample, block after block: what `rank_all` and `recommend` share.

The samples of a batch are looked up once. A block of items is read once for each batch. Memory is that of one block,
whatever the table's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.predict.batches import looked_up
from podembed.serving.predict.committed_model import CommittedModel, CommittedRows
from podembed.serving.predict.items import LeftOut, ids_in, positives_of
from podembed.serving.predict.pooled_rows import LookedUp, PooledRows
from podembed.serving.predict.portable_forward import read_by_scores
from podembed.serving.predict.predicted_rows import with_all
from podembed.serving.predict.ranking_forward import RankingForward
from podembed.serving.predict.trained_forward import SCORED_PARTS
from podembed.workers.data.batch import Batch
from podembed.workers.declared_types import several
from podembed.workers.device.dense_half import DenseStateError
from podembed.workers.input.all_candidates import Exclusions, ranked_ids
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import place


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockScores:
    """Scores of a batch with a block of items.

    Attributes:
      ids: int64 `[c]`, rows of the items' table, rising.
      scores: `[n, c]`, float32, or float64 where the model gives that or integers.
      is_candidate: bool `[n, c]`, False where an item is left out for a sample.
    """

    ids: np.ndarray
    scores: np.ndarray
    is_candidate: np.ndarray


class FullRanking:
    """Scores of samples with all items, or with those of some files.

    Attributes:
      feature: feature of the items.
      ids: int64, rising, the rows that are ranked, or the keys where these come and go.
      users: the feature by which what a user has is left out, or would be by default; None where there is none.
    """

    def __init__(
        self,
        model: CommittedModel,
        *,
        feature: str | None,
        items: str | Sequence[str],
        without: str | Sequence[str] | None,
        kept_bytes: int,
    ) -> None:
        """Args:
        feature: of the items; None for the candidates of the job.
        items: files with a column of that feature, whose ids alone are ranked; without any, all of the table.
        without: features whose items are left out, see `rank_all`.
        kept_bytes: of tables, in memory.

        Raises:
          ConfigurationError: the job has no such features, or its scores are not those of single items.
          InputError: files cannot be read.
        """
        job = model.job
        self.feature = feature or job.candidates or ""
        if not self.feature:
            raise ConfigurationError(
                f"Found no candidates in the job '{job.name}'. Expected the feature of the items to rank, one of "
                f"{list(job.features)}. Pass --rank-all FEATURE."
            )
        try:
            dense = model.dense(SCORED_PARTS)
            self._forward = RankingForward(job, dense, feature=self.feature, step=model.state.manifest.step)
        except DenseStateError as error:
            raise ConfigurationError(f"{error} It is the model of {model.state.location}.") from error
        source, self._table = job.resolved_data.id_columns[self.feature], job.features[self.feature].table
        declared = source.negatives
        owner = declared and declared.without_positives_of
        if without is None:
            without = () if owner is None else (owner,)
        items, without = tuple(map(place, several(items))), several(without)
        self._left_out = LeftOut(model, without, feature=self.feature)
        self.users = next(iter(self._left_out.owners), owner)
        self._model, self._without = model, without
        self._tables = {id(table): at for at, table in enumerate(job.tables)}
        self._rows = CommittedRows(model, kept_bytes=kept_bytes)
        self._pooled = PooledRows(self.job, self._rows, is_padded=True)
        if items:
            self.ids = ids_in(model, items, self.feature)
        elif source.outside == "any":
            self.ids = self._rows.keys(self._tables[id(self._table)])
        else:
            by_popularity = declared is not None and declared.by == "popularity"
            self.ids = ranked_ids(source, positives_of(model, self.feature) if by_popularity else None)

    @property
    def dtype(self) -> np.dtype:
        """The type of scores."""
        return self._forward.dtype

    @property
    def job(self) -> JobConfig:
        """The job with room for a block of items, and without anything that is drawn."""
        return self._forward.job

    def context(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """Features that the scores or the exclusions read, except the items'; and extra columns that the scores
        read.
        """
        features, columns = read_by_scores(self._model.job, step=self._model.state.manifest.step)
        read = features.union(self._without) - {*self._forward.features}
        return tuple(name for name in self.job.features if name in read), columns

    def looked_up(self, batches: Iterable[Batch]) -> Iterator[LookedUp]:
        """Batches with their activations. Items that were not read are empty."""
        return looked_up((with_all(batch, self.job) for batch in batches), self._pooled)

    def positives(self, found: LookedUp) -> BlockScores:
        """Each sample's first id as its only candidate, `[n, 1]`. It is none where a sample has no id, or one
        that the table drops.
        """
        positives = Exclusions.of(found.batch, self.feature, table=self._table)
        own, real = positives.own, np.flatnonzero(positives.has_own)
        distinct, number = np.unique(own[real], return_inverse=True)
        scores = np.full((len(own), 1), np.nan, self._forward.dtype)
        for first in range(0, len(distinct), self._forward.block_size):
            block = self._scores(found, distinct[first : first + self._forward.block_size])
            here = (number >= first) & (number < first + block.shape[1])
            scores[real[here], 0] = block[real[here], number[here] - first]
        return BlockScores(ids=own, scores=scores, is_candidate=positives.has_own[:, None])

    def blocks(self, found: LookedUp, *, with_own: bool = False) -> Iterator[BlockScores]:
        """Every block of items but those that are left out.

        Args:
          with_own: whether the ids of a sample are among its candidates, and samples without ids have some.
        """
        left_out, own = self._left_out.of(found.batch), Exclusions.of(found.batch, self.feature, table=self._table)
        is_sample = ~found.batch.is_padding[:, None]
        for first in range(0, len(self.ids), self._forward.block_size):
            ids = self.ids[first : first + self._forward.block_size]
            kept = is_sample & np.ones(len(ids), bool) if with_own else own.among(ids) & own.has_own[:, None]
            for others in left_out:
                kept &= others.among(ids)
            yield BlockScores(ids=ids, scores=self._scores(found, ids), is_candidate=kept)

    def _scores(self, found: LookedUp, ids: np.ndarray) -> np.ndarray:
        """`[n, len(ids)]`. The last block is filled up, so that one program does for all."""
        filled = np.concatenate([ids, np.full(self._forward.block_size - len(ids), ids[-1])])
        block = {}
        for name in self._forward.features:
            table = self.job.features[name].table
            rows = self._rows.rows(self._tables[id(table)], ids)
            if table.quantization_config is not None:
                table.quantization_config.apply(rows)
            block[name] = rows[np.searchsorted(ids, filled)]
        return self._forward.scores(found, block)[:, : len(ids)]
