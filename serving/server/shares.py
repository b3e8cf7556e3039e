"""`ShardPlace`: which buckets of a table one shard holds, and at which numbers its rows lie there.

Shard i of S holds the buckets b with b mod S = i. Rows keep their order: a row's local number says its position in its
bucket times the number of buckets held, plus which of these it is. With one shard that is the number of the row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from podembed.embedding.hashing import mix64
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.checkpoint.checkpoint_files import TableFiles

ROWS = "rows"
"""Name of the model that a shard answers as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlace:
    """Shard `index` of `count`."""

    index: int = 0
    count: int = 1

    @staticmethod
    def of(text: str) -> ShardPlace:
        """Args:
          text: such as `0/3`.

        Raises:
          ConfigurationError: it is none.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigurationError(
                f"Found --shard {text!r}. Expected I/S with I from 0 to S - 1, such as 0/3, 1/3 and 2/3 for three "
                "shards."
            )
        return ShardPlace(index=int(match[1]), count=int(match[2]))

    def in_table(self, files: TableFiles) -> TableShare:
        """What the shard holds of a table."""
        return TableShare(self, num_buckets=files.num_buckets, num_rows=files.num_rows)


class TableShare:
    """The rows of one table that a shard holds.

    Attributes:
      buckets: int64, those held, rising.
      num_rows: held rows.
    """

    def __init__(self, share: ShardPlace, *, num_buckets: int, num_rows: int) -> None:
        self.share, self._num_buckets, self._rows_of_all = share, num_buckets, num_rows
        self.buckets = np.arange(share.index, num_buckets, share.count, dtype=np.int64)
        self.num_rows = int(np.maximum(0, -((self.buckets - num_rows) // num_buckets)).sum())

    @property
    def is_whole(self) -> bool:
        """Whether it holds all rows."""
        return self.share.count == 1

    def holds(self, ids: np.ndarray) -> np.ndarray:
        """bool `[n]`, whether each number is that of a row that is held."""
        is_row = (ids >= 0) & (ids < self._rows_of_all)
        return is_row & (ids % self._num_buckets % self.share.count == self.share.index)

    def local(self, ids: np.ndarray) -> np.ndarray:
        """int64 `[n]`, the local numbers of rows that are held."""
        if self.is_whole:
            return ids
        return ids // self._num_buckets * len(self.buckets) + ids % self._num_buckets // self.share.count

    def ids(self, start: int, stop: int) -> np.ndarray:
        """int64, the rows at some local numbers."""
        numbers = np.arange(start, stop, dtype=np.int64)
        if self.is_whole:
            return numbers
        held = len(self.buckets)
        return numbers // held * self._num_buckets + self.buckets[numbers % held]


def shard_of_rows(ids: np.ndarray, *, num_buckets: int, count: int) -> np.ndarray:
    """int64 `[n]`, the shard that holds each row."""
    return ids % num_buckets % count


def shard_of_keys(keys: np.ndarray, *, num_buckets: int, count: int) -> np.ndarray:
    """int64 `[n]`, the shard that holds each key, where keys come and go."""
    return shard_of_rows(mix64(keys).view(np.int64), num_buckets=num_buckets, count=count)
