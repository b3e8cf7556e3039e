"""What a feature's ids are made of before they become rows: buckets of numbers, values of several columns crossed into
one, and weights of ids. All are functions of one row of the data.

A *key* stands for a value: an integer itself, text by `string_keys`, a time by its whole units, a number with
boundaries by its bucket. The key of crossed values begins with mix(number of columns). Each key is folded in, in the
order of the columns: key = mix(key xor that key). Of lists, every value of one column is crossed with every value of
the others, the values of the last column running fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute

from podembed.embedding.hashing import mix_word
from podembed.workers.columns.numbers import numbers_of
from podembed.workers.columns.string_keys import string_keys
from podembed.workers.columns.vocabulary import text_of
from podembed.workers.data.bad_rows import RowFaults
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.times import is_time

# Its functions are made when it is imported, so type checkers do not know them.
pc: Any = pyarrow.compute

_NO_OFFSET = np.uint64(0)


def bucket_numbers(column: pa.Array, source: IdColumn, faults: RowFaults) -> pa.Array:
    """int64 numbers of buckets, or lists of them, in the place of numbers or times. Nulls stay.

    Raises:
      InputError: a number is NaN, and malformed rows are not tolerated.
    """
    items = column.flatten() if is_list(column.type) else column
    is_null = null_mask(items)
    if is_time(items.type):
        numbers = source.scale.numbers(items)
    else:
        numbers = _float64(items)
    is_bad = np.isnan(numbers) & ~is_null
    if is_bad.any():
        rows, _ = bad_rows_of(column, is_bad)
        reason = "A number that is not a number has no bucket; a missing one is null. Write null, or clean the data."
        faults.add(rows, source.column, found=lambda _: "nan", reason=reason)
    first = source.first_row if source.mode == "as_is" else 0
    buckets = np.searchsorted(np.array(source.boundaries), numbers, side="right") + first
    return relisted(column, pa.array(buckets, pa.int64(), mask=is_null if items.null_count else None))


def crossed_keys(columns: Sequence[pa.Array]) -> pa.Array:
    """int64 keys of the values of several columns, or lists of them; a null where a value is null or empty text.

    Args:
      columns: integers or large strings, or lists of them, of the same rows. A null in the place of a list is one
        missing value.
    """
    parts = [_keys_of(column) for column in columns]
    if any(part.lengths is not None for part in parts):
        parts, splits = _all_pairs(parts)
    else:
        splits = None
    keys = np.full(len(parts[0].keys), mix_word(np.uint64(len(parts)), _NO_OFFSET), np.uint64).view(np.int64)
    is_missing = np.zeros(len(keys), bool)
    for part in parts:
        _fold(keys, part.keys)
        if part.is_missing is not None:
            is_missing |= part.is_missing
    made = pa.array(keys, mask=is_missing if is_missing.any() else None)
    return made if splits is None else pa.LargeListArray.from_arrays(pa.array(splits), made)


def weights_of(
    weights: pa.Array, name: str, column: pa.Array, is_missing: Callable[[], np.ndarray], faults: RowFaults
) -> np.ndarray:
    """float32 weights of all ids of a column, in the order of the file; 1 for ids of rows that are malformed.

    Args:
      weights: numbers, or lists of them where the ids are lists.
      column: the ids.
      is_missing: which items of the column are no ids; their weights may be null.

    Raises:
      InputError: a row has more or fewer weights than ids, or one is null or not finite; and malformed rows are not
        tolerated.
    """
    items = weights.flatten() if is_list(weights.type) else weights
    lengths, expected = list_lengths(weights), list_lengths(column)
    bad = lengths != expected
    reason = "A row has as many weights as ids. Clean the data."
    faults.add(bad, name, found=lambda row: f"{lengths[row]} weights of {expected[row]} ids", reason=reason)
    # Those of rows with another number of weights are left out, so that the others lie beside their ids.
    numbers = np.ones(int(expected.sum()), np.float32)
    fits, given = np.repeat(~bad, expected), np.repeat(~bad, lengths)
    is_null = null_mask(items)
    raw = numbers_of(items.fill_null(pa.scalar(False if pa.types.is_boolean(items.type) else 0, items.type)))
    numbers[fits] = np.where(is_null, np.float32(1), raw)[given]
    wrong = ~np.isfinite(numbers)
    if is_null.any():
        wrong[fits] |= is_null[given] & ~is_missing()[fits]
    if wrong.any():
        rows, first = bad_rows_of(column, wrong)
        reason = "Weights of ids are finite, and never null. Clean the data."
        faults.add(rows, name, found=lambda row: _shown(numbers[first[row]]), reason=reason)
    return numbers


def _shown(number: np.float32) -> str:
    return str(number) if not np.isfinite(number) else "null"


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """int64 keys of a column's values; which are missing; and how many each row has, where not all have one."""

    keys: np.ndarray
    is_missing: np.ndarray | None
    lengths: np.ndarray | None


def _keys_of(column: pa.Array) -> _Keys:
    if is_list(column.type) and column.null_count:
        column = pc.cast(column, pa.large_list(column.type.value_type))
        column = pc.if_else(column.is_valid(), column, pa.scalar([None], column.type))
    items = column.flatten() if is_list(column.type) else column
    lengths = list_lengths(column) if is_list(column.type) else None
    if pa.types.is_integer(items.type):
        is_missing = null_mask(items) if items.null_count else None
        filled = items.fill_null(0) if items.null_count else items
        return _Keys(filled.to_numpy(zero_copy_only=False).astype(np.int64, copy=False), is_missing, lengths)
    filled = items.fill_null("") if items.null_count else items
    text, offsets = text_of(filled)
    keys = np.empty(len(filled), np.int64)
    string_keys(text, offsets, keys)
    is_missing = np.diff(offsets) == 0
    return _Keys(keys, is_missing if is_missing.any() else None, lengths)


def _all_pairs(parts: Sequence[_Keys]) -> tuple[list[_Keys], np.ndarray]:
    """The parts with an item for each combination of a row's values, and the offsets of the rows."""
    num_rows = next(len(part.lengths) for part in parts if part.lengths is not None)
    lengths = [np.ones(num_rows, np.int64) if part.lengths is None else part.lengths for part in parts]
    counts = np.prod(lengths, axis=0)
    splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    row = np.repeat(np.arange(num_rows), counts)
    place = np.arange(int(splits[-1])) - splits[row]
    made: list[_Keys] = []
    for part, length in zip(reversed(parts), reversed(lengths), strict=True):
        item = (np.cumsum(length) - length)[row] + place % length[row]
        place //= length[row]
        made.append(_Keys(part.keys[item], None if part.is_missing is None else part.is_missing[item], None))
    return made[::-1], splits


@numba.njit(nogil=True, cache=True)
def _fold(keys: np.ndarray, others: np.ndarray) -> None:
    """keys[i] = mix(keys[i] xor others[i]), int64."""
    for i in range(len(keys)):
        keys[i] = np.int64(mix_word(np.uint64(keys[i]) ^ np.uint64(others[i]), _NO_OFFSET))


def _float64(items: pa.Array) -> np.ndarray:
    """Numbers as float64; 0 for nulls."""
    if pa.types.is_boolean(items.type):
        items = items.cast(pa.uint8())
    if items.null_count:
        items = items.fill_null(pa.scalar(0, items.type))
    return items.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def list_lengths(column: pa.Array) -> np.ndarray:
    """int64, how many values each row has: one where they are no lists, none for a null instead of a list."""
    if not is_list(column.type):
        return np.ones(len(column), np.int64)
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def null_mask(column: pa.Array) -> np.ndarray:
    return column.is_null().to_numpy(zero_copy_only=False)


def relisted(column: pa.Array, items: pa.Array) -> pa.Array:
    """Other items in the lists of a column; the items where it has no lists."""
    if not is_list(column.type):
        return items
    splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(list_lengths(column))])
    mask = pa.array(null_mask(column)) if column.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(splits), items, mask=mask)


def bad_rows_of(column: pa.Array, is_bad: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
    """A mask of the rows with a bad item, and the first bad item of each.

    Args:
      column: column of lists, or not.
      is_bad: bool, by item.
    """
    items = np.flatnonzero(is_bad)
    rows = np.searchsorted(np.cumsum(list_lengths(column)), items, side="right")
    mask = np.zeros(len(column), bool)
    mask[rows] = True
    return mask, dict(zip(rows[::-1].tolist(), items[::-1].tolist(), strict=True))
