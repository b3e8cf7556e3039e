"""Dense numbers and extra columns as an exported model takes them: numbers, integers, vectors and lists of numbers.

The arithmetic is that of `workers.columns.extra_columns`, in numpy alone. The text of this file lies in
`served_model.py`, behind that of `exported_columns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podembed.serving.artifact.exported_columns import (
    ModelError,
    dense_of,
    finite_numbers,
    integers_of,
    items_of,
    whole_times,
    with_times,
)


def dense_block(columns: Mapping[str, Any], declared: Sequence[Mapping[str, Any]], num_samples: int) -> np.ndarray:
    """float32 `[n, num_dense]`. A column with one value counts for all samples."""
    parts = [np.zeros((num_samples, 0), np.float32)]
    for column in declared:
        values = columns[column["name"]]
        # Exports from before there were vectors do not have the field.
        if column.get("size") is None:
            parts.append(dense_of(values, column)[:, None])
        else:
            parts.append(_vectors(values, column))
    return np.concatenate([np.broadcast_to(part, (num_samples, part.shape[1])) for part in parts], axis=1)


def extra_of(values: Any, column: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays `[n, ...]` of one extra column, by their names among the inputs of the program."""
    name, kind = column["name"], column["kind"]
    if kind == "number":
        return {f"columns/{name}": dense_of(values, column)}
    if kind == "integer":
        return {f"columns/{name}": _whole(values, column)}
    if kind == "vector":
        return {f"columns/{name}": _vectors(values, column)}
    items, lengths, _ = _lists(values, name)
    # Exports from before there was a choice do not have the field.
    is_last = column.get("keep") == "last"
    out, kept = _padded(_items(items, column), lengths, column["size"], is_last=is_last)
    return {f"columns/{name}": out, f"columns/{name}/length": kept.astype(np.int32)}


def _vectors(values: Any, column: Mapping[str, Any]) -> np.ndarray:
    """float32 `[n, size]`."""
    name, size = column["name"], column["size"]
    items, lengths, is_null = _lists(values, name)
    wrong = lengths[(lengths != size) & ~is_null]
    if len(wrong):
        raise ModelError(f"Found {wrong[0]} numbers in column {name!r}. Expected {size}, or None for zeros.")
    return _padded(finite_numbers(items, name), lengths, size)[0]


def _padded(
    stored: np.ndarray, lengths: np.ndarray, size: int, *, is_last: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The first or last items of each list in a row of their own, with zeros behind them; and how many these are."""
    kept = np.minimum(lengths, size)
    out = np.zeros((len(lengths), size, *stored.shape[1:]), stored.dtype)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(sample)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if is_last:
        place -= np.repeat(lengths - kept, lengths)
    is_kept = (place >= 0) & (place < size)
    out[sample[is_kept], place[is_kept]] = stored[is_kept]
    return out, kept


def _items(items: Any, column: Mapping[str, Any]) -> np.ndarray:
    """The items of all lists as they are stored."""
    is_scaled = column["unit"] is not None or column["since"] is not None
    if column["dtype"] == "float32" and not is_scaled:
        return finite_numbers(items, column["name"])
    return _whole(items, column)


def _whole(values: Any, column: Mapping[str, Any]) -> np.ndarray:
    """Integers or times as they are stored: int32 or float32 `[n]`, or the two halves of int64 as uint32 `[n, 2]`, the
    low one first.
    """
    name = column["name"]
    array = with_times(values, column, name)
    if array.dtype.kind in "mM":
        whole, is_missing = whole_times(array, column, name)
    else:
        array, is_missing = integers_of(values)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ModelError(f"Found {array.dtype}{list(array.shape)} in column {name!r}. Expected integers or times.")
        if array.dtype == np.uint64 and (array > np.uint64(np.iinfo(np.int64).max)).any():
            raise ModelError(f"Found {array.max()} in column {name!r}. Expected integers that int64 holds.")
        whole = array.astype(np.int64)
    whole, dtype = np.where(is_missing, column["missing"], whole), column["dtype"]
    if dtype == "int64":
        return whole.astype("<i8").view("<u4").reshape(-1, 2)
    if dtype == "int32":
        outside = whole[whole != whole.astype(np.int32)]
        if len(outside):
            raise ModelError(f"Found {outside[0]} in column {column['name']!r}. Expected numbers that int32 holds.")
    return whole.astype(dtype)


def _lists(values: Any, name: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """The items of all lists one after another, how many each sample has, and which have no list."""
    if isinstance(values, np.ndarray) and values.dtype != object and values.ndim == 2:
        return values.reshape(-1), np.full(len(values), values.shape[1]), np.zeros(len(values), bool)
    lists = [[] if value is None else value for value in values]
    other = [value for value in lists if not isinstance(value, (list, tuple, np.ndarray))]
    if other:
        raise ModelError(f"Found {other[0]!r} in column {name!r}. Expected a list for each sample, or None.")
    is_null = np.array([value is None for value in values], bool)
    return items_of(lists, name), np.array([len(one) for one in lists], np.int64), is_null
