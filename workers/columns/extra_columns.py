"""Columns that a model gets by name: numbers, integers, vectors and lists of one Arrow column, as arrays of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from podembed.workers.columns.column_kernels import frozen, take_padded
from podembed.workers.columns.numbers import filled, numbers_of, take_dense
from podembed.workers.columns.raw_values import is_list
from podembed.workers.data.bad_rows import RowFaults
from podembed.workers.data.columns import DenseColumn
from podembed.workers.data.extra_columns import ExtraColumn, IntegerColumn, ListColumn, VectorColumn
from podembed.workers.data.times import TimeScale, is_time, shown

# Its functions are made when it is imported, so type checkers do not know them.
pc: Any = pyarrow.compute

_INT32, _INT64 = np.iinfo(np.int32), np.iinfo(np.int64)


def accepts(kind: pa.DataType, declared: IntegerColumn | VectorColumn | ListColumn) -> bool:
    """Whether a column of that type becomes what is declared."""
    if pa.types.is_null(kind):
        return True
    if isinstance(declared, IntegerColumn):
        return _is_whole(kind, declared.scale)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    item = kind.value_type
    if pa.types.is_null(item):
        return True
    if isinstance(declared, ListColumn) and (declared.dtype != "float32" or declared.scale != TimeScale()):
        return _is_whole(item, declared.scale)
    return pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item)


def expected(declared: IntegerColumn | VectorColumn | ListColumn) -> str:
    """What is accepted, in words."""
    if isinstance(declared, IntegerColumn):
        return "a column of integers, or of times"
    if isinstance(declared, VectorColumn):
        return f"a column of lists of {declared.size} numbers"
    return "a column of lists of numbers" if declared.dtype == "float32" else "a column of lists of integers or times"


def take_extra(column: pa.Array, declared: ExtraColumn, order: np.ndarray, faults: RowFaults) -> dict[str, np.ndarray]:
    """The arrays `[len(order), ...]` of one extra column, by their names in a batch.

    Raises:
      InputError: a value is refused, and malformed rows are not tolerated.
    """
    if isinstance(declared, DenseColumn):
        numbers = np.empty(len(order), np.float32)
        take_dense(column, declared, order, numbers, faults)
        return {declared.name: numbers}
    if isinstance(declared, IntegerColumn):
        whole, is_beyond = _whole(column, declared.scale, declared.dtype)
        if is_beyond.any():
            reason = f"Its numbers are {declared.dtype}. Declare dtype='int64', or another unit or origin."
            faults.add(is_beyond, declared.name, found=lambda row: shown(column[row]), reason=reason)
        whole[_null_mask(column)] = declared.missing
        return {declared.name: _stored(whole, declared.dtype)[order]}
    return _take_lists(column, declared, order, faults)


def _take_lists(
    column: pa.Array, declared: VectorColumn | ListColumn, order: np.ndarray, faults: RowFaults
) -> dict[str, np.ndarray]:
    if not is_list(column.type):
        # A column without a value.
        column = pa.nulls(len(column), pa.list_(pa.int64()))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    values, is_bad, reason = _values(column.flatten(), declared)
    if is_bad.any():
        bad_items = np.flatnonzero(is_bad)
        rows = np.searchsorted(starts + lengths, bad_items, side="right")
        bad_rows = np.zeros(len(column), bool)
        bad_rows[rows] = True
        first = dict(zip(rows[::-1].tolist(), bad_items[::-1].tolist(), strict=True))
        items = column.flatten()
        faults.add(bad_rows, declared.name, found=lambda row: shown(items[first[row]]), reason=reason)
    kept = np.minimum(lengths, declared.shape.inner[0])
    if isinstance(declared, VectorColumn):
        is_wrong = (lengths != declared.size) & ~_null_mask(column)
        reason = f"Vectors have {declared.size} numbers. Correct the size of its VectorColumn, or clean the data."
        faults.add(is_wrong, declared.name, found=lambda row: f"{lengths[row]} numbers", reason=reason)
    if isinstance(declared, ListColumn) and declared.keep == "last":
        starts = starts + lengths - kept
    out = declared.shape.zeros(len(order))
    width = out[0, :1].nbytes if len(out) else 4
    take_padded(
        frozen(values.reshape(-1).view(np.uint8), np.uint8),
        starts,
        kept,
        order,
        width,
        out.view(np.uint8).reshape(len(out), -1),
    )
    taken = {declared.name: out}
    if isinstance(declared, ListColumn):
        taken[declared.length_key] = kept.astype(np.int32)[order]
    return taken


def _values(items: pa.Array, declared: VectorColumn | ListColumn) -> tuple[np.ndarray, np.ndarray, str]:
    """The items of all lists as they are stored; a mask of those that are refused, and why."""
    if isinstance(declared, ListColumn) and (declared.dtype != "float32" or is_time(items.type)):
        whole, is_beyond = _whole(items, declared.scale, declared.dtype)
        return _stored(whole, declared.dtype), is_beyond, f"Its numbers are {declared.dtype}. Declare dtype='int64'."
    numbers = numbers_of(filled(items))
    return numbers, ~np.isfinite(numbers), "Numbers are finite; a missing one is null. Write null, or clean the data."


def _whole(items: pa.Array, scale: TimeScale, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """int64 of integers or times, 0 for nulls; and a mask of those that the type does not hold."""
    if is_time(items.type):
        whole, is_beyond = scale.whole(items)
        # Not the origin, which a null has there.
        is_null = _null_mask(items)
        whole, is_beyond = np.where(is_null, 0, whole), is_beyond & ~is_null
    else:
        raw = filled(items).to_numpy(zero_copy_only=False)
        is_beyond = raw > np.uint64(_INT64.max) if raw.dtype == np.uint64 else np.zeros(len(raw), bool)
        whole = raw.astype(np.int64)
    if dtype == "int32":
        is_beyond = is_beyond | (whole < _INT32.min) | (whole > _INT32.max)
    return np.array(whole, np.int64), is_beyond


def _stored(whole: np.ndarray, dtype: str) -> np.ndarray:
    """int32 `[n]`, float32 `[n]`, or the two halves of int64 as uint32 `[n, 2]`, the low one first."""
    return whole.astype("<i8").view("<u4").reshape(-1, 2) if dtype == "int64" else whole.astype(dtype)


def _is_whole(kind: pa.DataType, scale: TimeScale) -> bool:
    return scale.accepts(kind) if is_time(kind) else pa.types.is_integer(kind) and scale == TimeScale()


def _null_mask(column: pa.Array) -> np.ndarray:
    return column.is_null().to_numpy(zero_copy_only=False)
