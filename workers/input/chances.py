"""How likely the ids of a sample are drawn, and how often they are positive: what corrected losses take off scores.

`Chances` knows it of one feature whose column declares negatives. It is a function of the training files and of the
sample alone. So it is the same at any number of hosts and after a restart.

Negatives are drawn again and again until one is free: it is none of the sample's own ids, and none that the user has.
So id j is drawn with the probability q(j) / f, where q is the declared distribution and f what it gives to all free
ids. After `MAX_TRIES` draws the last one stands, free or not. That makes it q(j) (1 - (1 - f)^tries) / f.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.workers.data.columns import IdColumn
from podembed.workers.input.interactions import Interactions
from podembed.workers.input.negative_kernels import MAX_TRIES, add_chances, free_shares


class Chances:
    """Chances of the ids of one feature. Calls change nothing.

    Memory is 12 bytes a row of the table with popularity, and 4 with frequencies. Where positives of a user are left
    out, it is 8 bytes a row of the user's table.
    """

    def __init__(self, source: IdColumn, known: Interactions | None) -> None:
        """Args:
        source: resolved, with negatives.
        known: of the training files, where the declaration needs them.
        """
        self._source, self._known = source, known
        self._first_row = source.first_row
        self._num_rows = max(1, (source.vocabulary_size or 0) - source.first_row)
        declared = source.negatives
        self._chances, self._log_chances = np.zeros(0), np.zeros(0, np.float32)
        self._log_frequencies = np.zeros(0, np.float32)
        self._known_shares = np.zeros(0)
        if declared is None or known is None:
            return
        if declared.log_frequency:
            self._log_frequencies = _logs(known.counts.astype(np.float64))
        if not declared.log_q:
            return
        if declared.by == "popularity":
            weights = np.where(known.counts > 0, known.counts ** float(declared.alpha), 0.0)
            self._chances, self._log_chances = weights / weights.sum(), _logs(weights)
        if declared.without_positives_of is not None:
            self._known_shares = np.empty(len(known.splits) - 1)
            add_chances(known.splits, known.ids, self._chances, self._first_row, self._num_rows, self._known_shares)

    def log_q(self, own: Ragged, ids: Ragged, owners: np.ndarray, *, width: int) -> np.ndarray:
        """float32 `[n, width]`: the logarithm of the probability with which a draw for the sample gives each id. One
        that cannot be drawn for it, such as the positive one, has what it would have if it were free itself.

        Args:
          own: the ids of the column.
          ids: ids of the feature.
          owners: int64 `[n]`, the row of each sample's owner, whose positives are not drawn; -1 without one.
        """
        free = np.empty(own.num_samples)
        begins, ends, known_ids = np.zeros_like(owners), np.zeros_like(owners), np.zeros(0, np.int32)
        known_shares = np.zeros(own.num_samples)
        if self._known is not None and len(self._known_shares):
            begins, ends = self._known.spans(owners)
            known_ids = self._known.ids
            known_shares = np.where(owners >= 0, self._known_shares[np.maximum(owners, 0)], 0.0)
        free_shares(
            self._source.rows_of(own.values),
            own.row_splits,
            begins,
            ends,
            known_ids,
            known_shares,
            self._chances,
            self._first_row,
            self._num_rows,
            free,
        )
        # All free ids together are drawn with 1 - (1 - free)^tries.
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(free > 0, -np.expm1(MAX_TRIES * np.log1p(-free)) / free, MAX_TRIES)
        rows = self._source.rows_of(ids.values)
        logs = self._log_chances[rows] if len(self._log_chances) else np.float32(-np.log(self._num_rows))
        return _padded(np.repeat(np.log(factors), np.diff(ids.row_splits)) + logs, rows, ids.row_splits, width)

    def log_frequency(self, ids: Ragged, *, width: int) -> np.ndarray:
        """float32 `[n, width]`: the logarithm of the share of each id among those of positive training samples."""
        rows = self._source.rows_of(ids.values)
        return _padded(self._log_frequencies[rows], rows, ids.row_splits, width)


def _logs(weights: np.ndarray) -> np.ndarray:
    """float32, of the shares of weights; a weight of 0 counts as 1, which is that of an id that occurs once."""
    return np.log(np.where(weights > 0, weights, 1.0) / weights.sum()).astype(np.float32)


def _padded(values: np.ndarray, rows: np.ndarray, splits: np.ndarray, width: int) -> np.ndarray:
    """float32 `[n, width]`: the first values of each sample, and 0 behind them. One without a row has 0, too."""
    lengths = np.diff(splits)
    out = np.zeros((len(lengths), width), np.float32)
    is_kept = np.arange(len(values)) - np.repeat(splits[:-1], lengths) < width
    out[np.arange(width) < lengths[:, None]] = np.where(rows >= 0, values, 0.0)[is_kept]
    return out
