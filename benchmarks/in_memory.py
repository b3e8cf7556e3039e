"""Input that takes no work: the batches of a workload, held in memory and used in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.workload import renewed, turns_of
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.config import ParquetData
from podembed.workers.input.lanes import LanePlan


@dataclass(frozen=True)
class InMemory(ParquetData):
    """Batches that lie in a folder. Each host loads its own samples when it starts.

    Attributes:
      bench: name of the workload.
      new: share of ids that are others in each round of the batches, see `workload.renewed`.
      num_rows: of each table, by feature, if ids become others.
    """

    bench: str = ""
    new: float = 0.0
    num_rows: tuple[tuple[str, int], ...] = ()

    def load(self, samples: slice) -> Sequence[Batch]:
        """Some samples of every batch."""
        raise NotImplementedError

    def open_reader(self, plan: LanePlan, lanes: range) -> BatchesInTurn:
        width = plan.rows_per_lane_step
        return BatchesInTurn(self.load(slice(lanes.start * width, lanes.stop * width)), self.new, dict(self.num_rows))


class BatchesInTurn:
    """After the last batch comes the first.

    Args:
      new, num_rows: as of `InMemory`.
    """

    def __init__(self, batches: Sequence[Batch], new: float = 0.0, num_rows: Mapping[str, int] | None = None) -> None:
        self._batches, self._new, self._num_rows = batches, new, num_rows or {}
        self._turns = [
            {name: turns_of(bags.values, new) for name, bags in batch.features.items()} if new else {}
            for batch in batches
        ]

    def read(self, step: int) -> Batch:
        number, at = divmod(step, len(self._batches))
        batch, turns = self._batches[at], self._turns[at]
        features = {
            name: replace(
                bags,
                values=renewed(
                    bags.values, turns[name], self._new, number=number, num_rows=self._num_rows.get(name, 0)
                ),
            )
            for name, bags in batch.features.items()
            if name in turns
        }
        return replace(batch, features={**batch.features, **features})

    def close(self) -> None:
        self._batches = []


def batch_of(dense: np.ndarray, labels: np.ndarray, features: Mapping[str, Ragged]) -> Batch:
    """A batch whose samples all count once."""
    return Batch(
        dense=dense,
        labels=labels,
        weights=np.ones(len(labels), np.float32),
        features=dict(features),
        sample_ids=np.arange(len(labels)),
    )
