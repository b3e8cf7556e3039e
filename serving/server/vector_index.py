"""`VectorIndex`: vectors of items, searched for those with the largest inner products with a user's.

Up to a million items a search compares all. More are put into lists around centers (IVF), of which a search reads the
nearest ones: as many as find 99 % of the best items, at most half of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError

MOST_FLAT = 1_000_000
"""Items up to which a search compares all."""
TOP, SPREAD = 100, 4
"""Recall is the share of the best `TOP` items among `SPREAD` times as many candidates."""
_RECALL = 0.99
_FEWEST_LISTS, _PART = 8, 2
# Training vectors for each center. faiss takes 256 by default, for centers that are hardly better.
_POINTS = 64


class VectorIndex:
    """See the module. Nothing changes, so any thread may search.

    Args:
      vectors: float32 `[n, width]`.
      users: float32 `[m, width]`, for which recall is measured.
      most_flat: items up to which a search compares all.

    Attributes:
      width: numbers of a vector.
      recall: share of the best items that a search finds; 1 where it compares all.

    Raises:
      ConfigurationError: faiss is not installed.
    """

    def __init__(self, vectors: np.ndarray, users: np.ndarray, *, most_flat: int = MOST_FLAT) -> None:
        faiss = _faiss()
        self._num_items, self.width = vectors.shape
        self.recall = 1.0
        self.is_flat = len(vectors) <= most_flat
        if self.is_flat:
            self._index: Any = faiss.IndexFlatIP(self.width)
            self._index.add(vectors)
            return
        num_lists = int(2 * len(vectors) ** 0.5)
        # faiss does not keep what holds the centers.
        self._centers = faiss.IndexFlatIP(self.width)
        self._index = faiss.IndexIVFFlat(self._centers, self.width, num_lists, faiss.METRIC_INNER_PRODUCT)
        self._index.cp.max_points_per_centroid = _POINTS
        self._index.train(vectors)
        self._index.add(vectors)
        best = [set(places.tolist()) for places in best_of(vectors, users)]
        self._index.nprobe = _FEWEST_LISTS
        while True:
            self.recall = share_found(best, [set(self.search(user, TOP * SPREAD).tolist()) for user in users])
            if self.recall >= _RECALL or 2 * self._index.nprobe > num_lists // _PART:
                return
            self._index.nprobe *= 2

    def search(self, user: np.ndarray, count: int, allowed: np.ndarray | None = None) -> np.ndarray:
        """int64, places of the items with the largest products, the best first; fewer where there are no more.

        Args:
          user: float32 `[width]`.
          count: number of items.
          allowed: bool `[n]`, which items may be among them.
        """
        faiss = _faiss()
        selector = None if allowed is None else faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        if self.is_flat:
            parameters = faiss.SearchParameters(sel=selector)
        else:
            # The fewer items are allowed, the more lists have as many of them.
            share = 1.0 if allowed is None else max(float(allowed.mean()), 1 / self._index.nlist)
            num_lists = min(self._index.nlist, int(np.ceil(self._index.nprobe / share)))
            parameters = faiss.SearchParametersIVF(sel=selector, nprobe=num_lists)
        query = np.ascontiguousarray(user[None], np.float32)
        _, found = self._index.search(query, min(count, self._num_items), params=parameters)
        return found[0][found[0] >= 0]


def best_of(vectors: np.ndarray, users: np.ndarray) -> list[np.ndarray]:
    """The places of the `TOP` items with the largest products with each user, in any order."""
    count = min(TOP, len(vectors))
    return [np.argpartition(vectors @ user, len(vectors) - count)[-count:] for user in users]


def share_found(best: Sequence[set[Any]], found: Sequence[set[Any]]) -> float:
    """Of the best items of each user the share that was found, averaged."""
    return float(np.mean([len(one & other) / len(one) for one, other in zip(best, found, strict=True)]))


def _faiss() -> Any:
    try:
        import faiss  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]
    except ImportError as error:
        raise ConfigurationError(
            "Found no package faiss. Expected it, since the vectors of a model with two towers are searched with it. "
            "Install podembed[retrieval]."
        ) from error
    # Of the calling thread alone. For one query two threads take twice the time of processors, which others need.
    faiss.omp_set_num_threads(1)
    return faiss
