"""Full ranking: an evaluation in which every id of a table is a candidate of every sample, block after block.

A block is as large as the room that the feature has. So the memory is that of a training step, however large the table
is. The first part of a batch has the positive id before its block. If its table drops it, the sample has no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.features.id_policies import rows_of
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import IdColumn
from podembed.workers.input.interactions import Interactions
from podembed.workers.input.negative_kernels import mark_others
from podembed.workers.input.read_ahead import StepReader


def ranked_ids(source: IdColumn, known: Interactions | None) -> np.ndarray:
    """The ids among which a positive one is ranked, int64, rising: all that its negatives are drawn from.

    Args:
      source: resolved, with negatives.
      known: known ids of the training files, where the declaration needs them.
    """
    if source.negatives is not None and source.negatives.by == "popularity" and known is not None:
        return np.flatnonzero(known.counts)
    return np.arange(source.first_row, source.vocabulary_size or 0)


@dataclass(frozen=True, slots=True, eq=False)
class Exclusions:
    """The positive id of each sample of a batch, and which ids are none of its candidates.

    Attributes:
      given: int64 `[n]`, a sample's first id, which is the positive one; -1 where it has none.
      own: int64 `[n]`, its row, or the key itself where keys come and go.
      has_own: bool `[n]`, whether there is one.
      begins, ends: int64 `[n]`, where in `ids` those that are left out begin and end.
      ids: rising from each begin to its end.
    """

    given: np.ndarray
    own: np.ndarray
    has_own: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    ids: np.ndarray

    @staticmethod
    def of(
        batch: Batch,
        feature: str,
        *,
        table: TableConfig,
        owner: str | None = None,
        known: Interactions | None = None,
    ) -> Exclusions:
        """Args:
          table: table of the feature, which says what becomes of ids outside it. One that is dropped has no row.
          owner: a feature with one id a sample. What it has in `known` is left out.

        Raises:
          InputError: a sample with ids has none or several of the owner.
        """
        bags = batch.features[feature]
        given, own = np.full((2, batch.num_samples), -1, np.int64)
        real = np.flatnonzero(np.diff(bags.row_splits))
        given[real] = bags.values[bags.row_splits[real]]
        own[real] = rows_of(given[real], table)
        has_own = np.zeros(batch.num_samples, bool)
        has_own[real] = (own[real] >= 0) | (table.dynamic_keys is not None)
        begins, ends = np.zeros_like(own), np.zeros_like(own)
        if owner is None or known is None:
            return Exclusions(given, own, has_own, begins, ends, np.zeros(0, np.int64))
        begins[real], ends[real] = known.spans(known.owner_rows(batch.only_ids(owner, real)))
        return Exclusions(given, own, has_own, begins, ends, known.ids)

    def among(self, block: np.ndarray) -> np.ndarray:
        """bool `[n, c]`: which ids of a block are none of those that are left out, and not the sample's own."""
        found = np.empty((len(self.own), len(block)), bool)
        mark_others(block, self.own, self.has_own, self.begins, self.ends, self.ids, found)
        return found


class AllCandidates:
    """A reader that gives each batch several times, every time with the next block of candidates. Mutated: the batch
    that was read last, which all its parts share.
    """

    def __init__(
        self,
        reader: StepReader,
        *,
        features: Sequence[str],
        source: IdColumn,
        table: TableConfig,
        known: Interactions | None,
        width: int,
        num_parts: int,
    ) -> None:
        """Args:
        features: with the same candidates.
        source: of their ids, resolved, with negatives.
        table: of their ids.
        known: as that of `ranked_ids`.
        width: candidates of a sample in a part.
        """
        self._reader, self._features, self._width, self._num_parts = reader, tuple(features), width, num_parts
        self._ids = ranked_ids(source, known)
        self._owner = source.negatives.without_positives_of if source.negatives else None
        self._known, self._table = known, table
        self._last: tuple[int, Batch, Exclusions] | None = None

    def read(self, step: int) -> Batch:
        """Part `step % num_parts` of the batch of step `step // num_parts`.

        Raises:
          InputError: a sample with ids has none or several of the owner.
        """
        at, part = divmod(step, self._num_parts)
        if self._last is None or self._last[0] != at:
            batch = self._reader.read(at)
            others = Exclusions.of(batch, self._features[0], table=self._table, owner=self._owner, known=self._known)
            self._last = at, batch, others
        _, batch, others = self._last
        first = 0 if part == 0 else part * self._width - 1
        block = self._ids[first : (part + 1) * self._width - 1]
        kept = others.among(block) & others.has_own[:, None]
        ids = np.broadcast_to(block, (batch.num_samples, len(block)))
        if part == 0:
            # As it was given: the lookup finds its row, and counts it where that is another one or none.
            has_one = np.diff(batch.features[self._features[0]].row_splits) > 0
            kept = np.concatenate([has_one[:, None], kept], axis=1)
            ids = np.concatenate([others.given[:, None], ids], axis=1)
        splits = np.concatenate([[0], np.cumsum(np.count_nonzero(kept, axis=1))])
        bags = Ragged(ids[kept], splits)
        return replace(batch, features={**batch.features, **dict.fromkeys(self._features, bags)})

    def close(self) -> None:
        self._reader.close()
