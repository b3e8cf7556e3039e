"""From the ids of a batch to the bags that are looked up: what `TPUEmbedding` does with its inputs in `enqueue`.

Rows of sequences are cut by position first, then ids outside a vocabulary are dropped, clipped or hashed as their table
says. A dropped id therefore leaves its position empty. Most features need neither and pass through as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.features.bags import by_position
from podembed.embedding.features.ids import fit_ids
from podembed.embedding.ragged import Ragged
from podembed.workers.job.feature_shapes import keeps_positions
from podembed.workers.job.job import JobConfig
from podembed.workers.job.sequence_rooms import cut_to


class Bags:
    """The bags of a job's batches. Mutated: the counts of altered ids."""

    def __init__(self, job: JobConfig) -> None:
        # Per feature its table's number, its table, and the positions a sample is cut into; 0 for none.
        self._rules: dict[str, tuple[int, TableConfig, int]] = {}
        self._sequences = job.sequences
        numbers = {id(table): at for at, table in enumerate(job.tables)}
        for name, feature in job.features.items():
            inner = job.activation_shapes[name][:-1]
            positions = math.prod(inner) if keeps_positions(feature, inner) else 0
            if positions or feature.table.invalid_ids != "error":
                self._rules[name] = numbers[id(feature.table)], feature.table, positions
        self._altered = np.zeros(len(job.tables), np.int64)

    def of(self, features: Mapping[str, Ragged], *, counted: Collection[str] | None = None) -> Mapping[str, Ragged]:
        """By feature, one bag for each vector that the lookup shall return. Those of a sequence are the positions that
        there are: where they go is known once all hosts have said how many they have.

        Args:
          counted: the features whose altered ids count; None for all. Others come again with ids that were counted.
        """
        if not self._rules:
            return features
        return {
            name: self._bags(name, rows, counts=counted is None or name in counted) for name, rows in features.items()
        }

    def lengths(self, name: str, rows: Ragged) -> np.ndarray:
        """Positions that the samples of a sequence have, `[num_samples]`. One whose id was dropped counts."""
        return np.minimum(np.diff(rows.row_splits), self._sequences[name])

    def positions(self, name: str) -> int:
        """Into how many bags a sample of a feature is cut; 0 where it is one bag."""
        return self._rules[name][2] if name in self._rules else 0

    def take_altered(self) -> tuple[int, ...]:
        """Per table, how many ids were dropped, clipped or hashed since the last call."""
        counts, self._altered = self._altered, np.zeros_like(self._altered)
        return tuple(int(count) for count in counts)

    def _bags(self, name: str, rows: Ragged, *, counts: bool) -> Ragged:
        if name not in self._rules:
            return rows
        number, table, positions = self._rules[name]
        if name in self._sequences:
            bags = cut_to(rows, positions)
        else:
            bags = by_position(rows, positions) if positions else rows
        if table.invalid_ids != "error":
            bags, count = fit_ids(name, bags, table)
            self._altered[number] += count if counts else 0
        return bags
