"""A second kind of index: any 64-bit number is a key, keys are hashed into buckets, and idle ones are forgotten.

It stands for what may take the place of `DenseKeys`. Whatever passes with both kinds knows no rows of other hosts. It
is written to be read, with a dictionary a bucket: nothing here is fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.config import TableConfig
from podembed.embedding.hashing import mix64
from podembed.embedding.row_index import KeyedRows, KeyRequest, KeySpace, RowIndex

NOTHING = 0
"""Row of each bucket that no key has: where unknown keys read zeros."""


@dataclass(frozen=True)
class HashedKeys:
    """Keys of 64 bits.

    Attributes:
      forget_after: steps after which a key that was not named loses its row.
    """

    forget_after: int = 1 << 30

    @property
    def columns(self) -> Mapping[str, np.dtype]:
        return {"key": np.dtype(np.int64), "last": np.dtype(np.uint32)}

    @property
    def num_spare(self) -> int:
        return 0

    @property
    def counts(self) -> bool:
        return False

    def num_keys(self, layout: BucketLayout) -> int:
        return -1

    def hashes_of(self, keys: np.ndarray) -> np.ndarray:
        return mix64(keys).view(np.int64)

    def index(self, table: KeyedRows, layout: BucketLayout) -> RowIndex:
        return HashedIndex(self, table, layout)


class HashedTable(TableConfig):
    """A table whose keys are hashed and forgotten."""

    @property
    def key_space(self) -> KeySpace:
        return HashedKeys(forget_after=8)


class HashedIndex:
    """See the module.

    Attributes:
      num_forgotten: keys that lost their row.
    """

    is_dynamic = True

    def __init__(self, keys: HashedKeys, table: KeyedRows, layout: BucketLayout) -> None:
        self._keys, self._table, self._layout = keys, table, layout
        self._place = {int(bucket): place for place, bucket in enumerate(table.buckets)}
        self._rows: list[dict[int, tuple[int, int]]] = [{} for _ in table.buckets]
        self.num_forgotten = 0

    def _bucket(self, key: int) -> int:
        (hashed,) = self._keys.hashes_of(np.array([key], np.int64)).tolist()
        bucket = hashed & (self._layout.num_buckets - 1)
        if bucket not in self._place:
            raise ValueError(f"Found key {key} of bucket {bucket}. Expected one whose bucket this host holds.")
        return bucket

    def accept(self, requests: Sequence[KeyRequest], step: int | None) -> None:
        if step is not None:
            self._begin_step(step, [request.keys for request in requests])
        for request in requests:
            found = [self._row(int(key)) for key in request.keys]
            request.out[...] = found

    def _begin_step(self, number: int, keys: Sequence[np.ndarray]) -> None:
        named = sorted({int(key) for some in keys for key in some})
        of_bucket: dict[int, list[int]] = {bucket: [] for bucket in self._place}
        for key in named:
            of_bucket[self._bucket(key)].append(key)
        for bucket, own in of_bucket.items():
            self._begin_bucket(number, bucket, own)

    def _begin_bucket(self, number: int, bucket: int, named: list[int]) -> None:
        place = self._place[bucket]
        rows, first = self._rows[place], place * self._layout.rows_per_bucket
        # Gradients of the step before may still be on their way to the rows that it named.
        free_to_go = [key for key, (_, last) in rows.items() if last < number - 1 and key not in named]
        for key in free_to_go:
            if number - rows[key][1] > self._keys.forget_after:
                self._forget(rows, key)
        new = [key for key in named if key not in rows]
        room = self._layout.num_rows_of(bucket) - 1
        for key in sorted((key for key in free_to_go if key in rows), key=lambda key: (rows[key][1], key)):
            if len(rows) + len(new) > room:
                self._forget(rows, key)
        if len(rows) + len(new) > room:
            raise ValueError(f"Found {len(new)} new keys for bucket {bucket}. Expected room for them.")
        taken = {row for row, _ in rows.values()}
        free = [row for row in range(first + 1, first + 1 + room) if row not in taken][: len(new)]
        if new:
            columns = {"key": _as_words(new), "last": _steps([number] * len(new))}
            self._table.begin_rows(np.array(free), np.array(new, np.int64), columns)
        old = np.array([rows[key][0] for key in named if key in rows], np.int64)
        if len(old):
            self._table.set_columns(old, {"last": _steps([number] * len(old))})
        rows |= {key: (rows[key][0], number) for key in named if key in rows} | {
            key: (row, number) for key, row in zip(new, free, strict=True)
        }

    def _forget(self, rows: dict[int, tuple[int, int]], key: int) -> None:
        row, _ = rows.pop(key)
        self.num_forgotten += 1
        self._table.begin_rows(
            np.array([row]), np.array([key], np.int64), {"key": _as_words([0]), "last": _steps([-1])}
        )

    def _row(self, key: int) -> int:
        place = self._place[self._bucket(key)]
        return self._rows[place].get(key, (place * self._layout.rows_per_bucket + NOTHING, 0))[0]

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        known = {key: row for rows in self._rows for key, (row, _) in rows.items()}
        return np.array([known.get(int(key), -1) for key in keys], np.int64)

    def first_keys(self, bucket: int) -> np.ndarray:
        return np.empty(0, np.int64)

    @property
    def existing_rows(self) -> np.ndarray:
        return np.array(sorted(row for rows in self._rows for row, _ in rows.values()), np.int64)

    def rebuild(self) -> None:
        for bucket, place in self._place.items():
            rows = place * self._layout.rows_per_bucket + np.arange(1, self._layout.num_rows_of(bucket))
            columns = self._table.columns(["key", "last"], rows)
            keys = np.ascontiguousarray(columns["key"]).view(np.int64)[:, 0].tolist()
            lasts = (np.ascontiguousarray(columns["last"]).view(np.uint32)[:, 0].astype(np.int64) - 1).tolist()
            self._rows[place] = {
                key: (row, last) for key, row, last in zip(keys, rows.tolist(), lasts, strict=True) if last >= 0
            }


def _as_words(keys: Sequence[int]) -> np.ndarray:
    return np.array(keys, np.int64).view(np.float32).reshape(-1, 2)


def _steps(numbers: Sequence[int]) -> np.ndarray:
    """Zero words are a row that no key has."""
    return (np.array(numbers, np.int64) + 1).astype(np.uint32).view(np.float32).reshape(-1, 1)
