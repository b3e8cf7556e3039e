"""What the rows of items stand for: lines of a vocabulary, or the rows themselves."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from podembed.workers.columns.vocabulary import load_vocabulary
from podembed.workers.data.columns import IdColumn


class ItemValues:
    """Turns rows of the items' table into what a user knows items by.

    Attributes:
      kind: kind of one value: text of a vocabulary, int64 rows without one.
    """

    def __init__(self, source: IdColumn) -> None:
        """Raises:
        InputError: the vocabulary is missing, or is none.
        """
        self._lines: pa.Array | None = None
        if source.vocabulary is not None:
            self._lines = load_vocabulary(source.vocabulary).lines.cast(pa.string())
        self._first = source.num_reserved
        self.kind: pa.DataType = pa.int64() if self._lines is None else pa.string()

    def known(self, rows: np.ndarray) -> np.ndarray:
        """Those of the rows that stand for a value, in their order."""
        if self._lines is None:
            return rows
        return rows[(rows >= self._first) & (rows < self._first + len(self._lines))]

    def of(self, rows: np.ndarray) -> pa.Array:
        """The value of each row, all of them known."""
        if self._lines is None:
            return pa.array(rows, pa.int64())
        return self._lines.take(pa.array(rows - self._first))
