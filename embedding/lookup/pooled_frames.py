"""What a host asks of the owner of whole tables, as one frame of numbers.

A frame is int64. It begins with the numbers of bags and of ids for each feature, and whether the ids have weights. The
features' row splits, all rows as int32 and all weights follow. An owner reads it with suspicion, since kernels follow
its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.ragged import Ragged
from podembed.embedding.table.key_index import KeyIndex


@dataclass(frozen=True, slots=True, eq=False)
class BagRows:
    """What one host asks for one feature: int32 local rows, int64 splits, float32 weights or None."""

    rows: np.ndarray
    row_splits: np.ndarray
    weights: np.ndarray | None

    @property
    def num_bags(self) -> int:
        return len(self.row_splits) - 1


def frame_of(parts: Sequence[tuple[KeyIndex, Ragged]]) -> np.ndarray:
    """The frame of some features: per feature the index of its table, and its bags.

    Raises:
      ValueError: an id lies outside its table.
    """
    sizes = _Sizes(
        num_features=len(parts),
        num_bags=sum(bags.num_samples for _, bags in parts),
        num_ids=sum(bags.num_ids for _, bags in parts),
        num_weights=sum(bags.num_ids for _, bags in parts if bags.weights is not None),
    )
    frame = np.empty(sizes.num_words, np.int64)
    head, splits, rows, weights = sizes.cut(frame)
    first = first_weight = first_split = 0
    for number, (index, bags) in enumerate(parts):
        head[number] = bags.num_samples, bags.num_ids, bags.weights is not None
        splits[first_split : first_split + len(bags.row_splits)] = bags.row_splits
        first_split += len(bags.row_splits)
        index.rows_of(bags.values, rows[first : first + bags.num_ids])
        first += bags.num_ids
        if bags.weights is not None:
            weights[first_weight : first_weight + bags.num_ids] = bags.weights
            first_weight += bags.num_ids
    return frame


def read_frame(frame: np.ndarray, *, num_features: int, host: int) -> list[BagRows]:
    """The features of a frame, as views of it. Rows are not compared with any table.

    Args:
      host: that sent it.

    Raises:
      ValueError: it is no frame of so many features.
    """
    head = frame[: 3 * num_features]
    is_frame = len(head) == 3 * num_features and bool(((head >= 0) & (head <= 2 * len(frame))).all())
    num_bags, num_ids, is_weighted = head.reshape(-1, 3).T if is_frame else np.zeros((3, num_features), np.int64)
    sizes = _Sizes(
        num_features=num_features,
        num_bags=int(num_bags.sum()),
        num_ids=int(num_ids.sum()),
        num_weights=int(num_ids[is_weighted != 0].sum()),
    )
    if not is_frame or len(frame) != sizes.num_words:
        raise ValueError(
            f"Found a request of {len(frame)} words from host {host}. Expected {sizes.num_ids} rows of {num_features} "
            "features. Check that both hosts are of one generation."
        )
    _, splits, rows, weights = sizes.cut(frame)
    ends = np.cumsum(num_bags + 1)
    if num_features and _are_bad(splits, ends, num_bags, num_ids):
        raise ValueError(
            f"Found row splits from host {host} that fall or miss ids. Expected them to rise from 0 to the number of "
            "ids."
        )
    found, first, first_weight = [], 0, 0
    for number in range(num_features):
        count, stop = int(num_ids[number]), int(ends[number])
        own_weights = None
        if is_weighted[number]:
            own_weights = weights[first_weight : first_weight + count]
            first_weight += count
        own_splits = splits[stop - int(num_bags[number]) - 1 : stop]
        found.append(BagRows(rows[first : first + count], own_splits, own_weights))
        first += count
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How long the parts of a frame are."""

    num_features: int
    num_bags: int
    num_ids: int
    num_weights: int

    @property
    def num_words(self) -> int:
        return 4 * self.num_features + self.num_bags + -(-self.num_ids // 2) + -(-self.num_weights // 2)

    def cut(self, frame: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Views of a frame: head `[features, 3]`, and the splits, rows and weights of all features."""
        splits_at = 3 * self.num_features
        rows_at = splits_at + self.num_features + self.num_bags
        weights_at = rows_at + -(-self.num_ids // 2)
        return (
            frame[:splits_at].reshape(self.num_features, 3),
            frame[splits_at:rows_at],
            frame[rows_at:weights_at].view(np.int32)[: self.num_ids],
            frame[weights_at:].view(np.float32)[: self.num_weights],
        )


def _are_bad(splits: np.ndarray, ends: np.ndarray, num_bags: np.ndarray, num_ids: np.ndarray) -> bool:
    """Whether splits fall or leave their rows, which would let a kernel read outside of them."""
    falls = np.diff(splits) < 0
    # From the last split of a feature to the first one of the next.
    falls[ends[:-1] - 1] = False
    return bool((splits[ends - num_bags - 1] != 0).any() or (splits[ends - 1] != num_ids).any() or falls.any())
