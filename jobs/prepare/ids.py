"""From a field's values to rows of its table, by a hash or by a vocabulary; and the counting that makes a vocabulary.

Row 0 stands for a missing value with both, and with a vocabulary for one that it does not hold. The vocabulary's values have the rows from
1 on in the order of its file: UTF-8, one value a line, the most frequent first. So a row is the number of the line, counted from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from workers.id_stage import hashed_rows

# For missing values and for those without a row of their own.
OTHER_ROW = 0
RESERVED_ROWS = 1


class RowIds(Protocol):
    """Values of one field to int64 rows of its table."""

    def rows(self, values: pa.Array) -> np.ndarray:
        """int64 `[n]` for `n` values, of which some may be null."""
        ...


@dataclass(frozen=True, slots=True)
class HashedIds:
    """What `IdColumn(mode="hash")` makes of the same values (`workers.id_stage`)."""

    num_rows: int
    salt: int

    def rows(self, values: pa.Array) -> np.ndarray:
        rows = np.full(len(values), OTHER_ROW, np.int64)
        present = _is_present(values)
        rows[present] = hashed_rows(values.drop_null(), vocabulary_size=self.num_rows, salt=self.salt)
        return rows


@dataclass(frozen=True, slots=True)
class VocabularyIds:
    """The row of a value is its position in the vocabulary, plus `RESERVED_ROWS`.

    Attributes:
      values: the vocabulary, int64 or string, without nulls.
    """

    values: pa.Array
    _order: np.ndarray = field(init=False, repr=False)
    _sorted: np.ndarray = field(init=False, repr=False)
    _row_of: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        is_number = pa.types.is_integer(self.values.type)
        numbers = self.values.to_numpy() if is_number else np.empty(0, np.int64)
        order = np.argsort(numbers, kind="stable")
        words = {} if is_number else {word: at + RESERVED_ROWS for at, word in enumerate(self.values.to_pylist())}
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_sorted", numbers[order])
        object.__setattr__(self, "_row_of", words)

    def rows(self, values: pa.Array) -> np.ndarray:
        rows = np.full(len(values), OTHER_ROW, np.int64)
        present = values.drop_null()
        rows[_is_present(values)] = (
            self._rows_of_numbers(present.to_numpy())
            if pa.types.is_integer(values.type)
            else self._rows_of_words(present)
        )
        return rows

    def _rows_of_numbers(self, numbers: np.ndarray) -> np.ndarray:
        rows = np.full(len(numbers), OTHER_ROW, np.int64)
        if len(self._sorted):
            at = np.minimum(np.searchsorted(self._sorted, numbers), len(self._sorted) - 1)
            found = self._sorted[at] == numbers
            rows[found] = self._order[at[found]] + RESERVED_ROWS
        return rows

    def _rows_of_words(self, words: pa.Array) -> np.ndarray:
        encoded = words.dictionary_encode()
        known = [self._row_of.get(word, OTHER_ROW) for word in encoded.dictionary.to_pylist()]
        return np.array(known, np.int64)[encoded.indices.to_numpy()]


def _is_present(values: pa.Array) -> np.ndarray:
    return values.is_valid().to_numpy(zero_copy_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What became of a field's values.

    Attributes:
      values: those that are kept, the most frequent first, equally frequent ones in ascending order.
      counts: int64, how often each of them occurs.
      num_seen: distinct values in the text.
    """

    values: pa.Array
    counts: np.ndarray
    num_seen: int


def counts_of(parts: Sequence[pa.Array]) -> pa.Table:
    """How often each value that is not null occurs: columns `value` and `count`."""
    present = pa.table({"value": pa.chunked_array([part.drop_null() for part in parts])})
    return summed(present.append_column("count", pa.array(np.ones(present.num_rows, np.int64))))


def summed(counts: pa.Table) -> pa.Table:
    """The same counts with every value once, in ascending order."""
    grouped = counts.group_by("value").aggregate([("count", "sum")]).rename_columns(["value", "count"])
    return grouped.sort_by("value")


def choose_vocabulary(counts: pa.Table, *, min_count: int, max_rows: int | None) -> Vocabulary:
    """Keeps the values that occur at least `min_count` times, and of those the most frequent if the table has a largest size.

    Args:
      counts: every value once.
      max_rows: most rows of the table, the reserved ones included.
    """
    frequent = counts.filter(pc.greater_equal(counts["count"], min_count))  # pyright: ignore[reportAttributeAccessIssue]
    ordered = frequent.sort_by([("count", "descending"), ("value", "ascending")])
    kept = ordered if max_rows is None else ordered.slice(0, max_rows - RESERVED_ROWS)
    return Vocabulary(values=kept["value"].combine_chunks(), counts=kept["count"].to_numpy(), num_seen=counts.num_rows)


def read_vocabulary(path: Path, kind: pa.DataType) -> pa.Array:
    """The values of a vocabulary file: its lines as text, or as the decimal numbers that they are. Only a newline ends a line."""
    text = path.read_bytes().decode("utf-8")
    lines = text.removesuffix("\n").split("\n") if text else []
    return pa.array(lines, pa.string()).cast(kind)
