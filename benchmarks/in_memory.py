"""Input that takes no work: the batches of a workload, held in memory and used in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.config import ParquetData
from podembed.workers.input.lanes import LanePlan


@dataclass(frozen=True)
class InMemory(ParquetData):
    """Batches that lie in a folder. Each host loads its own samples when it starts.

    Attributes:
      bench: name of the workload.
    """

    bench: str = ""

    def load(self, samples: slice) -> Sequence[Batch]:
        """Some samples of every batch."""
        raise NotImplementedError

    def open_reader(self, plan: LanePlan, lanes: range) -> BatchesInTurn:
        width = plan.rows_per_lane_step
        return BatchesInTurn(self.load(slice(lanes.start * width, lanes.stop * width)))


class BatchesInTurn:
    """After the last batch comes the first."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def read(self, step: int) -> Batch:
        return self._batches[step % len(self._batches)]

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
