"""`TableProfile`: what samples ask of one table, measured on a batch.

How many distinct rows a batch names decides what an update touches and what messages carry. It is kept as a curve over
the number of samples, so that other batches and other numbers of hosts can be asked about. Between two points, and
beyond them, it is a power law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import feature_bindings

HOT_ROWS = 256
"""So many of a table's most frequent rows are looked at together."""
MAX_SAMPLES = 1 << 15
"""Most samples of a batch that are read. The number of rows that more of them name follows from the curve."""
_HALVINGS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TableProfile:
    """What samples ask of one table.

    Attributes:
      ids_per_sample: per feature of the table, the mean.
      distinct: numbers of samples, rising, and the distinct rows that so many name.
      hot_share: share of the ids that name one of the `HOT_ROWS` most frequent rows.
    """

    ids_per_sample: tuple[float, ...]
    distinct: tuple[tuple[float, float], ...]
    hot_share: float

    def rows(self, samples: float, *, num_rows: int) -> float:
        """Distinct rows that so many samples name, of a table of so many rows."""
        most = min(float(num_rows), samples * sum(self.ids_per_sample))
        points = [(count, rows) for count, rows in self.distinct if rows > 0]
        if not points or samples <= 0:
            return 0.0
        if len(points) == 1:
            count, rows = points[0]
            return min(most, rows * samples / count)
        at = 1
        while at < len(points) - 1 and points[at][0] < samples:
            at += 1
        (low, few), (high, many) = points[at - 1], points[at]
        # Twice as many samples never name more than twice as many rows.
        slope = min(1.0, max(0.0, math.log(many / few) / math.log(high / low)))
        return max(1.0 if most >= 1 else most, min(most, many * (samples / high) ** slope))

    @property
    def distinct_share(self) -> float:
        """Distinct rows over ids, in the largest batch that was looked at."""
        count, rows = self.distinct[-1] if self.distinct else (0.0, 0.0)
        ids = count * sum(self.ids_per_sample)
        return rows / ids if ids else 0.0


def joined(profiles: Sequence[TableProfile]) -> TableProfile:
    """The profile of one table: the mean of the profiles of several hosts' shares of a batch. Shares of unequal size
    are compared at the sizes of the first.
    """
    first, count = profiles[0], len(profiles)
    lengths = zip(*(profile.ids_per_sample for profile in profiles), strict=True)
    sizes = [size for size, _ in first.distinct]
    most = max((int(rows) for profile in profiles for _, rows in profile.distinct), default=0)
    return TableProfile(
        ids_per_sample=tuple(sum(of_feature) / count for of_feature in lengths),
        distinct=tuple(
            (size, sum(profile.rows(size, num_rows=most) for profile in profiles) / count) for size in sizes
        ),
        hot_share=sum(profile.hot_share for profile in profiles) / count,
    )


def profiles_of(job: JobConfig, batch: Batch) -> list[TableProfile]:
    """Per table of the job, from a batch that is there already."""
    bindings = feature_bindings(job)
    return [
        _profile([batch.features[feature.name] for feature in bindings if feature.table == at])
        for at in range(len(job.tables))
    ]


def _profile(features: Sequence[Ragged]) -> TableProfile:
    """The profile of the features of one table."""
    bags = [_first(ragged, MAX_SAMPLES) for ragged in features]
    count = bags[0].num_samples if bags else 0
    ids = np.concatenate([ragged.values for ragged in bags]) if bags else np.zeros(0, np.int64)
    _, times = np.unique(ids, return_counts=True)
    hot = np.sort(times)[-HOT_ROWS:].sum()
    sizes = sorted({max(1, count >> halving) for halving in range(_HALVINGS)})
    curve = tuple(
        (float(size), float(len(np.unique(np.concatenate([_first(ragged, size).values for ragged in bags])))))
        for size in (sizes if bags else ())
    )
    return TableProfile(
        ids_per_sample=tuple(ragged.num_ids / max(1, count) for ragged in bags),
        distinct=curve,
        hot_share=float(hot / len(ids)) if len(ids) else 0.0,
    )


def _first(ragged: Ragged, samples: int) -> Ragged:
    """The bags of the first samples."""
    splits = ragged.row_splits[: min(samples, ragged.num_samples) + 1]
    return Ragged(ragged.values[: splits[-1]], splits)
