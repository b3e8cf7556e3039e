"""Arrow columns of one row group to a `Batch`, and the checks of types and values on the way.

This is where raw values become row ids (`IdColumn`) and model inputs (`DenseColumn`). Whole columns at a time, no loop over rows; a
value that is refused is looked up afterwards, so that the error names its file, row group, row and column. Reading the file is the
business of `workers.input`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa

from embedding.ragged import Ragged
from workers.batch import Batch
from workers.data_config import DenseColumn, IdColumn, ParquetData
from workers.input_errors import InputError
from workers.mixing import mix64


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where decoded rows come from, for messages. `first_row` counts in the file."""

    path: str
    row_group: int
    first_row: int

    def refuse(self, *, row: int, column: str, found: str, remedy: str) -> NoReturn:
        """Raises the error for one value; `row` counts in the row group."""
        raise InputError(
            f"Found {found} in {self.path}, row group {self.row_group}, row {self.first_row + row}, column {column!r}. {remedy}"
        )


def check_schema(schema: pa.Schema, data: ParquetData, *, path: str) -> None:
    """Checks that a file has every declared column in a type that can be decoded.

    Raises:
      InputError: a column is missing or of a wrong type.
    """
    _check_column(schema, data.label, _is_number, "an integer, float or boolean column", path=path)
    for column in data.dense_columns:
        _check_column(schema, column.name, _is_number, "an integer, float or boolean column", path=path)
    for source in data.id_columns.values():
        _check_column(schema, source.column, _is_ids, "a column of integers or of lists of integers", path=path)
    if data.sample_weight is not None:
        _check_column(schema, data.sample_weight, _is_number, "an integer, float or boolean column", path=path)
    if data.sample_id is not None:
        _check_column(schema, data.sample_id, pa.types.is_integer, "a column of integers", path=path)


def decode(table: pa.Table, data: ParquetData, *, origin: Origin, first_position: int) -> Batch:
    """Turns all rows of one row group into a batch, in their order in the file.

    Args:
      table: the columns `data.columns`.
      data: resolved, so every `IdColumn` knows its vocabulary size.
      origin: where the rows come from.
      first_position: sample id of the first row where `data.sample_id` is None.

    Raises:
      InputError: a value is refused: an id outside its vocabulary, a null or non-finite label or weight, a non-finite dense number.
    """
    num_rows = table.num_rows
    # One array for all features with one id a row: see the comment in workers/batch.py.
    one_each = np.arange(num_rows + 1)
    dense = np.empty((num_rows, len(data.dense_columns)), np.float32)
    for at, column in enumerate(data.dense_columns):
        dense[:, at] = _dense(_flat(table, column.name), column, origin=origin)
    weights = np.ones(num_rows, np.float32)
    if data.sample_weight is not None:
        weights = _required_number(_flat(table, data.sample_weight), data.sample_weight, origin=origin)
        _refuse_first(weights < 0, weights, data.sample_weight, "Weights are 0 or more. Clean the data.", origin=origin)
    sample_ids = np.arange(first_position, first_position + num_rows)
    if data.sample_id is not None:
        sample_ids = _sample_ids(_flat(table, data.sample_id), data.sample_id, origin=origin)
    return Batch(
        dense=dense,
        labels=_required_number(_flat(table, data.label), data.label, origin=origin),
        weights=weights,
        features={
            name: _ids(_flat(table, source.column), source, one_each=one_each, origin=origin)
            for name, source in data.id_columns.items()
        },
        sample_ids=sample_ids,
    )


def hashed_rows(values: np.ndarray, *, vocabulary_size: int, salt: int = 0) -> np.ndarray:
    """int64 rows of `IdColumn(mode="hash")`: 1 + mix64(value, salt) mod (vocabulary_size - 1), so row 0 is never hit."""
    return (mix64(values, salt=salt) % np.uint64(vocabulary_size - 1)).astype(np.int64) + 1


def _flat(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    # Combining copies even a single chunk, which is what a row group nearly always is.
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _dense(column: pa.Array, declared: DenseColumn, *, origin: Origin) -> np.ndarray:
    numbers = _numbers(column.fill_null(_zero_of(column)) if column.null_count else column)
    if declared.transform == "log1p":
        # maximum() hands NaN on, so a NaN is still seen below.
        numbers = np.log1p(np.maximum(numbers, np.float32(0)))
    remedy = "Dense numbers are finite; a missing one is null. Write null, or clean the data."
    _refuse_first(~np.isfinite(numbers), numbers, declared.name, remedy, origin=origin)
    return numbers


def _required_number(column: pa.Array, name: str, *, origin: Origin) -> np.ndarray:
    _refuse_nulls(column, name, origin=origin)
    numbers = _numbers(column)
    _refuse_first(~np.isfinite(numbers), numbers, name, "Labels and weights are finite. Clean the data.", origin=origin)
    return numbers


def _sample_ids(column: pa.Array, name: str, *, origin: Origin) -> np.ndarray:
    _refuse_nulls(column, name, origin=origin)
    ids = column.to_numpy(zero_copy_only=False)
    bad = (ids < 0) | (ids > np.iinfo(np.int64).max)
    _refuse_first(
        bad, ids, name, "Sample ids are 0 or more and fit int64; -1 means padding. Renumber them.", origin=origin
    )
    return ids.astype(np.int64)


def _numbers(column: pa.Array) -> np.ndarray:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    # A number beyond float32 becomes infinite here and is refused by the check for finite ones, with its row.
    with np.errstate(over="ignore"):
        return column.to_numpy(zero_copy_only=False).astype(np.float32)


def _zero_of(column: pa.Array) -> pa.Scalar:
    return pa.scalar(False if pa.types.is_boolean(column.type) else 0, column.type)


def _ids(column: pa.Array, source: IdColumn, *, one_each: np.ndarray, origin: Origin) -> Ragged:
    """Rows of one feature. Ids are checked before nulls are placed, so row 0 for a missing value needs no check."""
    is_list = not pa.types.is_integer(column.type)
    items, lengths = column, None
    if is_list:
        # flatten() honours slices, and skips whatever lies under a null list.
        items, lengths = column.flatten(), _list_lengths(column)
    present = items.drop_null() if items.null_count else items
    raw = present.to_numpy(zero_copy_only=False)
    rows = _rows(raw, source, row_of=lambda at: _row_of_present(items, lengths, at), origin=origin)
    if items.null_count or column.null_count:
        return _with_missing(rows, items, column, lengths, source)
    if lengths is None:
        return Ragged(rows, one_each)
    return Ragged(rows, _splits(lengths))


def _rows(raw: np.ndarray, source: IdColumn, *, row_of: Callable[[int], int], origin: Origin) -> np.ndarray:
    """int64 rows of the table for the values that are present. `row_of` finds the sample of the k-th of them."""
    size = source.vocabulary_size
    if size is None:
        raise InputError(
            f"Found no vocabulary_size for id column {source.column!r}. Expected the rows of its table. Call ParquetData.resolved first."
        )
    if source.mode == "hash":
        return hashed_rows(raw, vocabulary_size=size, salt=source.salt)
    if len(raw) and (raw.min() < 0 or raw.max() >= size):
        at = int(np.argmax((raw < 0) | (raw >= size)))
        remedy = f"Ids are 0 to {size - 1}. Enlarge vocabulary_size, hash the column (mode='hash'), or clean the data."
        origin.refuse(row=row_of(at), column=source.column, found=f"id {raw[at]}", remedy=remedy)
    return raw.astype(np.int64, copy=False)


def _with_missing(
    rows: np.ndarray, items: pa.Array, column: pa.Array, lengths: np.ndarray | None, source: IdColumn
) -> Ragged:
    """Places or leaves out the nulls: of scalars, of ids in lists, and of whole lists."""
    item_is_null = _null_mask(items)
    keeps_missing = source.missing == "zero"
    lengths = np.ones(len(items), np.int64) if lengths is None else lengths
    # Row 0 stands where an id is missing, so the present ones only have to be put around it.
    placed = np.zeros(len(items), np.int64)
    placed[~item_is_null] = rows
    kept = np.ones(len(items), bool) if keeps_missing else ~item_is_null
    kept_before = np.zeros(len(items) + 1, np.int64)
    np.cumsum(kept, out=kept_before[1:])
    splits = kept_before[_splits(lengths)]
    bags = Ragged(placed[kept], splits)
    if keeps_missing and items is not column and column.null_count:
        return _insert_zero_rows(bags, _null_mask(column))
    return bags


def _insert_zero_rows(bags: Ragged, where: np.ndarray) -> Ragged:
    """Gives the samples named by a mask, whose bags are empty, one id 0 each."""
    values = np.insert(bags.values, bags.row_splits[:-1][where], 0)
    return Ragged(values, _splits(np.diff(bags.row_splits) + where))


def _row_of_present(items: pa.Array, lengths: np.ndarray | None, at: int) -> int:
    """The sample that holds the `at`-th id that is not null."""
    item = int(np.flatnonzero(~_null_mask(items))[at])
    return item if lengths is None else int(np.searchsorted(_splits(lengths), item, side="right")) - 1


def _list_lengths(column: pa.Array) -> np.ndarray:
    if column.null_count == 0 and not pa.types.is_fixed_size_list(column.type):
        return np.diff(column.offsets.to_numpy()).astype(np.int64)
    return column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _splits(lengths: np.ndarray) -> np.ndarray:
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return splits


def _null_mask(column: pa.Array) -> np.ndarray:
    return column.is_null().to_numpy(zero_copy_only=False)


def _refuse_nulls(column: pa.Array, name: str, *, origin: Origin) -> None:
    if column.null_count:
        row = int(np.argmax(_null_mask(column)))
        remedy = "Labels, weights and sample ids are never null. Fill the column, or drop the row before training."
        origin.refuse(row=row, column=name, found="null", remedy=remedy)


def _refuse_first(bad: np.ndarray, values: np.ndarray, name: str, remedy: str, *, origin: Origin) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        origin.refuse(row=row, column=name, found=str(values[row]), remedy=remedy)


def _check_column(
    schema: pa.Schema, name: str, accepts: Callable[[pa.DataType], bool], expected: str, *, path: str
) -> None:
    at = schema.get_all_field_indices(name)
    if len(at) != 1:
        found = f"{len(at)} columns" if at else "no column"
        raise InputError(
            f"Found {found} named {name!r} in {path}. Expected {expected} of that name among {schema.names}. "
            "Correct the name in ParquetData, or write the column."
        )
    if not accepts(schema.field(at[0]).type):
        raise InputError(
            f"Found column {name!r} of type {schema.field(at[0]).type} in {path}. Expected {expected}. "
            "Cast it when the files are written; strings and dictionaries need integer codes first."
        )


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _is_ids(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return pa.types.is_integer(kind.value_type if is_list else kind)
