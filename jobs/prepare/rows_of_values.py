"""From a field's values to rows of its table, by a hash or by a vocabulary; and the counting that makes a vocabulary.

Row 0 stands for a missing value with both, and with a vocabulary for one that it does not hold. The vocabulary's values
have the rows from 1 on in the order of its file: UTF-8, one value a line, the most frequent first. A row is thus the
number of the line, counted from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from podembed.workers.columns.id_columns import hashed_rows, vocabulary_rows
from podembed.workers.columns.vocabulary import Vocabulary

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
    """What `IdColumn(mode="hash")` makes of the same values (`workers.columns.id_columns`)."""

    num_rows: int
    salt: int

    def rows(self, values: pa.Array) -> np.ndarray:
        rows = np.full(len(values), OTHER_ROW, np.int64)
        present = _is_present(values)
        rows[present] = hashed_rows(values.drop_null(), vocabulary_size=self.num_rows, salt=self.salt)
        return rows


@dataclass(frozen=True, slots=True)
class VocabularyIds:
    """What `IdColumn(vocabulary=..., missing="zero")` makes of the same values (`workers.columns.id_columns`).

    Attributes:
      vocabulary: None if it has no value.
    """

    vocabulary: Vocabulary | None

    def rows(self, values: pa.Array) -> np.ndarray:
        rows = np.full(len(values), OTHER_ROW, np.int64)
        if self.vocabulary is not None:
            found = vocabulary_rows(values.drop_null(), self.vocabulary, num_reserved=RESERVED_ROWS)
            rows[_is_present(values)] = found
        return rows


def _is_present(values: pa.Array) -> np.ndarray:
    return values.is_valid().to_numpy(zero_copy_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenValues:
    """What became of a field's values.

    Attributes:
      values: values that are kept, the most frequent first, equally frequent ones in ascending order.
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


def choose_vocabulary(counts: pa.Table, *, min_count: int, max_rows: int | None) -> ChosenValues:
    """Keeps the values that occur at least `min_count` times, and of those the most frequent if the table has a largest
    size.

    Args:
      counts: every value once.
      max_rows: most rows of the table, the reserved ones included.
    """
    frequent = counts.filter(pc.greater_equal(counts["count"], min_count))  # pyright: ignore[reportAttributeAccessIssue]
    ordered = frequent.sort_by([("count", "descending"), ("value", "ascending")])
    kept = ordered if max_rows is None else ordered.slice(0, max_rows - RESERVED_ROWS)
    return ChosenValues(
        values=kept["value"].combine_chunks(), counts=kept["count"].to_numpy(), num_seen=counts.num_rows
    )


def read_vocabulary(path: Path) -> Vocabulary | None:
    """The values of a vocabulary file; None if no value was frequent enough to be in it.

    Raises:
      InputError: the file is damaged.
    """
    content = path.read_bytes()
    return Vocabulary(str(path), content) if content else None
