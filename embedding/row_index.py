"""`RowIndex`: the step from keys to rows, at the host that has the rows.

Keys cross the wire. The host that asks knows only which host owns the bucket of a key (`lookup.router`), since where
keys come and go no other host could know the row. What a table's keys are is a value of its spec, a `KeySpace`. Below
an index everything counts in local rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.kernels.many_tables import resolve_dense
from podembed.embedding.kernels.row_numbers import outside, rows_of_dense_keys


class RowIndex(Protocol):
    """Which local row has the values of a key, for the buckets of one table that a host holds."""

    @property
    def is_dynamic(self) -> bool:
        """Whether keys come and go. If not, rows follow from keys alone, `rebuild` is never called, and several threads
        may call `accept`.
        """
        ...

    def accept(self, requests: Sequence[KeyRequest], step: int | None) -> None:
        """Finds the row of every key that the hosts request of this one. Where keys come and go, those of training
        first decide which of them have a row. Called before any lookup of the step, while the update of the step before
        may still be under way, so rows of that one must stay.

        Args:
          requests: all those of one step, in host order.
          step: number of the step of training; None where nothing is trained.

        Raises:
          ValueError: the bucket of a key is not held here.
        """
        ...

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        """The row of each key (int64 `[n]`); -1 for a key that has none here."""
        ...

    def first_keys(self, bucket: int) -> np.ndarray:
        """int64, the keys that the first rows of a bucket have from the start, in the order of the rows."""
        ...

    @property
    def existing_rows(self) -> np.ndarray:
        """int64, rising: rows that have a key. Of an index that is dynamic."""
        ...

    def rebuild(self) -> None:
        """Reads its columns again: rows came from a commit, from another host, or out of the undo log."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KeyRequest:
    """Keys that a host requests, and where their rows go.

    Attributes:
      keys: int32 or int64 `[n]`; may repeat.
      out: int32 or int64 `[n]`, which may begin where `keys` begins: receives the local rows.
      times: int64 `[n]`, occurrences of each key in the batch of that host; None for one each.
    """

    keys: np.ndarray
    out: np.ndarray
    times: np.ndarray | None = None


class KeyedRows(Protocol):
    """What an index that changes rows needs of its table."""

    @property
    def buckets(self) -> np.ndarray:
        """int64, the buckets held here, rising; row k of the i-th is the local row `i * rows_per_bucket + k`."""
        ...

    @property
    def table_seed(self) -> int:
        """Seed of this table in this run."""
        ...

    def in_place(self) -> dict[str, np.ndarray]:
        """Rows and all columns of the buckets, where they lie: float32 `[num_rows, width]`."""
        ...

    def announce(self, local_rows: np.ndarray) -> None:
        """Says that rows (int64) are about to change. To be called before columns are written where they lie."""
        ...

    def spare_rows(self, half: int, keys: np.ndarray | None) -> np.ndarray:
        """Rows that belong to no bucket, for one request: what an update makes of them is lost.

        Args:
          half: 0 or 1. The rows of the request before are those of the other half.
          keys: int64 `[n]`, which get a row each with its first value; None for one row of zeros.

        Returns:
          int64 `[n]`, or `[1]`.

        Raises:
          ValueError: there are not so many.
        """
        ...

    def begin_rows(self, rows: np.ndarray, keys: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Gives rows to new keys: their first values, slots at their start, and the index's own columns."""
        ...

    def set_columns(self, rows: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Replaces some columns of some rows."""
        ...


class KeySpace(Protocol):
    """What the keys of a table are. A value, the same on all hosts, that the job brings along."""

    @property
    def columns(self) -> Mapping[str, np.dtype]:
        """What the index keeps of each row, beside its values and slots, as numbers of 32 or 64 bits. They are state of
        the run: saved, moved between hosts and undone with the row. In memory they lie in float32 words, like slots.
        """
        ...

    @property
    def num_spare(self) -> int:
        """Rows of a host beyond those of its buckets that its index may want at a time, twice; see `KeyedRows`."""
        ...

    @property
    def counts(self) -> bool:
        """Whether it matters how often a batch names a key, not only that it does."""
        ...

    def num_keys(self, layout: BucketLayout) -> int:
        """Keys are 0 to this number, itself excluded; -1 where every 64-bit integer is a key."""
        ...

    def hashes_of(self, keys: np.ndarray) -> np.ndarray:
        """int64 `[n]`, whose low bits say the bucket of each key (int64 `[n]`)."""
        ...

    def index(self, table: KeyedRows, layout: BucketLayout) -> RowIndex:
        """The index of the buckets that a host holds."""
        ...


@dataclass(frozen=True, slots=True)
class DenseKeys:
    """Keys that are the row numbers of the whole table."""

    @property
    def columns(self) -> Mapping[str, np.dtype]:
        return {}

    @property
    def num_spare(self) -> int:
        return 0

    @property
    def counts(self) -> bool:
        return False

    def num_keys(self, layout: BucketLayout) -> int:
        return layout.num_rows

    def hashes_of(self, keys: np.ndarray) -> np.ndarray:
        return keys

    def index(self, table: KeyedRows, layout: BucketLayout) -> RowIndex:
        return DenseIndex(layout, table.buckets)


class DenseIndex:
    """The index of a table whose keys are row numbers, cut into buckets. Immutable.

    Args:
      layout: layout of the table.
      buckets: int64, the buckets held here, rising. They lie one after another, so the k-th begins at row
        `k * rows_per_bucket`.
    """

    is_dynamic = False

    def __init__(self, layout: BucketLayout, buckets: np.ndarray) -> None:
        self._layout = layout
        self._places = np.full(layout.num_buckets, -1, np.int32)
        self._places[buckets] = np.arange(len(buckets))

    def accept(self, requests: Sequence[KeyRequest], step: int | None) -> None:
        """See `RowIndex`."""
        bad = np.zeros(1, np.int64)
        for request in requests:
            if not rows_of_dense_keys(request.keys, self._places, self._layout.rows_per_bucket, request.out, bad):
                raise self.refusal(int(bad[0]))

    @property
    def line(self) -> tuple[int, int, int, bool]:
        """For kernels: address of the int32 places of the buckets, how many they are, the rows of a bucket, and whether
        all buckets are held here.
        """
        places = self._places
        return places.ctypes.data, len(places), self._layout.rows_per_bucket, bool((places >= 0).all())

    def refusal(self, key: int) -> ValueError:
        """A key that no row here has."""
        num_rows, num_held = self._layout.num_rows, int(np.count_nonzero(self._places >= 0))
        if not 0 <= key < num_rows:
            return outside(key, num_rows)
        return ValueError(
            f"Found a request for id {key}, of a bucket that this host does not hold. Expected one of its {num_held} "
            f"of {self._layout.num_buckets} buckets. Check that all hosts are of one generation."
        )

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        """See `RowIndex`.

        Raises:
          ValueError: an id lies outside the table.
        """
        num_rows = self._layout.num_rows
        bad = np.flatnonzero((keys < 0) | (keys >= num_rows))
        if len(bad):
            raise outside(int(keys[bad[0]]), num_rows)
        out = np.empty(len(keys), np.int64)
        keys = np.ascontiguousarray(keys, np.int64)
        rows_of_dense_keys(keys, self._places, self._layout.rows_per_bucket, out, np.zeros(1, np.int64))
        return out

    def first_keys(self, bucket: int) -> np.ndarray:
        """See `RowIndex`."""
        return self._layout.ids_of(bucket)

    @property
    def existing_rows(self) -> np.ndarray:
        """See `RowIndex`."""
        return np.arange(int(np.count_nonzero(self._places >= 0)) * self._layout.rows_per_bucket)

    def rebuild(self) -> None:
        """See `RowIndex`."""


class DenseIndexes:
    """The indexes of dense tables among those of the features that a host pools, which are asked together.

    Args:
      indexes: index of the table of each feature.
    """

    def __init__(self, indexes: Sequence[RowIndex]) -> None:
        dense = [(at, index) for at, index in enumerate(indexes) if isinstance(index, DenseIndex)]
        self._dense, self._refusals = [at for at, _ in dense], [index.refusal for _, index in dense]
        self._has_others = len(dense) < len(indexes)
        self._lines = np.array([index.line for _, index in dense], np.int64).reshape(-1, 4)

    def resolve(self, keys: np.ndarray, asked: np.ndarray) -> None:
        """Finds the rows of what one host asks of these tables.

        Args:
          keys: int64 `[n, 2]`: address of the keys of each feature, and the bytes of a key, 4 or 8. Keys may lie where
            the rows go.
          asked: int64 `[n, BAGS]`; rows are written to its int32 rows.

        Raises:
          ValueError: the bucket of a key is not held here.
        """
        some = self._dense if self._has_others else slice(None)
        bad = resolve_dense(keys[some], self._lines, asked[some])
        if bad is not None:
            feature, key = bad
            raise self._refusals[feature](key)
