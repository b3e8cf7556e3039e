"""What a host asks of an owner that pools, as one frame of numbers.

A frame is int64. It begins with the numbers of bags and of ids for each feature, and whether ids have weights, bags
have divisors, and keys are wide. The features' row splits, all wide keys, all other keys as int32, all weights and all
divisors follow. An owner reads it with suspicion, since kernels follow its numbers. It writes the rows over the keys.

Bags of a table that is cut: each owner pools the rows that it has, and the host that asked adds up the parts. Owners
only sum. The host that asked divides the total, once, by the denominator of the whole bag, which is what one process
does. Owners divide gradients by the same denominators, which travel with the request. Partial sums are added in the
order of the hosts: ((0 + 1) + 2) + ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.kernels.bag_frames import (
    BAD_SPLITS,
    BAGS,
    DIVIDED,
    HEAD_WORDS,
    NO_FRAME,
    NUM_IDS,
    ROWS,
    WEIGHTED,
    WIDE,
    find_pieces,
)
from podembed.embedding.lookup.activation_layout import ActivationLayout
from podembed.embedding.lookup.prefetch import Split
from podembed.embedding.lookup.router import Router
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.stores.store import GroupedRows, ScaledGradients

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BagKeys:
    """A part of the bags of a feature, as one owner is asked for it.

    Attributes:
      keys: int32 or int64 `[n]`.
      row_splits: int64 `[B + 1]`.
      weights: float32 `[n]`, or None.
      divisors: float32 `[B]`, denominators of the whole bags; None where they are sums.
    """

    keys: np.ndarray
    row_splits: np.ndarray
    weights: np.ndarray | None
    divisors: np.ndarray | None


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
      frames: per owner, what it is asked; for this host itself with room for rows in the place of keys.
      own_keys: per feature pooled here, the keys that this host asks itself for.
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
    own_keys: list[np.ndarray]
    layout: ActivationLayout
    buffer: int = 0
    is_usual: bool = True
    bags: list[AskedBags] = field(default_factory=list)
    layouts: list[ActivationLayout] = field(default_factory=list)
    grouped: Mapping[int, GroupedRows] | None = None
    scaled: ScaledGradients | None = None
    splits: list[Split | None] = field(default_factory=list)
    divisors: dict[int, np.ndarray | None] = field(default_factory=dict)


def frame_of(parts: Sequence[tuple[Router, Ragged] | BagKeys], *, stays: bool = False) -> np.ndarray:
    """The frame of some features: per feature the router of its table and its bags, or a part of them.

    Args:
      stays: whether the host asks itself. Then there is room for rows, and keys stay where they are.

    Raises:
      ValueError: an id lies outside its table.
    """
    if not parts:
        return _NOTHING
    found = [part if isinstance(part, BagKeys) else part[1] for part in parts]
    divisors = [part.divisors if isinstance(part, BagKeys) else None for part in parts]
    num_ids = [int(bags.row_splits[-1]) for bags in found]
    types = [part.keys.dtype if isinstance(part, BagKeys) else part[0].key_dtype for part in parts]
    are_wide = [dtype == np.int64 and not stays for dtype in types]
    num_wide = sum(count for count, is_wide in zip(num_ids, are_wide, strict=True) if is_wide)
    sizes = _Sizes(
        num_features=len(parts),
        num_bags=sum(len(bags.row_splits) - 1 for bags in found),
        num_wide=num_wide,
        num_narrow=sum(num_ids) - num_wide,
        num_weights=sum(count for count, bags in zip(num_ids, found, strict=True) if bags.weights is not None),
        num_divisors=sum(0 if of_bags is None else len(of_bags) for of_bags in divisors),
    )
    frame = np.empty(sizes.num_words, np.int64)
    head, splits, wide, narrow, weights, divided = sizes.cut(frame)
    head[:, 0] = [len(bags.row_splits) - 1 for bags in found]
    head[:, 1] = num_ids
    head[:, 2] = [
        WEIGHTED * (bags.weights is not None) + DIVIDED * (of_bags is not None) + WIDE * is_wide
        for bags, of_bags, is_wide in zip(found, divisors, are_wide, strict=True)
    ]
    np.concatenate([bags.row_splits for bags in found], out=splits)
    for part, count, is_wide in () if stays else zip(parts, num_ids, are_wide, strict=True):
        if is_wide:
            own, wide = wide[:count], wide[count:]
        else:
            own, narrow = narrow[:count], narrow[count:]
        if isinstance(part, BagKeys):
            own[:] = part.keys
        else:
            part[0].copy(part[1].values, own)
    if sizes.num_weights:
        np.concatenate([bags.weights for bags in found if bags.weights is not None], out=weights)
    if sizes.num_divisors:
        np.concatenate([of_bags for of_bags in divisors if of_bags is not None], out=divided)
    return frame


def read_frame(
    frame: np.ndarray,
    *,
    num_features: int,
    host: int,
    numbers: Mapping[int, int] | None = None,
    keys: Sequence[np.ndarray] | None = None,
) -> AskedBags:
    """The features of a frame, as views of it.

    Args:
      num_features: features that it must have.
      host: host that sent it.
      numbers: place of each feature in the frame, from 0; left out, they are the features themselves.
      keys: of a frame that stayed, its keys.

    Raises:
      ValueError: it is no frame of so many features.
    """
    if not num_features and not len(frame):
        return NO_BAGS
    lines = np.zeros((num_features, BAGS), np.int64)
    state = find_pieces(frame, lines)
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
    if numbers is None:
        numbers = {number: number for number in range(num_features)}
    return AskedBags(frame, numbers, lines, keys)


class AskedBags(Mapping[int, BagRows]):
    """What one host asks, by feature. Rows are there once keys were turned into them.

    Attributes:
      lines: int64 `[num_features, BAGS]`, the same for kernels, see `kernels.bag_frames`. They hold while this lives.
    """

    def __init__(
        self,
        frame: np.ndarray,
        numbers: Mapping[int, int],
        lines: np.ndarray,
        keys: Sequence[np.ndarray] | None = None,
    ) -> None:
        self._frame, self._numbers, self.lines, self._keys = frame, numbers, lines, keys

    def __getitem__(self, feature: int) -> BagRows:
        rows, ids, splits, bags, weights, divisors = self.lines[self._numbers[feature]].tolist()
        return BagRows(
            rows=self._view(rows, ids, np.int32),
            row_splits=self._view(splits, bags + 1, np.int64),
            weights=self._view(weights, ids, np.float32) if weights else None,
            divisors=self._view(divisors, bags, np.float32) if divisors else None,
        )

    def key_lines(self) -> np.ndarray:
        """int64 `[num_features, 2]`: address of the keys of each feature, and the bytes of a key."""
        if self._keys is not None:
            lines = [(keys.ctypes.data, keys.itemsize) for keys in self._keys]
            return np.array(lines, np.int64).reshape(-1, 2)
        return np.stack([self.lines[:, ROWS], np.where(self._are_wide, 8, 4)], axis=1)

    def keys_and_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each feature the keys, int32 or int64 `[n]`, and the int32 `[n]` where their rows go."""
        starts, counts = self.lines[:, [ROWS, NUM_IDS]].T.tolist()
        rows = [self._view(*one, np.int32) for one in zip(starts, counts, strict=True)]
        keys = self._keys
        if keys is None:
            types = [np.int64 if is_wide else np.int32 for is_wide in self._are_wide.tolist()]
            keys = [self._view(*one) for one in zip(starts, counts, types, strict=True)]
        return list(zip(keys, rows, strict=True))

    @property
    def _are_wide(self) -> np.ndarray:
        return self._frame[2 : HEAD_WORDS * len(self.lines) : HEAD_WORDS] & WIDE != 0

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
    num_wide: int
    num_narrow: int
    num_weights: int
    num_divisors: int

    @property
    def num_words(self) -> int:
        halves = self.num_narrow, self.num_weights, self.num_divisors
        return 4 * self.num_features + self.num_bags + self.num_wide + sum(-(-count // 2) for count in halves)

    def cut(self, frame: np.ndarray) -> tuple[np.ndarray, ...]:
        """Views of a frame: head `[features, 3]`, and the splits, wide keys, narrow keys, weights and divisors of all
        features.
        """
        splits_at = HEAD_WORDS * self.num_features
        wide_at = splits_at + self.num_features + self.num_bags
        narrow_at = wide_at + self.num_wide
        weights_at = narrow_at + -(-self.num_narrow // 2)
        divisors_at = weights_at + -(-self.num_weights // 2)
        return (
            frame[:splits_at].reshape(self.num_features, HEAD_WORDS),
            frame[splits_at:wide_at],
            frame[wide_at:narrow_at],
            frame[narrow_at:weights_at].view(np.int32)[: self.num_narrow],
            frame[weights_at:divisors_at].view(np.float32)[: self.num_weights],
            frame[divisors_at:].view(np.float32)[: self.num_divisors],
        )


def parts_of(router: Router, bags: Ragged, combiner: str, *, num_hosts: int) -> list[BagKeys]:
    """Per owner its part of each bag.

    Args:
      router: router of the whole table.

    Raises:
      ValueError: an id lies outside its table.
    """
    splits, keys, weights = router.route_bags(bags, num_hosts=num_hosts)
    whole = None if combiner == "sum" else denominators(bags.row_splits, bags.weights, combiner)
    parts, first = [], 0
    for of_owner in splits:
        stop = first + int(of_owner[-1])
        own_weights = None if weights is None else weights[first:stop]
        parts.append(BagKeys(keys[first:stop], of_owner, own_weights, whole))
        first = stop
    return parts


def denominators(row_splits: np.ndarray, weights: np.ndarray | None, combiner: str) -> np.ndarray:
    """What the sum over each bag is divided by, by the rules of `kernels.pool`: float32 `[B]`; 1 for an empty bag
    without weights.

    Args:
      combiner: `mean` or `sqrtn`.
    """
    lengths = np.diff(row_splits)
    if weights is None:
        total = np.maximum(lengths, 1).astype(np.float32)
    else:
        # Summed as the kernel does, in float32 and in the order of the ids.
        total = np.zeros(len(lengths), np.float32)
        bag = np.repeat(np.arange(len(lengths)), lengths)
        np.add.at(total, bag, weights if combiner == "mean" else weights * weights)
    return np.sqrt(total) if combiner == "sqrtn" else total


def add_up(parts: Sequence[np.ndarray], own: int, divisors: np.ndarray | None) -> None:
    """Adds the partial sums of all hosts, in their order, into those of one of them; the others are used up.

    Args:
      parts: per host float32 `[B, width]`.
      own: the host whose array gets the total.
      divisors: float32 `[B]`, denominators of the whole bags; where one is 0, the total is 0. None for sums.
    """
    total = parts[0]
    for host, part in enumerate(parts[1:], 1):
        out = parts[own] if host >= own else parts[0]
        np.add(total, part, out=out)
        total = out
    if divisors is None:
        return
    is_zero = divisors == 0
    np.divide(total, np.where(is_zero, np.float32(1), divisors)[:, None], out=total)
    total[is_zero] = 0
