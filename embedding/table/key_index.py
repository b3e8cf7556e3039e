"""`KeyIndex`: the one step from the ids of a batch to the rows that have their values.

Everything else here counts in local rows. An index may give rows to ids as they come. Such an index takes the place of
`DenseIndex` and nothing above it changes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.kernels.row_numbers import route, route_bags, rows_of_ids


class KeyIndex(Protocol):
    """Which row of its owner has the values of an id, for one table."""

    def rows_of(self, ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The row of each id (int64 `[n]`) at its owner; -1 for ids that no owner of this index holds.

        Args:
          out: int32 or int64 `[n]`, to be filled and returned; None makes int64.

        Raises:
          ValueError: an id lies outside the table.
        """
        ...

    def route(self, ids: np.ndarray, counts: np.ndarray, rows: np.ndarray, position: np.ndarray) -> None:
        """Sorts ids by their owner and finds the row of each there; arguments as `kernels.row_numbers.route`."""
        ...

    def route_bags(
        self, ids: np.ndarray, row_splits: np.ndarray, weights: np.ndarray | None, *, num_hosts: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Every owner's part of each bag; arguments as `kernels.row_numbers.route_bags`.

        Returns:
          int64 `[num_hosts, B + 1]`, row splits of each owner; int32 `[n]`, the rows, owner after owner; float32 `[n]`,
          their weights, or None.

        Raises:
          ValueError: an id lies outside the table.
        """
        ...


class DenseIndex:
    """The index of a table whose ids are row numbers, cut into buckets.

    An owner has its buckets one after another, rising, so the k-th begins at row `k * rows_per_bucket`.

    Args:
      layout: of the table.
      owners: int `[num_buckets]`, the owner of each bucket, -1 for none; None for one owner of all.
    """

    def __init__(self, layout: BucketLayout, owners: np.ndarray | None = None) -> None:
        self._layout = layout
        self._is_whole = owners is None
        if owners is None:
            owners = np.zeros(layout.num_buckets, np.int32)
        self._owners = np.ascontiguousarray(owners, np.int32)
        # Which of its owner's buckets each one is, counted from 0.
        self._places = np.full(layout.num_buckets, -1, np.int32)
        held = np.flatnonzero(self._owners >= 0)
        held = held[np.argsort(self._owners[held], kind="stable")]
        counts = np.bincount(self._owners[held])
        self._places[held] = np.arange(len(held)) - np.repeat(np.cumsum(counts) - counts, counts)

    def rows_of(self, ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """See `KeyIndex.rows_of`."""
        if out is None:
            out = np.empty(len(ids), np.int64)
        layout = self._layout
        if self._is_whole:
            rows_of_ids(ids, num_buckets=layout.num_buckets, rows_per_bucket=layout.rows_per_bucket, out=out)
            return out
        if len(ids) and not 0 <= ids.min() <= ids.max() < layout.num_rows:
            raise ValueError(
                f"Found ids from {ids.min()} to {ids.max()} for a table of {layout.num_rows} rows. Expected 0 to "
                f"{layout.num_rows - 1}. Check ids before the lookup, or set TableConfig.invalid_ids."
            )
        place = self._places[layout.buckets_of(ids)].astype(np.int64)
        out[...] = np.where(place < 0, -1, place * layout.rows_per_bucket + layout.positions_of(ids))
        return out

    def route(self, ids: np.ndarray, counts: np.ndarray, rows: np.ndarray, position: np.ndarray) -> None:
        """See `KeyIndex.route`. Every bucket must have an owner."""
        route(ids, self._owners, self._places, self._layout.rows_per_bucket, counts, rows, position)

    def route_bags(
        self, ids: np.ndarray, row_splits: np.ndarray, weights: np.ndarray | None, *, num_hosts: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """See `KeyIndex.route_bags`. Every bucket must have an owner, below `num_hosts`."""
        splits, rows = np.empty((num_hosts, len(row_splits)), np.int64), np.empty(len(ids), np.int32)
        routed = np.empty(0 if weights is None else len(ids), np.float32)
        placement = self._owners, self._places, self._layout.rows_per_bucket
        route_bags(ids, row_splits, weights, *placement, splits, rows, routed)
        return splits, rows, None if weights is None else routed

    def bucket_places(self, rows: np.ndarray) -> np.ndarray:
        """Of local rows of one owner, in which of its buckets each lies, counted from 0."""
        return rows // self._layout.rows_per_bucket
