"""What a host asks of an owner that pools, as one frame of numbers.

A frame is int64. It begins with the numbers of bags and of ids for each feature, and whether ids have weights and bags
have divisors. The features' row splits, all rows as int32, all weights and all divisors follow. An owner reads it with
suspicion, since kernels follow its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.kernels.bag_frames import BAD_ROW, BAD_SPLITS, BAGS, DIVIDED, NO_FRAME, WEIGHTED, find_pieces
from podembed.embedding.kernels.ids import bad_local_row
from podembed.embedding.lookup.activation_layout import ActivationLayout
from podembed.embedding.lookup.prefetch import Split
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.feature_tables import ScaledGradients
from podembed.embedding.table.key_index import KeyIndex
from podembed.embedding.table.together import GroupedTables

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BagRows:
    """What one host asks for one feature.

    Attributes:
      rows: int32 `[n]`, local rows of the owner.
      row_splits: int64 `[B + 1]`.
      weights: float32 `[n]`, or None.
      divisors: float32 `[B]`, denominators of bags of which the owner has a part; None where it has all of them.
    """

    rows: np.ndarray
    row_splits: np.ndarray
    weights: np.ndarray | None
    divisors: np.ndarray | None = None

    @property
    def num_bags(self) -> int:
        return len(self.row_splits) - 1


@dataclass(slots=True, eq=False)
class PooledRequest:
    """One batch on its way through the step.

    Attributes:
      frames: per owner, what it is asked.
      layout: of this host's activations.
      buffer: which of each host's memories its activations and gradients lie in.
      is_usual: whether they lie there as every host expects: it is free, and the batch has as many vectors as usual.
      bags: per host, what it asks of this one, by feature. Filled by `accept`.
      layouts: per host, that of its activations, as far as this owner pools them. Filled by `accept`.
      grouped: per table owned here, its touched rows with the addresses of their gradients. Filled by `group`.
      scaled: gradients as they enter the sums, where those are not the bags' own. Made by `group`, filled by `update`.
      splits: per host, its bags that go before the update of the step under way, by feature. Filled by `split`.
      divisors: per feature that every host pools, the denominators of its bags, float32 `[B]`; None for sums.
    """

    frames: list[np.ndarray]
    layout: ActivationLayout
    buffer: int = 0
    is_usual: bool = True
    bags: list[AskedBags] = field(default_factory=list)
    layouts: list[ActivationLayout] = field(default_factory=list)
    grouped: GroupedTables | None = None
    scaled: ScaledGradients | None = None
    splits: list[Split | None] = field(default_factory=list)
    divisors: dict[int, np.ndarray | None] = field(default_factory=dict)


def frame_of(parts: Sequence[tuple[KeyIndex, Ragged] | BagRows]) -> np.ndarray:
    """The frame of some features: per feature the index of its table and its bags, or the rows that were found already.

    Raises:
      ValueError: an id lies outside its table.
    """
    if not parts:
        return _NOTHING
    found = [part if isinstance(part, BagRows) else part[1] for part in parts]
    divisors = [part.divisors if isinstance(part, BagRows) else None for part in parts]
    num_ids = [int(bags.row_splits[-1]) for bags in found]
    sizes = _Sizes(
        num_features=len(parts),
        num_bags=sum(len(bags.row_splits) - 1 for bags in found),
        num_ids=sum(num_ids),
        num_weights=sum(count for count, bags in zip(num_ids, found, strict=True) if bags.weights is not None),
        num_divisors=sum(0 if of_bags is None else len(of_bags) for of_bags in divisors),
    )
    frame = np.empty(sizes.num_words, np.int64)
    head, splits, rows, weights, divided = sizes.cut(frame)
    head[:, 0] = [len(bags.row_splits) - 1 for bags in found]
    head[:, 1] = num_ids
    head[:, 2] = [WEIGHTED * (bags.weights is not None) for bags in found]
    head[:, 2] |= [DIVIDED * (of_bags is not None) for of_bags in divisors]
    np.concatenate([bags.row_splits for bags in found], out=splits)
    first = 0
    for part, count in zip(parts, num_ids, strict=True):
        own = rows[first : first + count]
        if isinstance(part, BagRows):
            own[:] = part.rows
        else:
            part[0].rows_of(part[1].values, own)
        first += count
    if sizes.num_weights:
        np.concatenate([bags.weights for bags in found if bags.weights is not None], out=weights)
    if sizes.num_divisors:
        np.concatenate([of_bags for of_bags in divisors if of_bags is not None], out=divided)
    return frame


def read_frame(
    frame: np.ndarray, *, limits: np.ndarray, host: int, numbers: Mapping[int, int] | None = None
) -> AskedBags:
    """The features of a frame, as views of it.

    Args:
      limits: int64, per feature the rows that are held of its table; below 0 where rows are known to be among them.
      host: that sent it.
      numbers: of each feature its place in the frame, from 0; left out, they are the features themselves.

    Raises:
      ValueError: it is no frame of so many features, or names a row that is not held here.
    """
    num_features = len(limits)
    if not num_features and not len(frame):
        return NO_BAGS
    lines = np.zeros((max(1, num_features), BAGS), np.int64)
    state = find_pieces(frame, limits, lines)
    if state == NO_FRAME:
        raise ValueError(
            f"Found a request of {len(frame)} words from host {host} that does not begin with the sizes of "
            f"{num_features} features. Expected as many words as the sizes say. Check that both hosts are of one "
            "generation."
        )
    if state == BAD_SPLITS:
        raise ValueError(
            f"Found row splits from host {host} that fall or miss ids. Expected them to rise from 0 to the number of "
            "ids."
        )
    if state == BAD_ROW:
        feature, row = lines[0, :2].tolist()
        raise bad_local_row(row, int(limits[feature]))
    if numbers is None:
        numbers = {number: number for number in range(num_features)}
    return AskedBags(frame, numbers, lines[:num_features])


class AskedBags(Mapping[int, BagRows]):
    """What one host asks, by feature.

    Attributes:
      lines: int64 `[num_features, BAGS]`, the same for kernels, see `kernels.bag_frames`. They hold while this lives.
    """

    def __init__(self, frame: np.ndarray, numbers: Mapping[int, int], lines: np.ndarray) -> None:
        self._frame, self._numbers, self.lines = frame, numbers, lines

    def __getitem__(self, feature: int) -> BagRows:
        rows, ids, splits, bags, weights, divisors = self.lines[self._numbers[feature]].tolist()
        return BagRows(
            rows=self._view(rows, ids, np.int32),
            row_splits=self._view(splits, bags + 1, np.int64),
            weights=self._view(weights, ids, np.float32) if weights else None,
            divisors=self._view(divisors, bags, np.float32) if divisors else None,
        )

    def _view(self, address: int, count: int, dtype: type) -> np.ndarray:
        array = self._frame.view(dtype)
        first = (address - self._frame.ctypes.data) // array.itemsize
        return array[first : first + count]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


NO_BAGS = AskedBags(_NOTHING, {}, np.zeros((0, BAGS), np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How long the parts of a frame are."""

    num_features: int
    num_bags: int
    num_ids: int
    num_weights: int
    num_divisors: int

    @property
    def num_words(self) -> int:
        halves = self.num_ids, self.num_weights, self.num_divisors
        return 4 * self.num_features + self.num_bags + sum(-(-count // 2) for count in halves)

    def cut(self, frame: np.ndarray) -> tuple[np.ndarray, ...]:
        """Views of a frame: head `[features, 3]`, and the splits, rows, weights and divisors of all features."""
        splits_at = 3 * self.num_features
        rows_at = splits_at + self.num_features + self.num_bags
        weights_at = rows_at + -(-self.num_ids // 2)
        divisors_at = weights_at + -(-self.num_weights // 2)
        return (
            frame[:splits_at].reshape(self.num_features, 3),
            frame[splits_at:rows_at],
            frame[rows_at:weights_at].view(np.int32)[: self.num_ids],
            frame[weights_at:divisors_at].view(np.float32)[: self.num_weights],
            frame[divisors_at:].view(np.float32)[: self.num_divisors],
        )
