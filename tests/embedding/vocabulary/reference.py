"""A vocabulary of plain dictionaries, by the rules of docs/vocabularies.md: bucket by bucket, key by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.hashing import mix64
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.embedding.vocabulary.policies import (
    Always,
    LeastFrequent,
    LeastRecent,
    MinCount,
    Never,
    Probability,
    SmallNorm,
)


@dataclass
class Entry:
    """A key that has a row, or waits for one."""

    count: int = 0
    last: int = 0
    value: float = 0.0


@dataclass
class Bucket:
    """Its number, and the entries by key."""

    number: int
    rows: dict[int, Entry] = field(default_factory=dict)
    waiting: dict[int, Entry] = field(default_factory=dict)


class ReferenceVocabulary:
    """One table of one column on one host.

    Args:
      first: first value of a key.
      seed: that of the table's coins.
    """

    def __init__(
        self, keys: DynamicKeys, layout: BucketLayout, first: Callable[[int], float], *, seed: int, rate: float
    ) -> None:
        self.keys, self.first, self.seed, self.rate = keys, first, seed, rate
        self.room = layout.rows_per_bucket - keys.num_reserved
        self.room_waiting = keys.waiting_per_bucket(layout)
        self.buckets = [Bucket(number) for number in range(layout.num_buckets)]
        self.named_before: set[int] = set()
        self.told: Counter[str] = Counter()

    def bucket(self, key: int) -> Bucket:
        (hashed,) = mix64(np.array([key], np.int64)).tolist()
        return self.buckets[hashed % len(self.buckets)]

    def begin(self, step: int, ids: Iterable[int]) -> set[int]:
        """Decides; returns the named keys that have a row."""
        named = Counter(ids)
        pinned = self.named_before | set(named)
        for bucket in self.buckets:
            here = {key: times for key, times in named.items() if self.bucket(key) is bucket}
            self._forget_idle(bucket, step, pinned)
            for key, times in here.items():
                entry = bucket.rows.get(key) or bucket.waiting.setdefault(key, Entry())
                entry.count, entry.last = min(entry.count + times, 2**32 - 1), step
            asking = [key for key in here if key in bucket.waiting and self._asks(bucket.waiting[key], key, step, here)]
            for key in sorted(asking, key=lambda key: (-bucket.waiting[key].count, key)):
                self._admit(bucket, key, step, pinned)
            surplus = max(0, len(bucket.waiting) - self.room_waiting)
            order = sorted(bucket.waiting, key=lambda key: (bucket.waiting[key].count, bucket.waiting[key].last, key))
            for key in order[:surplus]:
                del bucket.waiting[key]
        self.named_before = set(named)
        with_row = {key for key in named if key in self.bucket(key).rows}
        self.told["dropped"] += len(named) - len(with_row)
        return with_row

    def _forget_idle(self, bucket: Bucket, step: int, pinned: set[int]) -> None:
        idle = self.keys.forget_after
        if idle is None or (step - bucket.number) % max(1, idle // 16):
            return
        for entries, name in ((bucket.rows, "evicted"), (bucket.waiting, "forgotten waiting")):
            for key in [key for key, entry in entries.items() if step - entry.last > idle and key not in pinned]:
                del entries[key]
                self.told[name] += 1

    def _asks(self, entry: Entry, key: int, step: int, here: Mapping[int, int]) -> bool:
        admit = self.keys.admit
        if isinstance(admit, Always):
            return True
        if isinstance(admit, MinCount):
            return entry.count >= admit.count
        assert isinstance(admit, Probability)
        mixed = [int(mix64(np.array([number], np.int64))[0]) for number in (key, step ^ self.seed)]
        coin = int(mix64(np.array([mixed[0] ^ mixed[1]], np.uint64))[0]) / 2**64
        return coin < 1 - (1 - admit.probability) ** here[key]

    def _admit(self, bucket: Bucket, key: int, step: int, pinned: set[int]) -> None:
        if len(bucket.rows) == self.room and not isinstance(self.keys.evict, Never):
            free = [key for key in bucket.rows if key not in pinned]
            free.sort(key=lambda key: (*self._score(bucket.rows[key], step), key))
            for old in free[: max(1, self.room // 16)]:
                del bucket.rows[old]
                self.told["evicted"] += 1
        if len(bucket.rows) == self.room:
            self.told["refused"] += 1
            return
        self.told["admitted"] += 1
        bucket.rows[key] = bucket.waiting.pop(key)
        bucket.rows[key].value = self.first(key)

    def _score(self, entry: Entry, step: int) -> tuple[float, ...]:
        evict = self.keys.evict
        if isinstance(evict, LeastRecent):
            return (entry.last,)
        if isinstance(evict, LeastFrequent):
            return entry.count >> min(63, (step - entry.last) // evict.half_life), entry.last
        assert isinstance(evict, SmallNorm)
        return (abs(entry.value),)

    def read(self, key: int) -> float:
        entry = self.bucket(key).rows.get(key)
        if entry is not None:
            return entry.value
        return self.first(key) if self.keys.default == "first" else 0.0

    def update(self, gradients: Mapping[int, float], had_row: set[int]) -> None:
        """Plain gradient descent, for the keys that had a row when their step began."""
        for key in had_row:
            entry = self.bucket(key).rows[key]
            step = np.float32(np.float32(self.rate) * np.float32(gradients[key]))
            entry.value = float(np.float32(np.float32(entry.value) - step))

    def state(self) -> dict[int, tuple[int, int]]:
        """Count and last step of every key that has a row."""
        return {key: (entry.count, entry.last) for one in self.buckets for key, entry in one.rows.items()}

    def waiting_state(self) -> dict[int, tuple[int, int]]:
        return {key: (entry.count, entry.last) for one in self.buckets for key, entry in one.waiting.items()}
