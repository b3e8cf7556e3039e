"""Batches put together, for tests that compare what hosts read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches of one declaration, one batch after the other."""
    first = batches[0]
    return Batch(
        dense=np.concatenate([batch.dense for batch in batches]),
        labels=np.concatenate([batch.labels for batch in batches]),
        weights=np.concatenate([batch.weights for batch in batches]),
        features={name: _joined([batch.features[name] for batch in batches]) for name in first.features},
        sample_ids=np.concatenate([batch.sample_ids for batch in batches]),
        columns={name: np.concatenate([batch.columns[name] for batch in batches]) for name in first.columns},
    )


def _joined(parts: Sequence[Ragged]) -> Ragged:
    """The samples of all parts. One without weights counts as weight 1 if another has some."""
    lengths = np.concatenate([np.diff(part.row_splits) for part in parts])
    weights = None
    if any(part.weights is not None for part in parts):
        ones = [np.ones(part.num_ids, np.float32) if part.weights is None else part.weights for part in parts]
        weights = np.concatenate(ones)
    splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return Ragged(np.concatenate([part.values for part in parts]), splits, weights)
